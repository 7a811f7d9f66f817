"""How SpanTrain's plan is printed."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from dips.planner.cluster import read_setup
from dips.planner.commands.plan_text import spantrain_text
from dips.planner.spantrain.report import SpanTrainReport, report_of


def lines_of(found: SpanTrainReport) -> list[str]:
    console = Console(file=StringIO(), width=200)
    for piece in spantrain_text(found):
        console.print(piece, highlight=False, markup=False)
    assert isinstance(console.file, StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_groups_devices_limits_and_the_out_of_order_variant() -> None:
    lines = lines_of(report_of(read_setup("spantrain-setting-1")))
    assert lines[0] == "SpanTrain: gpt2, 0.1244B parameters, 22 devices in 2 groups"
    assert lines[1] == "batch 256: 64 microbatches of 4 sequences, schedule compact_zb"
    assert lines[2] == "iteration: 17.41 s simulated (uncalibrated), 14.7 samples/s; Equation 1: 18.83 s"
    assert "group layers filling running waiting collectives Equation 1" in lines
    assert "2 (slowest) 11 252.5 ms 123.9 ms 17.42 s 1.037 s 18.83 s" in lines
    assert "2 2 end-4 x 1 symmetric DP and TP 7 to 11 1 1/4 1 540.8 MiB 63.87 MiB 10 GiB" in lines
    assert any(line.startswith("not possible: microbatches of 1: ") for line in lines)
    assert any(line.startswith("2,1 6,6 256 4 17.41 s ") for line in lines)
    assert lines[lines.index("what SpanTrain does not see or say:") + 1].startswith("Equation 1 says 18.83 s")
    assert not any("OUT OF ORDER" in line for line in lines)
    lines = lines_of(report_of(read_setup("spantrain-setting-1"), out_of_order=True, alternatives=False))
    assert lines[1].endswith("schedule compact_zb, OUT OF ORDER")
    assert "without a drain: 16.11 s from one iteration to the next, 7.5% less than with one" in lines
    assert any(line.startswith("stage 0: weights lack up to 2 iterations (63 microbatches") for line in lines)
    assert any("not equal to synchronous training" in line for line in lines)
