"""A slave's knobs: wrong ones are told what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dips.core.config import load
from dips.core.errors import ConfigError
from dips.slave.config import SlaveConfig

GIVEN = {"run_id": "run", "slave_id": "s0", "directory": "d"}


def read(**knobs: Any) -> SlaveConfig:
    return load(SlaveConfig, "slave", environment={}, overrides=GIVEN | knobs).value


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"insecure": True, "data_host": "0.0.0.0"}, "not a loopback address"),
        ({"insecure": True, "master": "10.0.0.1:1"}, "not a loopback address"),
        ({"insecure": True, "advertise": "example.org:80"}, "not a loopback address"),
        ({"keys": Path("k"), "data_host": "0.0.0.0"}, "give advertise"),
        ({"master": "localhost"}, "write HOST:PORT"),
        ({"advertise": "127.0.0.1"}, "write HOST:PORT"),
        ({"run_id": "Not a name"}, "is not a name"),
        ({"slave_id": "../x"}, "is not a name"),
        ({"data_port": 70000}, "65535"),
        ({"memory_bytes": "much"}, "memory_bytes"),
        ({"memory_bytes": -1}, "negative"),
        ({"data_cpu": "last"}, "give shared, own, or a processor's number"),
        ({"data_cpu": "-1"}, "give shared, own, or a processor's number"),
        ({"data_cpu": "own", "data_threads": 2}, "leave data_threads out, or set data_cpu to shared"),
        ({"memory": 3}, "did you mean 'memory_bytes'"),
    ],
)
def test_a_wrong_knob_is_named_with_its_reason(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**knobs)
    assert words in str(caught.value)


def test_what_has_no_default_must_be_given() -> None:
    with pytest.raises(ConfigError, match="directory is not given"):
        load(SlaveConfig, "slave", environment={}, overrides={"run_id": "run", "slave_id": "s0"})


@pytest.mark.parametrize(
    ("processors", "asked", "used"), [(1, 0, 1), (2, 0, 1), (4, 0, 1), (8, 0, 2), (64, 0, 4), (2, 3, 3)]
)
def test_chunks_are_landed_by_one_thread_where_processors_are_few(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, processors: int, asked: int, used: int
) -> None:
    monkeypatch.setattr("dips.slave.config.usable_processors", lambda: processors)
    config = SlaveConfig(run_id="run", slave_id="s0", directory=tmp_path, data_threads=asked)
    assert config.data_threads_used == used


@pytest.mark.parametrize(
    ("processors", "asked", "used"),
    [({0, 1}, "shared", None), ({0, 1}, "own", 1), ({2, 3, 7}, "3", 3), ({9}, "own", 9)],
)
def test_the_data_ports_threads_are_placed_only_where_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, processors: set[int], asked: str, used: int | None
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: processors)
    assert read(data_cpu=asked).data_cpu_used == used


def test_threads_that_share_one_processor_are_not_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dips.slave.config.usable_processors", lambda: 64)
    assert (read().data_threads_used, read(data_cpu="own").data_threads_used) == (4, 1)


def test_processors_that_cannot_be_had_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2, 5})
    with pytest.raises(ConfigError, match="may run on 0-2,5 only: give one of these, or own"):
        _ = read(data_cpu="4").data_cpu_used
    monkeypatch.delattr("os.sched_getaffinity")
    with pytest.raises(ConfigError, match="does not let a process place its threads: leave it out"):
        _ = read(data_cpu="own").data_cpu_used


def test_the_tape_is_in_the_slaves_directory_unless_said_otherwise(tmp_path: Path) -> None:
    assert read(directory=tmp_path).tape_used == tmp_path / "s0.tape.jsonl"
    assert read(directory=tmp_path, tape=str(tmp_path / "my.jsonl")).tape_used == tmp_path / "my.jsonl"
    assert read(directory=tmp_path, tape="none").tape_used is None
