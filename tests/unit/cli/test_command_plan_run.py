"""`dips plan run`: what it takes, what it predicts, what it tells, and what it says to a person's mistake.

Ranks run in tests/slow/test_plan_run.py; here their reports are made from clocks that only waiting moves.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.manual_clock import ManualClock
from support.paced_play import play
from support.plan_command import EXAMPLE, printed, refused, told

from dips.core.errors import ConfigError, FatalError
from dips.local.supervisor import ChildSpec
from dips.planner.cluster import read_setup
from dips.planner.commands import plan_run
from dips.planner.costs import NS, Costs
from dips.planner.plan import make_plan, plan_json
from dips.planner.problem import Problem
from dips.planner.run.links import RankReport, read_job, read_report, write_job, write_report
from dips.planner.simulate import simulate

NOTHING_GIVEN: dict[str, float | None] = dict.fromkeys(plan_run.CASE)


@pytest.mark.parametrize(
    ("name", "makespan"),
    [("zb_v", 29.25), ("cross_ud/2", 31.0), ("dora_pp", 35.0), ("interleaved_zb_v", 42.5)],
)
def test_a_name_is_a_schedule_with_the_costs_of_the_sweep(name: str, makespan: float) -> None:
    source = plan_run.source_of(name, NOTHING_GIVEN)
    assert simulate(source.schedule, source.costs).makespan_ns / NS == makespan
    assert source.sites == ("site 0", "site 0", "site 1", "site 1")


def test_parts_become_stages_that_take_as_long_together() -> None:
    """An odd number of nanoseconds: parts differ by one, and backward passes go through them the other way."""
    whole = plan_run.source_of("cross_ud/1", NOTHING_GIVEN)
    cut = plan_run.source_of("cross_ud/4", NOTHING_GIVEN)
    assert cut.schedule.parts == 1
    assert cut.schedule.device_of_stage == tuple(d for d in range(4) for _ in range(4))
    assert sum(stage.f_ns for stage in cut.costs.stages) == sum(stage.f_ns for stage in whole.costs.stages)


@pytest.fixture(scope="module")
def planned() -> dict[str, Any]:
    problem = Problem(read_setup(EXAMPLE))
    plan = make_plan(problem.with_training(pipeline=4, microbatches=8, data=1), sensitivity=False)
    plain: dict[str, Any] = json.loads(json.dumps(plan_json(plan)))
    return plain


def test_a_plan_json_is_run_with_its_own_costs(tmp_path: Path, planned: dict[str, Any]) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(planned))
    source = plan_run.source_of(str(file), NOTHING_GIVEN)
    predicted = simulate(source.schedule, source.costs)
    assert predicted.makespan_ns / NS == pytest.approx(planned["chosen"]["iteration_s"], rel=1e-9)
    assert set(source.sites) == {"amsterdam", "stockholm"}
    assert source.note == ""


def test_a_plan_whose_replicas_take_turns_says_what_is_run(tmp_path: Path, planned: dict[str, Any]) -> None:
    planned = json.loads(json.dumps(planned))
    planned["chosen"]["sharing"] = "coordinated"
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(planned))
    assert plan_run.source_of(str(file), NOTHING_GIVEN).note == plan_run.ALONE


def test_a_plan_csv_takes_its_links_from_the_options(tmp_path: Path) -> None:
    file = tmp_path / "plan.csv"
    named = plan_run.source_of("interleaved_1f1b", NOTHING_GIVEN)
    file.write_text(named.schedule.to_csv())
    read = plan_run.source_of(str(file), NOTHING_GIVEN)
    assert (read.schedule.orders, read.costs.wires) == (named.schedule.orders, named.costs.wires)
    later = plan_run.source_of(str(file), {**NOTHING_GIVEN, "latency": 2.0})
    assert {wire.latency_ns for wire in later.costs.wires.values()} == {2 * NS}


def test_a_job_says_all_to_its_ranks(tmp_path: Path) -> None:
    source = plan_run.source_of("interleaved_1f1b", NOTHING_GIVEN)
    job = plan_run.job_of(source, 3, "gloo", 2.5)
    write_job(tmp_path, job)
    assert read_job(tmp_path) == job
    assert job.csv == source.schedule.to_csv()
    ways = {(link.source, link.target): link.resource for link in job.links}
    assert ways[3, 0] == ways[2, 1] != ways[1, 2] == ways[0, 3]
    assert set(ways.values()) == set(range(len(set(ways.values()))))


def outcome_of(folder: Path, name: str, error: float = 1e-15, late_ns: int = 0) -> plan_run.PlanRunOutcome:
    """As if the ranks had run twice, once with a clock that is late."""
    source = plan_run.source_of(name, NOTHING_GIVEN)
    source = plan_run.PlanSource(source.schedule, plan_run.scaled(source.costs, 4, 80.0), source.sites)
    once, again = play(folder, source), play(folder, source, late_ns)
    for rank, pair in enumerate(zip(once, again, strict=True)):
        write_report(folder, rank, RankReport(pair, 6, error, 256))
    reports = [read_report(folder, rank) for rank in range(4)]
    return plan_run.PlanRunOutcome(
        **plan_run.part_of(source, simulate(source.schedule, source.costs), reports),
        backend="gloo",
        forward_ms=80.0,
        tolerance=0.05,
    )


def test_a_run_that_keeps_its_plan(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, "zb_v", late_ns=500_000)
    found = plan_run.outcome_json(outcome)
    assert found["good"]
    assert found["predicted_s"] == pytest.approx(29.25 * 0.08)
    assert found["measured_s"][0] == found["predicted_s"] < found["measured_s"][1] == found["median_s"]
    assert 0 < found["error"] < 0.05
    assert found["gradients"] == {"parameters": 24, "largest_difference": 1e-15, "tolerance": 1e-10, "equal": True}
    assert [row["stages"] for row in found["of_ranks"]] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert all(row["busy_s"] == pytest.approx(1.92, rel=0.02) for row in found["of_ranks"])
    middle = next(row for row in found["of_links"] if (row["sender"], row["receiver"]) == (1, 2))
    assert middle["messages"] == 16
    assert middle["bytes"] == 16 * 256
    assert middle["occupied_s"] == pytest.approx(16 * 0.02)
    assert "within 5 %" in printed(plan_run.tell(outcome))
    assert "those of 24 parameters equal those of one process" in printed(plan_run.tell(outcome))


def test_a_run_that_misses_its_plan_says_that_the_machine_is_busy(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, "1f1b", late_ns=20_000_000)
    assert not outcome.good
    assert outcome.error > 0.05
    assert "OUTSIDE OF 5 %" in printed(plan_run.tell(outcome))
    assert "longer than their times: this machine is busy with something else" in printed(plan_run.tell(outcome))


def test_gradients_that_differ_are_no_success(tmp_path: Path) -> None:
    outcome = replace(outcome_of(tmp_path, "1f1b", error=1e-3), measured=())
    assert not outcome.good
    assert "24 parameters DIFFER from those of one process: largest difference 1.0e-03" in printed(
        plan_run.tell(outcome)
    )
    assert "measured_s" not in plan_run.outcome_json(outcome)


def test_the_trace_has_the_prediction_and_the_run(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, "1f1b", late_ns=500_000)
    files = plan_run.write_files(outcome, tmp_path)
    assert [file.name for file in files] == ["run.json", "trace.json", "measured.json"]
    assert json.loads(files[0].read_text()) == json.loads(json.dumps(plan_run.outcome_json(outcome)))
    events = json.loads(files[1].read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert "predicted, rank 2, site 1" in names
    assert "measured, rank 2, site 1" in names
    spans = {
        kind: max(
            event["ts"] + event["dur"] for event in events if event["ph"] == "X" and (event["pid"] >= 1000) == kind
        )
        for kind in (False, True)
    }
    assert spans[False] == pytest.approx(outcome.predicted.makespan_ns / 1e3)
    assert spans[True] == pytest.approx(outcome.median.makespan_ns / 1e3)


GONE = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:38191"


@pytest.mark.parametrize(
    ("codes", "logs", "kind", "sentence"),
    [
        ([1, -9, 1], [GONE, "", GONE], FatalError, r"rank 1 was ended by SIGKILL: start it again; its log is .*rank-1"),
        ([1, 1, None], [GONE, "ValueError: no", ""], FatalError, r"rank 1 ended with exit code 1: ValueError: no; its"),
        ([1, 2, 1], [GONE, "dips: no GPU", GONE], ConfigError, r"rank 1: no GPU$"),
        ([None, 1, None], ["", "", ""], FatalError, r"rank 1 ended with exit code 1: its log is empty"),
    ],
)
def test_the_rank_that_failed_first_is_told(
    tmp_path: Path, codes: list[int | None], logs: list[str], kind: type[Exception], sentence: str
) -> None:
    for rank, log in enumerate(logs):
        plan_run.log_of(tmp_path, rank).write_text(log + "\n")
    error = plan_run.failure(codes, tmp_path)
    assert type(error) is kind
    with pytest.raises(kind, match=sentence):
        raise error


class Ranks:
    """In place of ProcessSupervisor: of its ranks some end at the second look, with these codes, after the reports of a
    run that keeps its plan but for `late_ns`; others never do."""

    codes: dict[str, int]
    late_ns = 0

    def __init__(self, clock: object, on_event: object) -> None:
        self.looks, self.started = 0, dict[str, ChildSpec]()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def start(self, spec: ChildSpec) -> None:
        self.started[spec.name] = spec

    def poll(self) -> None:
        self.looks += 1
        if self.looks == 2 and not any(self.codes.values()):
            outcome_of(Path(self.started["rank 0"].command[-2]), "zb_v", late_ns=self.late_ns)

    def exit_code(self, name: str) -> int | None:
        assert name in self.started
        return self.codes.get(name) if self.looks >= 2 else None

    def ended(self, names: list[str]) -> bool:
        return all(self.exit_code(name) is not None for name in names)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Ranks]:
    monkeypatch.setattr(plan_run, "ProcessSupervisor", Ranks)
    monkeypatch.setattr("dips.planner.commands.plan_run.time.sleep", lambda seconds: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    Ranks.codes = dict.fromkeys(("rank 0", "rank 1", "rank 2", "rank 3"), 0)
    return Ranks


def test_what_all_ranks_report_is_told_and_their_files_stay_only_where_they_are_wanted(
    ranks: type[Ranks], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = told(capsys, "run", "zb_v", "--operation-ms", "80", "--repeats", "2", "--json")
    found = json.loads(out)
    assert (code, found["good"], len(found["measured_s"])) == (0, True, 2)
    assert found["predicted_s"] == found["measured_s"][0] == pytest.approx(29.25 * 0.08)
    assert list(tmp_path.iterdir()) == []
    assert told(capsys, "run", "zb_v", "--operation-ms", "80", "--out", tmp_path / "out")[0] == 0
    assert read_job(tmp_path / "out" / "ranks").repeats == 5
    code, out, _ = told(capsys, "run", "zb_v", "--check-gradients", "--out", tmp_path / "gradients")
    assert (code, read_job(tmp_path / "gradients" / "ranks").repeats) == (0, 0)
    assert f"wrote {tmp_path / 'gradients' / 'run.json'}" in out.splitlines()
    monkeypatch.setattr(Ranks, "late_ns", 500_000)
    assert [told(capsys, "run", "zb_v", "--tolerance", part)[0] for part in ("5", "0.01")] == [0, 1]
    Ranks.codes["rank 2"] = ConfigError.exit_code
    assert "rank 2 ended with exit code 2" in told(capsys, "run", "zb_v")[2]
    assert len(list(tmp_path.glob("dips-plan-run-*"))) == 1, "the logs say why"


def test_ranks_that_do_not_end_are_given_up(ranks: type[Ranks], tmp_path: Path) -> None:
    del Ranks.codes["rank 3"]
    clock, job = ManualClock(), plan_run.job_of(plan_run.source_of("zb_v", NOTHING_GIVEN), 1, "gloo", 1.0)
    with pytest.raises(FatalError, match="have not ended within 9 s"):
        plan_run.run_ranks(tmp_path, [job], 9.0, clock, lambda: clock.advance(2.0))
    assert clock.monotonic_s() == 10.0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["zb_x"], "zb_x is no file, nor a schedule: name a plan.json, a plan.csv, or one of gpipe, 1f1b, "),
        (["1f1b", "--ranks", "3"], "--ranks 3, but 1f1b has 4 devices: give --ranks 4, or make a plan for 3"),
        (["1f1b", "--stages", "65", "--sites", "1"], "65 ranks are too many processes for one machine: at most 64"),
        (["interleaved_1f1b", "--microbatches", "6"], "interleaved 1F1B needs a multiple of 4 microbatches"),
        (["1f1b", "--operation-ms", "0"], "--operation-ms 0 cannot be timed: give more than 0, up to 60000"),
        (["1f1b", "--repeats", "0"], "--repeats 0: give 1 to 1000; --check-gradients times nothing"),
        (["1f1b", "--tolerance", "100"], "--tolerance 100 is no percentage: give more than 0, below 100"),
        (["1f1b", "--backend", "mpi"], "--backend mpi is unknown: choose gloo or nccl"),
        (["CSV", "--stages", "4"], "--stages does not go with a plan.csv, which has its own: leave it out"),
        (["JSON", "--latency", "1"], "--latency does not go with a plan.json, which has its own: leave it out"),
        (["OLD"], "does not say what its operations cost (KeyError: 'costs'): make it again with dips plan FILE --out"),
        (["HALF"], "stage 0 has 1 F, 0 I, 0 W and 0 B of microbatch 1: it needs"),
        (["BINARY"], "cannot be read as a plan: "),
        (["/dev/zero"], "/dev/zero has more than 67108864 bytes, so it is not a plan: name a plan.json or a plan.csv"),
    ],
)
def test_a_persons_mistake_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], planned: dict[str, Any], arguments: list[str], sentence: str
) -> None:
    texts = {
        "CSV": "0F0,0B0\n1F0,1B0\n",
        "JSON": json.dumps(planned),
        "OLD": json.dumps({key: value for key, value in planned.items() if key != "costs"}),
        "HALF": "0F0,0F1,0B0\n",
        "BINARY": "",
    }
    word, *rest = arguments
    if word in texts:
        file = tmp_path / word
        file.write_bytes(b"\xff\xfe" if word == "BINARY" else texts[word].encode())
        arguments = [str(file), *rest]
    assert sentence in refused(capsys, "run", *arguments)


def test_forward_passes_without_a_time_cannot_be_timed() -> None:
    source = plan_run.source_of("1f1b", NOTHING_GIVEN)
    idle = Costs(tuple(replace(stage, f_ns=0) for stage in source.costs.stages))
    with pytest.raises(ConfigError, match="forward passes of the plan take no time"):
        plan_run.scaled(idle, 4, 80.0)
