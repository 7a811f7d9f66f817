"""What a record says was judged is computed again, whatever the settings; mutants of JUDGE are caught by name."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from support.mutants import JUDGE_MUTANTS, Mutant, planted
from support.recording import Recording
from support.rounds import gram_of

from dips.core.ids import Version
from dips.judge.judgement import ClusterMemory, Judging, PenaltyMemory, pushes_of, round_of
from dips.judge.verify import check_records
from dips.lab.sim import seed_run as simulated
from dips.master.state.penalty import judge, round_tokens
from dips.master.state.penalty_types import PRESETS, DetectorState, JudgeInputs, Participant, PenaltyConfig
from dips.master.state.records import outer_step_of
from dips.master.state.rounds import judgement_to_json

CONFIGS = {
    **PRESETS,
    "auto clip": PenaltyConfig(clip_scope="auto", clip_window_rounds=4),
    "no detector": PenaltyConfig(detector="off", clip_norm=float("inf")),
    "tokens decay momentum": PenaltyConfig(momentum_scaling="tokens"),
    "delayed": PenaltyConfig.of("safe", outer_optimizer="delayed-nesterov", delay_rounds=3),
    "heavy ball": PenaltyConfig.of("safe", outer_optimizer="heavy-ball"),
    "averaging": PenaltyConfig.of("paper", outer_optimizer="averaging"),
    "quick": PenaltyConfig(warm_up_pushes=2, window_pushes=5, quarantine_after_flags=2, restart_after_rejections=3),
    "literal with rules": PenaltyConfig.of("paper-literal", quarantine_after_flags=2, restart_after_rejections=2),
}
ROUNDS = 120


class Run:
    """A master that judges random rounds and writes their records. state: as its ledger has it."""

    def __init__(self, config: PenaltyConfig, seed: int) -> None:
        self.config, self.rng = config, random.Random(seed)
        self.state = DetectorState.empty()
        self.version = Version(1, 0)
        self.n = 0

    def record(self, kind: str = "", says_state: bool = False) -> dict[str, Any]:
        rng = self.rng
        self.n += 1
        names = sorted(rng.sample("abcd", rng.choice((1, 2, 3, 4))))
        pushes = tuple(self._participant(name) for name in names)
        gram = gram_of([self._vector() for _ in names])
        live = frozenset("abcd") if rng.random() < 0.7 else frozenset("ab")
        rates = {name: rng.choice((50.0, 70.0)) for name in live} if rng.random() < 0.9 else {"a": 0.0}
        intervals_s = {name: rng.uniform(5.0, 20.0) for name in live if rng.random() < 0.8}
        t_round = round_tokens(rates, intervals_s)
        judged = judge(self.state, self.config, pushes, gram, live - self.state.quarantined, t_round)
        step = outer_step_of(self.config, 0.7, judged.scale, judged.rho, self.version) if judged.accepted else None
        of_rates, of_intervals = tuple(sorted(rates.items())), tuple(sorted(intervals_s.items()))
        rows = tuple(tuple(row) for row in gram)
        said = self.state if says_state else None
        inputs = JudgeInputs(self.config, 0.7, pushes, rows, tuple(sorted(live)), of_rates, of_intervals, t_round, said)
        kind = kind or ("COMMIT" if judged.accepted and rng.random() < 0.95 else "VOID")
        self.state = judged.next_state_if_committed if kind == "COMMIT" else judged.next_state_if_void
        before, self.version = self.version, self.version.next() if kind == "COMMIT" else self.version
        applied = judged.accepted if kind == "COMMIT" else ()
        raw = {
            "kind": kind,
            "round": [1, self.n],
            "from_version": [before.timeline, before.v],
            "participants": [
                {
                    "push": [push.cluster, 1, 1, self.n],
                    "tokens": push.tokens,
                    "steps": push.made_steps,
                    "verdict": "APPLIED" if push.cluster in applied else "EXCLUDED",
                }
                for push in pushes
            ],
            "judgement": judgement_to_json(judged, step, inputs),
        }
        parsed: dict[str, Any] = json.loads(json.dumps(raw))
        return parsed

    def _participant(self, name: str) -> Participant:
        rng = self.rng
        tokens = rng.choice((1000, 1000, 1500, 640, 0 if rng.random() < 0.05 else 800))
        return Participant(
            name, tokens, int(rng.random() < 0.02) * 5, rng.choice((16, 16, 17, 32)), rng.choice((16, 99)),
            rng.random() < 0.02,
        )  # fmt: skip

    def _vector(self) -> list[float]:
        """Mostly of norm 1; some are outliers for the score, some for the hard gate, a few are nothing."""
        rng, chance = self.rng, self.rng.random()
        size = rng.uniform(0.97, 1.03)
        if chance < 0.03:
            size = 30.0
        elif chance < 0.05:
            size = 0.0
        elif chance < 0.2:
            size = rng.uniform(1.05, 1.8)
        return [size * (1.0 if i < 2 else rng.uniform(-0.1, 0.1)) for i in range(5)]


def feed(judging: Judging, record: Mapping[str, Any]) -> list[str] | None:
    wrong = judging.judge(record)
    judging.moved(str(record["kind"]), None, None)
    return wrong


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_rule_of_judge_is_recomputed_round_after_round(config: PenaltyConfig) -> None:
    run, judging = Run(config, 1), Judging()
    outcomes = set()
    assert feed(judging, {"kind": "COMMIT", "from_version": None}) is None, "the seed"
    for _ in range(ROUNDS):
        record = run.record()
        assert feed(judging, record) == [], record
        assert judging.ledger(run.state.to_json()) == []
        outcomes |= {item["verdict"] for item in record["participants"]}
    assert outcomes == {"APPLIED", "EXCLUDED"}
    assert (judging.recomputed, judging.blind, judging.old) == (ROUNDS, 0, 0)


def test_where_the_beginning_is_lost_only_the_accepted_set_is_unproven_until_a_master_says_its_state() -> None:
    run, judging = Run(PenaltyConfig(), 2), Judging(whole=False)
    for _ in range(20):
        assert feed(judging, run.record()) == []
    assert (judging.recomputed, judging.blind, judging.memory) == (20, 20, None)
    wrong = run.record("COMMIT")
    wrong["judgement"]["kappa"] = "0.123"
    assert "its kappa is 0.123" in (feed(judging, wrong) or [""])[0]
    assert feed(judging, run.record(says_state=True)) == []
    assert feed(judging, run.record()) == []
    assert (judging.recomputed, judging.blind) == (23, 21)
    assert judging.ledger(run.state.to_json()) == []


def test_records_of_an_older_release_are_counted_and_no_violation() -> None:
    run, judging = Run(PenaltyConfig(), 3), Judging()
    for _ in range(3):
        record = run.record()
        del record["judgement"]["inputs"]
        assert feed(judging, record) is None
    assert feed(judging, run.record(says_state=True)) == []
    assert (judging.recomputed, judging.old, judging.holes) == (1, 3, 0)
    record = run.record()
    del record["judgement"]["inputs"]
    assert feed(judging, record) is None
    assert judging.holes == 1, "one that says less than those before it proves nothing"


def record_of(config: PenaltyConfig, gram: tuple[tuple[float, ...], ...]) -> dict[str, Any]:
    """Of the first round of clusters a, b and so on, whose pushes are alike but for their ways."""
    names = "abcd"[: len(gram)]
    pushes = tuple(Participant(name, 1000.0, 0, 16, 16, False) for name in names)
    judged = judge(DetectorState.empty(), config, pushes, gram, frozenset(names), 0.0)
    step = outer_step_of(config, 0.7, judged.scale, judged.rho, Version(1, 0))
    inputs = JudgeInputs(config, 0.7, pushes, gram, tuple(names), (), (), 0.0, None)
    of_push = {"tokens": 1000, "steps": 16, "verdict": "APPLIED"}
    return {
        "kind": "COMMIT", "round": [1, 1], "from_version": [1, 0], "judgement": judgement_to_json(judged, step, inputs),
        "participants": [{"push": [name, 1, 1, 1], **of_push} for name in names],
    }  # fmt: skip


KNOWN = PenaltyMemory({"a": ClusterMemory(99, 1.0, 0.01, 1000.0, 16)}, (1.0, 1.0, 1.0), (0.5,))
GATE = PenaltyMemory({}, (1.0, 1.0, 1.0))


@pytest.mark.parametrize(("memory", "norm", "bad", "close"), [
    (KNOWN, 1.3 - 1e-6, "", False), (KNOWN, 1.3 - 1e-11, "", True),
    (KNOWN, 1.3 + 1e-11, "score", True), (KNOWN, 1.3 + 1e-6, "score", False),
    (KNOWN, 10.0, "score", False), (KNOWN, 10.0 + 1e-6, "gate", False),
    (GATE, 10.0 - 1e-6, "", False), (GATE, 10.0, "", True),
    (GATE, 10.0 + 1e-11, "gate", True), (GATE, 10.0 + 1e-6, "gate", False),
])  # fmt: skip
def test_only_where_rounding_decides_are_both_answers_right(
    memory: PenaltyMemory, norm: float, bad: str, close: bool
) -> None:
    for detector in ("score", "literal") if memory is GATE else ("score",):
        config = PenaltyConfig(detector=detector, beta=3.0, hard_gate=10.0)
        record = record_of(config, ((norm * norm,),))
        (push,) = pushes_of(round_of(record["participants"], record["judgement"]["inputs"]), memory)
        assert (push.bad, push.close) == (bad, close)


SAID: tuple[list[float], list[int], list[bool]] = ([1.0, 0.5, 1.0], [0, 0], [False, False])


@pytest.mark.parametrize(("measured", "wrong"), [
    ([("s0", SAID)], ""), ([("s0", ([1.0, 0.5, 1.0], [0, 0], []))], ""),
    ([("s0", ([0.75, 0.25, 0.0], [0, 0], [False, True])), ("s1", ([0.25, 0.25, 1.0], [0, 0], [True, False]))], ""),
    ([("s0", ([1.0, 0.5, 1.0 + 1e-6], *SAID[1:]))], "entry 2 of its Gram matrix is 1.0"),
    ([("s0", ([1.0, -0.5, 1.0], *SAID[1:]))], "entry 1 of its Gram matrix"),
    ([("s0", SAID), ("s1", SAID)], "entry 0 of its Gram matrix"),
    ([("s0", ([*SAID[0], 1.0], *SAID[1:]))], "another number of pushes"),
    ([("s0", (SAID[0], [0], [False]))], "another number of pushes"),
    ([("s0", (SAID[0], [0, 9], SAID[2]))], "elements that are not finite"),
    ([("s0", (SAID[0], [0, 0], [False, True]))], "of pushes that are all zero"),
    # One slave that says two things, or nothing, is no evidence.
    ([("s0", ([9.0, 9.0, 9.0], *SAID[1:])), ("s0", SAID)], ""), ([("s1", ([9.0, 9.0, 9.0], *SAID[1:]))], ""),
])  # fmt: skip
def test_a_judgement_is_of_what_the_slaves_measured(measured: list[tuple[str, Any]], wrong: str) -> None:
    judging, record = Judging(), record_of(PenaltyConfig(), ((1.0, 0.5), (0.5, 1.0)))
    for slave, said in measured:
        judging.measured(slave, (1, 1), *said)
    sentences = judging.judge(record, sorted({"s0", *dict(measured)})) or []
    assert [wrong in sentence for sentence in sentences] == [True] * bool(wrong)


@pytest.mark.parametrize(("merged", "is_wrong"), [("1e-07", False), ("0.0001", True)])
def test_opposite_pushes_cancel_but_for_rounding(merged: str, is_wrong: bool) -> None:
    record = record_of(PenaltyConfig(detector="off"), ((1.0, -1.0), (-1.0, 1.0)))
    record["judgement"]["merged_norm"] = merged
    wrong = Judging().judge(record) or []
    assert ["merged norm" in sentence for sentence in wrong] == [True] * is_wrong


CHANGED_STATE: dict[str, Any] = {
    **{name: lambda value: value + 1 for name in ("accepted", "steps", "flags_in_a_row", "score_rejections_in_a_row")},
    **{name: lambda value: value * 1.001 for name in ("mean", "variance", "mean_tokens")},
    "quarantined": lambda value: not value,
    "no mean_tokens": lambda value: None,
    **{name: lambda values: [*values[:-1], values[-1] + 0.01] for name in ("norms", "scores", "merged_norms")},
    **{f"fewer {name}": lambda values: values[:-1] for name in ("norms", "scores", "merged_norms")},
    "voids_in_a_row": lambda value: value + 1,
}


@pytest.mark.parametrize("what", CHANGED_STATE)
def test_every_number_of_the_detector_is_compared_with_what_follows_from_the_records(what: str) -> None:
    run, judging = Run(PenaltyConfig(warm_up_pushes=2), 8), Judging()
    for _ in range(30):
        assert feed(judging, run.record()) == []
    state = run.state.to_json()
    assert judging.ledger(json.loads(json.dumps(state))) == []
    name, change = what.removeprefix("fewer ").removeprefix("no "), CHANGED_STATE[what]
    part = state if name in state else state["clusters"][sorted(state["clusters"])[-1]]
    part[name] = change(part[name])
    (wrong,) = judging.ledger(state) or [""]
    assert "does not follow from the rounds before" in wrong
    del state["clusters"]["a"]
    assert "it has clusters b, c, d, not " in (judging.ledger(state) or [""])[0]


def test_a_run_that_goes_back_remembers_what_it_did_there() -> None:
    """After a ROLLBACK, and an ADOPT, to a version of which the state is known; after another one it must be told."""
    run, judging = Run(PenaltyConfig(warm_up_pushes=2), 6), Judging()
    states: list[tuple[tuple[tuple[int, int], tuple[int, int]], DetectorState]] = []
    while len(states) < 280:
        record = run.record()
        made = ((1, run.version.v), (1, run.n))
        assert judging.judge(record) == []
        judging.moved(record["kind"], made, None)
        if record["kind"] == "COMMIT":
            states.append((made, run.state))
    made, state = states[-40]
    assert judging.ledger(state.to_json(), made) == []
    assert judging.ledger(states[-30][1].to_json(), made) is None, "each is compared once"
    assert "does not follow" in (judging.ledger(state.to_json(), states[-39][0]) or [""])[0]
    for kind, now in (("ROLLBACK", ((2, made[0][1]), (2, 1))), ("ADOPT", made)):
        judging.moved(kind, now, made if kind == "ROLLBACK" else None)
        run.state = state
        assert judging.ledger(state.to_json()) == []
        record = run.record()
        assert feed(judging, record) == []
    blind = judging.blind
    judging.moved("ROLLBACK", ((3, 0), (3, 1)), states[0][0])
    assert judging.memory is None, "too old to be kept"
    run.state = state
    assert feed(judging, run.record(says_state=True)) == []
    judging.lost_journal()
    assert feed(judging, run.record()) == []
    assert judging.blind == blind + 1


# ---- mutants ----


SEEDS = (1, 2, 4, 0, *range(5, 20))
"""Of these the first take a tenth of the time of seed 0, and show most mutants."""


@pytest.mark.parametrize("mutant", JUDGE_MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_mutant_of_judge_is_caught_by_name_while_it_runs_and_from_its_records(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated, "Checker", Recording)
    with planted(mutant):
        world, sentences = _until_violated(SEEDS)
    assert sentences[0].startswith("I18: "), sentences[0]
    assert isinstance(world.checker, Recording)
    assert "I18" in {violation.invariant for violation in check_records(world.checker.records).violations}
    print(sentences[0])


def _until_violated(seeds: Iterable[int]) -> tuple[simulated.SeedRun, tuple[str, ...]]:
    for seed in seeds:
        world = simulated.SeedRun(seed)
        violations = world.run().violations
        if violations:
            return world, violations
    raise AssertionError("not noticed")
