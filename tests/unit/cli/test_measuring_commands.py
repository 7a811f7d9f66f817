"""`dips profile`: what is measured is played, the rest is not."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.profiled import files

from dips.cli import main
from dips.core.errors import ConfigError
from dips.planner.profile import LayerTime, read_profile
from dips.planner.run import device_times
from dips.planner.run.device_times import MeasuredPart, MeasuringRounds

# ---- profile ----


@pytest.fixture
def problem(tmp_path: Path) -> str:
    """A problem of four layers on the devices fast and slow, and an older profile of it."""
    return str(files(tmp_path))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """What is to be measured; the nth forward pass takes n milliseconds."""
    asked: list[tuple[Any, ...]] = []

    def played(
        parts: Sequence[MeasuredPart],
        example: Callable[[int], Any],
        sizes: Sequence[int],
        rounds: MeasuringRounds,
        device: str,
    ) -> Iterator[LayerTime]:
        weights = next(parts[0].module.parameters())
        asked.append((weights.dtype, example(3).shape, [*sizes], rounds.counted, device, torch.get_num_threads()))
        for size in sizes:
            for number, one in enumerate(parts, 1):
                times = {"forward_ms": number, "input_gradient_ms": 10, "weight_gradient_ms": 20}
                where = {"part": one.part, "layer": one.layer, "count": one.count, "device": device}
                yield LayerTime(microbatch_sequences=size, **where, **times)

    threads = torch.get_num_threads()
    monkeypatch.setattr(device_times, "measure", played)
    yield asked
    torch.set_num_threads(threads)


def test_a_device_is_measured_and_what_is_there_of_others_stays(
    problem: str, tmp_path: Path, measured: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profile.toml"
    words = ["profile", "device", problem, "--out", str(out), "--device", "fast", "--rounds", "3", "--threads", "2"]
    assert main.run([*words, "--microbatch", "2, 1,2", "--dtype", "bfloat16"]) == 0
    assert measured == [(torch.bfloat16, (3, 128), [1, 2], 3, "fast", 2)]
    profile = read_profile(out)
    assert {row.device for row in profile.layers} == {"fast", "slow"}
    assert {row.microbatch_sequences for row in profile.layers if row.device == "fast"} == {1, 2}
    assert (len(profile.links), profile.head.model) == (2, "four")
    source = profile.head.source
    assert all(word in source for word in ("on ", "2 threads", "layers of bfloat16", "3 rounds"))
    told = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"fast embedding - 1 {times('1 ms')}" in told
    assert f"fast layer 0 to 3 2 {times('2 ms')}" in told
    assert f"fast output - 2 {times('3 ms')}" in told
    assert told[-1] == f"written: {out}"
    assert not [line for line in told if line.startswith("slow") or "differ" in line]


def times(forward: str, spread: str = "0.0%") -> str:
    return f"{forward} 10 ms 20 ms {spread}"


def test_ones_own_layers_are_measured_with_the_planned_microbatch_and_the_double(
    problem: str,
    tmp_path: Path,
    measured: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = (
        "import torch\ndef make():\n    return [torch.nn.Linear(2, 2) for _ in range(4)], lambda n: torch.zeros(n, 2)\n"
    )
    (tmp_path / "own_layers_of_a_command.py").write_text(made)
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "new.toml"
    words = ["profile", "device", problem, "--out", str(out), "--module", "own_layers_of_a_command:make"]
    assert main.run([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert measured == [(torch.float32, (3, 2), [2, 4], 10, "cpu", 1)]
    assert [(row["device"], row["layer"]) for row in told["layers"]] == [("cpu", n) for n in (0, 1, 2, 3)] * 2
    assert (told["links"], told["calibration"], told["measured"]["layers"]) == ([], None, 4)
    assert "own_layers_of_a_command:make, medians" in told["measured"]["source"]
    assert read_profile(out).head.sequence_tokens == 128


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rounds", "2"], "--rounds 2"),
        (["--rounds", "10001"], "--rounds 10001"),
        (["--threads", "0"], "--threads 0"),
        (["--threads", "1025"], "--threads 1025"),
        (["--dtype", "float16"], "--dtype float16"),
        (["--microbatch", "1,0"], "--microbatch 1,0"),
        (["--microbatch", "65537"], "--microbatch 65537"),
        (["--microbatch", "x"], "--microbatch x"),
        (["--module", "no_such_module:layers"], "no_such_module"),
    ],
)
def test_a_measurement_that_cannot_be_is_refused_and_nothing_is_written(
    words: list[str], said: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new.toml"
    assert main.run(["profile", "device", problem, "--out", str(out), *words]) == ConfigError.exit_code
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_profiles_of_several_machines_become_one_and_unsteady_ones_are_told(
    problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, out = (tmp_path / name for name in ("profile.toml", "other.toml", "both.toml"))
    second.write_text(first.read_text().replace('device = "fast"', 'device = "new"').replace('"here"', '"far"'))
    merge = ["profile", "merge", str(first), str(second), "--out", str(out)]
    assert main.run(merge) == 0
    told = capsys.readouterr().out
    profile = read_profile(out)
    assert {row.device for row in profile.layers} == {"fast", "slow", "new"}
    assert len(profile.links) == 4
    rows = [line.split() for line in told.splitlines()]
    assert ["fast", "layer", "0", "to", "2", "any"] in [row[:6] for row in rows]
    assert ["fast", "layer", "3", "any", "20", "ms"] in [row[:6] for row in rows]
    assert ["slow", "layer", "0", "to", "3", "5"] in [row[:6] for row in rows]
    assert ["fast", "embedding", "-"] in [row[:3] for row in rows]
    assert ["here", "there", "0.5", "Gbit/s", "7", "ms", "0.0%"] in rows
    assert "differ by up to" not in told
    second.write_text(second.read_text().replace("latency_ms = 7", "latency_ms = 7\nspread = 0.26"))
    assert main.run(merge) == 0
    assert "up to 26%" in capsys.readouterr().out
    assert main.run([*merge, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calibration"]["error"] == 0.03
    assert main.run(["profile", "merge", str(first), "--out", str(out)]) == ConfigError.exit_code


def test_a_serving_end_says_where_it_is_and_how_many_it_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[tuple[str, float]] = []

    def played(server: socket.socket, until_s: float) -> int:
        host, port = server.getsockname()
        served.append((f"{host}:{port}", until_s))
        return 3

    monkeypatch.setattr("dips.planner.commands.profile.serve", played)
    monkeypatch.setattr("dips.planner.commands.profile.time.monotonic", lambda: 1000.0)
    assert main.run(["profile", "serve", "--listen", "127.0.0.1:0", "--for", "604800"]) == 0
    ((address, until_s),) = served
    assert until_s == 605_800
    assert capsys.readouterr().out == f"answering on {address} for 604800 s\nanswered 3 peers\n"
    assert main.run(["profile", "serve", "--listen", "127.0.0.1:0"]) == 0
    assert served[1][1] == 1600
    for wrong in ("0", "604801"):
        assert main.run(["profile", "serve", "--listen", "127.0.0.1:0", "--for", wrong]) == ConfigError.exit_code
    assert len(served) == 2
