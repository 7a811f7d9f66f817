"""`dips plan` of a problem that can be planned by hand: all that its commands print, and published numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.plan_command import printed, refused, told
from support.two_stages import TWO

from dips.planner.cluster import read_setup
from dips.planner.commands import plan as command_plan
from dips.planner.commands.plan_text import spantrain_text
from dips.planner.problem import Problem
from dips.planner.spantrain.report import report_of
from dips.planner.tradeoff import tradeoff, tradeoff_json
from dips.planner.validation import PaperCheck

FEW = "crosspipe-figure-8"
"""A shipped setting that is planned at once."""


ASSUMED = (
    "assumed: a sender computes while it sends, and a receiver while it receives; after the gradient of the input 2/34 "
    "of an activation are released, the rest after that of the weights"
)
PLAN = f"""
crosspipe cannot see: stages and replicas other than the file's (dips plan tradeoff compares them)
two, 2.65e-06B parameters: 2 stages, 1 replicas, 2 microbatches each
chosen: 1f1b
iteration: 116 ms (104.4 ms to 127.6 ms), bubble 48.3%
stage site layers weights and optimizer activations of
0 here 1 20.62 KiB 56.25 KiB 1024 MiB
1 there 1 20.78 KiB 28.12 KiB 1024 MiB
here to there: 1.907 MiB an iteration
there to here: 1.907 MiB an iteration
schedule replicas on a link stages iteration slower by bubble
1f1b even 116 ms 0.0% 48.3%
gpipe even 116 ms 0.0% 48.3%
what would help, of the time of each microbatch:
microbatches x 2 25.5% less
bandwidth between sites x 2 8.3% less
latency between sites / 2 5.2% less
memory of activations x 2 0.0% less
{ASSUMED}
"""
TRADEOFF = f"""
two, 2.65e-06B parameters: stages x replicas = 2, 2 microbatches in all
calibrated: predicted times are meant +- 10.00%
stages x replicas long links carry schedule replicas on a link iteration slower by memory busiest link
1 x 2 gradients 1f1b 70.04 ms 0.0% 0% 5.176 KiB
2 x 1 activations 1f1b 116 ms 65.6% 0% 1.907 MiB
not possible: 1 x 2, long links carry activations: two.toml [[sites]] 1: here has devices = 1, its 1 stages need 2 \
(tensor x context x data = 2 each): give more devices, or split less
not possible: 2 x 1, long links carry gradients: data = 1 does not divide among 2 sites: each takes as many replicas
{ASSUMED}
"""
COMPARED = """
schedule two two
1f1b 0.116 0.116
gpipe 0.116 0.116
calibration +- 10.00% +- 10.00%
"""
SHOWN = """
0 |F0--F1-- D0--W0--D1--W1--|
1 | F0--D0--F1--D1--W0--W1--|
makespan 7 T_F, bubble 14.3%
"""
SWEPT = """
n_pp n_mb sites latency bandwidth memory schedule makespan activations bound
2 2 2 0.5 0 1 gpipe 10 2
2 2 2 0.5 0 1 1f1b 10 2
2 2 2 0.5 0 1 interleaved_1f1b 10.5 2
2 2 2 0.5 0 1 zb_h1 8 2
2 2 2 0.5 0 1 zb_v 8 2
2 2 2 0.5 0 1 cross_ud/1 8 2
2 2 2 0.5 0 1 cross_ud/2 8 2
2 2 2 0.5 0 1 cross_ud/4 8 2
2 2 2 0.5 0 1 cross_wave 8 2
2 2 2 0.5 0 1 compact_zb 9 2
2 stages, 2 microbatches, 2 sites, memory 1: the best, and how many times faster than 1f1b
latency \\ bandwidth 0
0.5 zb_h1 1.25x
uncalibrated: operations and messages have no measured overhead (dips plan calibrate)
"""


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("two.toml --system crosspipe", PLAN),
        ("tradeoff two.toml", TRADEOFF),
        ("compare two.toml two.toml", COMPARED),
        ("show plan.csv", SHOWN),
        ("sweep --stages 2 --microbatches 2 --sites 2 --latency 0.5", SWEPT),
    ],
)
def test_all_that_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, text: str
) -> None:
    """Times are those of tests/unit/planner/test_plan.py: test_a_whole_plan_by_hand. At both sites a whole pipeline of
    one microbatch takes 60 ms, and its weights and its gradients 5.02 ms each: 2,650 bytes over 1 Gbit/s, and 5 ms."""
    monkeypatch.chdir(tmp_path)
    Path("two.toml").write_text(TWO)
    Path("plan.csv").write_text("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n")
    code, out, error = told(capsys, *command.split())
    assert (code, error) == (0, "")
    ruled = (line for line in out.splitlines() if "──" not in line)
    assert " ".join(" ".join(ruled).split()) == " ".join(text.split())


def test_json_is_the_planners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two.toml").write_text(TWO)
    code, out, error = told(capsys, "tradeoff", "two.toml", "--json")
    assert (code, error) == (0, "")
    assert json.loads(out) == json.loads(json.dumps(tradeoff_json(tradeoff(Problem(read_setup("two.toml"))))))
    assert "-1 seconds are not a valid time" in refused(capsys, "tradeoff", "two.toml", "--seconds", "-1")


def test_show_as_json_gives_every_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text("0F0,0B0\n1F0,1B0\n")
    code, out, _ = told(capsys, "show", str(file), "--latency", "1", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["makespan"] == 8
    assert found["devices"][1] == [{"op": "1F0", "start": 2.0, "end": 3.0}, {"op": "1B0", "start": 3.0, "end": 5.0}]


def test_published_numbers_beside_ours(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [PaperCheck("the setting", "a ratio", 3.05, 2.9, 2.7, 3.2), PaperCheck("the setting", "another", 1.0, 2.0)]
    monkeypatch.setattr(command_plan, "all_checks", lambda paper, optimal_s: checks)
    code, out, _ = told(capsys, "validate")
    assert code == 0
    assert "the setting" in out
    assert "-4.9%" in out
    checks.append(PaperCheck("another setting", "a miss", 1.0, 0.5, 0.9, 1.1))
    code, out, _ = told(capsys, "validate", "--json")
    assert code == 1
    assert [row["missed"] for row in json.loads(out)] == [False, False, True]
    assert "MISSED" in told(capsys, "validate")[1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["compare", FEW], "takes at least two files: name another one"),
        (["validate", "--paper", "dapple"], "--paper 'dapple' is unknown: choose one of jeeves, crosspipe, "),
        (["validate", "--seconds", "0"], "--seconds 0 is no time"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sentence in refused(capsys, *arguments)


def test_spantrains_groups_devices_limits_and_the_out_of_order_variant() -> None:
    text = printed(spantrain_text(report_of(read_setup("spantrain-setting-1"))))
    assert text.startswith(
        "SpanTrain: gpt2, 0.1244B parameters, 22 devices in 2 groups batch 256: 64 microbatches of 4 sequences, "
        "schedule compact_zb iteration: 17.41 s simulated (uncalibrated), 14.7 samples/s; Equation 1: 18.83 s"
    )
    for part in (
        "group layers filling running waiting collectives Equation 1",
        "2 (slowest) 11 252.5 ms 123.9 ms 17.42 s 1.037 s 18.83 s",
        "2 2 end-4 x 1 symmetric DP and TP 7 to 11 1 1/4 1 540.8 MiB 63.87 MiB 10 GiB",
        "not possible: microbatches of 1: ",
        "2,1 6,6 256 4 17.41 s ",
        "what SpanTrain does not see or say: Equation 1 says 18.83 s",
    ):
        assert part in text
    assert "OUT OF ORDER" not in text
    text = printed(spantrain_text(report_of(read_setup("spantrain-setting-1"), out_of_order=True, alternatives=False)))
    for part in (
        "schedule compact_zb, OUT OF ORDER iteration",
        "without a drain: 16.11 s from one iteration to the next, 7.5% less than with one",
        "stage 0: weights lack up to 2 iterations (63 microbatches",
        "not equal to synchronous training",
    ):
        assert part in text
