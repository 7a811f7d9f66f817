"""The tape holds every event in full up to a kill."""

from __future__ import annotations

import json
import math
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from support.manual_clock import ManualClock

from dips.core.errors import ConfigError, FatalError, RefusalCode
from dips.core.ids import Version
from dips.core.observe.tape import Tape, read_chained, read_tape


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tapes" / "slave.tape.jsonl"


def test_an_event_is_one_line_with_head_and_fields(path: Path) -> None:
    clock = ManualClock(monotonic_s=2.0, wall_s=1000.0)
    with Tape(path, "slave", "s-0", clock) as tape:
        tape.write("staged", "c-1", push="a/1.1#1", landed_bytes=12)
        clock.advance(0.5)
        tape.write("prepared", "c-2")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [[*line][-1] for line in lines] == ["chain", "chain"]
    assert [{key: line[key] for key in line if key != "chain"} for line in lines] == [
        {"wall_s": 1000.0, "monotonic_s": 2.0, "role": "slave", "name": "s-0", "kind": "staged", "cause": "c-1",
         "push": "a/1.1#1", "landed_bytes": 12},
        {"wall_s": 1000.5, "monotonic_s": 2.5, "role": "slave", "name": "s-0", "kind": "prepared", "cause": "c-2"},
    ]  # fmt: skip


def test_values_of_every_kind_are_written(path: Path) -> None:
    with Tape(path, "r", "n", ManualClock()) as tape:
        tape.write(
            "all", "c", version=Version(1, 2), code=RefusalCode.BUSY, digest=b"\x00\xff", where=Path("/x"),
            loss=math.nan, bound=math.inf, losses=(1.5, None, True), names={"b", "a"}, by_name={"a": Version(1, 3)},
            elems=np.int64(5), norm=np.float32(0.5), text="ä\n\u2028",
        )  # fmt: skip
    [event] = read_tape(path)
    assert event["version"] == {"timeline": 1, "v": 2}
    assert (event["code"], event["digest"], event["where"]) == ("BUSY", "00ff", "/x")
    assert (event["loss"], event["bound"], event["losses"]) == (None, None, [1.5, None, True])
    assert (event["names"], event["by_name"]) == (["a", "b"], {"a": {"timeline": 1, "v": 3}})
    assert (event["elems"], event["norm"], event["text"]) == (5, 0.5, "ä\n\u2028")


@pytest.mark.parametrize("field", ["wall_s", "monotonic_s", "role", "name"])
def test_a_field_may_not_replace_the_head(path: Path, field: str) -> None:
    with Tape(path, "r", "n", ManualClock()) as tape:
        with pytest.raises(ValueError, match="has the name of a head key"):
            tape.write("x", "c", **{field: 1})
        tape.write("y", "c")
    assert [event["kind"] for event in read_tape(path)] == ["y"]


def test_a_tape_without_a_path_writes_nothing() -> None:
    with Tape(None, "r", "n", ManualClock()) as tape:
        tape.write("x", "c", value=object())


def test_a_closed_tape_drops_what_comes_late(path: Path) -> None:
    tape = Tape(path, "r", "n", ManualClock())
    tape.write("x", "c")
    tape.close()
    tape.close()
    tape.write("late", "c")
    assert [event["kind"] for event in read_tape(path)] == ["x"]


@pytest.mark.parametrize("torn", [b'{"kind":"half', b"x" * 200_000, b"{"])
@pytest.mark.parametrize("whole", [b'{"kind":"whole"}\n', b""])
def test_half_a_line_of_a_killed_life_is_left_out_and_cut_off(path: Path, torn: bytes, whole: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(whole + torn)
    before = ["whole"] if whole else []
    assert [event["kind"] for event in read_tape(path)] == before
    with Tape(path, "r", "n", ManualClock()) as tape:
        tape.write("next", "c")
    assert [event["kind"] for event in read_tape(path)] == [*before, "next"]


def test_lines_of_several_threads_do_not_mix(path: Path) -> None:
    def write_many(tape: Tape, i: int) -> None:
        for _ in range(50):
            tape.write("x", "c", i=i, fill="y" * 5000)

    with Tape(path, "r", "n", ManualClock()) as tape:
        threads = [threading.Thread(target=write_many, args=(tape, i)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(event["i"] for event in read_tape(path)) == sorted([0, 1, 2, 3] * 50)


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"tape .*/file/t\.jsonl cannot be written: .*; choose another path"):
        Tape(tmp_path / "file" / "t.jsonl", "r", "n", ManualClock())


@contextmanager
def room_for(path: Path, more_bytes: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + more_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_ends_who_must_not_lose_events_and_leaves_no_half_line(path: Path) -> None:
    with Tape(path, "slave", "s-0", ManualClock()) as tape:
        tape.write("first", "c")
        with room_for(path, 10), pytest.raises(FatalError, match=r"cannot be written .*: make room on its disk"):
            tape.write("second", "c")
        tape.write("third", "c")
    assert [event["kind"] for event in read_tape(path)] == ["first", "third"]


def test_who_may_lose_events_goes_on_says_so_once_and_tells_how_many(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Tape(path, "worker", "a", ManualClock(), may_lose=True) as tape:
        tape.write("first", "c")
        with room_for(path, 10):
            for _ in range(3):
                tape.write("lost", "c")
        tape.write("next", "c")
        tape.write("last", "c")
    assert [(event["kind"], event.get("lost")) for event in read_tape(path)] == [
        ("first", None), ("gap", 3), ("next", None), ("last", None),
    ]  # fmt: skip
    assert caplog.text.count("make room on its disk; until then its events are lost") == 1


def test_a_damaged_tape_is_named_with_its_line(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('{"kind":"a"}\n\n[1]\n{"kind":"b"}\n')
    with pytest.raises(ConfigError, match=r"line 3 of tape .* is not an event"):
        list(read_tape(path))
    with pytest.raises(ConfigError, match=r"tape .* cannot be read: No such file"):
        list(read_tape(path.with_name("none")))


def written(path: Path, count: int = 4) -> list[bytes]:
    for life in range(2):
        with Tape(path, "r", "n", ManualClock()) as tape:
            for number in range(count // 2):
                tape.write("x", "c", life=life, number=number)
    return path.read_bytes().splitlines(keepends=True)


def test_each_single_bit_that_changes_is_found(path: Path) -> None:
    whole = b"".join(written(path))
    for place in range(len(whole) * 8):
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=r"line \d of tape .*restore it from a copy"):
            list(read_tape(path))


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_line_that_was_taken_out_is_found(path: Path, gone: int) -> None:
    lines = written(path)
    path.write_bytes(b"".join(lines[:gone] + lines[gone + 1 :]))
    with pytest.raises(ConfigError, match=f"line {gone + 1} of tape .*, or one before it, is not what was written"):
        list(read_tape(path))


def test_lines_of_a_release_without_digests_are_read_and_told_apart(path: Path) -> None:
    lines = written(path)
    old = [line[: line.rindex(b',"chain"')] + b"}\n" for line in lines[:2]]
    path.write_bytes(b"".join(old))
    with Tape(path, "r", "n", ManualClock()) as tape:
        tape.write("x", "c")
    assert [vouched for _, vouched in read_chained(path)] == [False, False, True]
    path.write_bytes(path.read_bytes() + old[0])
    with pytest.raises(ConfigError, match=r"line 4 of tape .* is not an event"):
        list(read_tape(path))
