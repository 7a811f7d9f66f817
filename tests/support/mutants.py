"""Planted bugs: a line of a real function is replaced while a test runs, and an invariant must notice it.

The edit fails loudly when the text is not there exactly once, so that no mutant outlives the code that it was made for.
"""

from __future__ import annotations
import __future__

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from search.bounds import Bounds


@dataclass(frozen=True)
class Mutant:
    """target: "module:name" or "module:Class.name" below dips. breaks: the invariants; any of them may notice first."""

    name: str
    target: str
    old: str
    new: str
    breaks: tuple[str, ...] = ()
    bounds: Bounds = field(default_factory=Bounds)


def _function(target: str) -> FunctionType:
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(f"dips.{module}")
    for part in path.split("."):
        found = inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
    assert isinstance(found, FunctionType), f"{target} is no function"
    return found


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    function = _function(mutant.target)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(mutant.old) == 1, f"mutant {mutant.name!r}: {mutant.old!r} is not once in {mutant.target}"
    edited = compile(
        source.replace(mutant.old, mutant.new),
        f"<mutant {mutant.name}>",
        "exec",
        flags=__future__.annotations.compiler_flag,
    )
    names: dict[str, Any] = {}
    exec(edited, function.__globals__, names)
    healthy, function.__code__ = function.__code__, names[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = healthy


def _bounds(*faults: str, **changes: Any) -> Bounds:
    fields: dict[str, Any] = {"clusters": 1, "slaves": 2, "faults": tuple((fault, 1) for fault in faults)}
    return Bounds(**(fields | changes))


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "no base fence",
        "master.state.pushes:stale",
        "if request.fence != fence:",
        "if False:",
        ("I6",),
        _bounds("old_backup", slaves=1),
    ),
    Mutant(
        "PREPARED without a durable shadow",
        "slave.state.shard:ShardState.begin",
        "job = Run(body, cause, now_s, settings, slots)",
        'job = Run(body, cause, now_s, messages.Settings(durability="async"), slots)',
        ("I5",),
        _bounds(),
    ),
    Mutant(
        "publish before all slaves flipped",
        "master.state.rounds:Rounds.flipped",
        "len(state.flipped) == len(shared.slaves_expected())",
        "state.flipped",
        ("I4",),
        _bounds(),
    ),
    Mutant(
        "no incarnation check",
        "master.state.shared:SharedState.member_of",
        "caller.incarnation != member.incarnation",
        "False",
        ("I8",),
        _bounds("kill_cluster", slaves=1),
    ),
    Mutant(
        "a rollback stays on its timeline",
        "master.state.rollback:next_version",
        "Version(max(epoch, newest + 1), origin.v)",
        "Version(origin.timeline, origin.v)",
        ("I1", "I2", "I7"),
        _bounds("lose_version", pushes=2),
    ),
    Mutant(
        "a rollback takes no verdict back",
        "master.state.rollback:_taken_back",
        "verdict.kind is not VerdictKind.APPLIED",
        "True",
        ("I7",),
        _bounds("lose_version"),
    ),
    Mutant(
        "verdicts leave before the journal is durable",
        "master.state.shared:Outbox.put",
        "if self._held and not urgent:",
        "if False:",
        ("I6",),
        _bounds(slow_journal=True),
    ),
    Mutant(
        "only the first accepted push is merged",
        "master.state.rounds:Rounds._prepare",
        "to_version, accepted, weights,",
        "to_version, accepted[:1], weights[:1],",
        ("I9",),
        _bounds(clusters=2, slaves=1),
    ),
    Mutant(
        "no bound on staleness",
        "master.state.pushes:stale",
        "if version.v - base.v > shared.s_max():",
        "if False:",
        ("I10",),
        _bounds(clusters=2, slaves=1, eager=("a",), s_max=1),
    ),
    Mutant(
        "excluded tokens are counted",
        "master.state.rounds:Rounds._decide_commit",
        "sum(push.request.tokens for push in accepted)",
        "sum(push.request.tokens for push in state.participants)",
        ("I11",),
        _bounds(clusters=2, slaves=1, bad_pushes=("a",)),
    ),
    Mutant(
        "applied data stays leased",
        "master.state.rounds:Rounds._settle",
        "ledger.leases.settle(push.request.ranges, to)",
        "pass",
        ("I12",),
        _bounds(slaves=1, leased=True),
    ),
    Mutant(
        "pushes that are not finite are accepted",
        "master.state.penalty_detect:_fault",
        "if participant.nonfinite_elems > 0:",
        "if False:",
        ("I13",),
        _bounds(slaves=1, bad_pushes=("a",)),
    ),
    Mutant(
        "steps made meanwhile are counted, and gone",
        "worker.state.pulling:Pulling._exact",
        "ahead = shared.steps_since_snapshot if mode is InstallMode.REBASE_FROM_PUSH else shared.work.pending.steps",
        "ahead = 0",
        ("I11",),
        _bounds(pushes=2, overlap="full"),
    ),
    Mutant(
        "a round number out of thin air",
        "master.state.rounds:Rounds.settle",
        "shared.ledger.round_n += 1",
        "shared.ledger.round_n += 1 + id(shared) // 16 % 1009",
        ("I14",),
        _bounds(twice=True),
    ),
    Mutant(
        "a push is complete with a chunk missing",
        "slave.state.staging:note_landed",
        "return of.counts[N_LANDED] == len(of.landed)",
        "return of.counts[N_LANDED] >= len(of.landed) - 1",
        ("ILLEGAL",),
        _bounds(chunks=2),
    ),
    Mutant(
        "an overtaken master's COMMIT leaves before its record",
        "master.state.shared:Outbox.put",
        "if self._held and not urgent:",
        "if self._held and not urgent and type(effect).__name__ != 'ToSlave':",
        ("I1", "I2", "I5", "I6"),
        _bounds("second_master", slaves=1, slow_journal=True),
    ),
    Mutant(
        "a RESHARD is journaled when one slave has its blocks",
        "master.state.reshard:Reshard.prepared",
        "if len(state.prepared) == len(state.digests):",
        "if state.prepared:",
        ("I5",),
        _bounds("reshard", slaves=1, add=("s1",)),
    ),
)

TWO_CHECKS: tuple[Mutant, Mutant] = (
    Mutant(
        "a chunk of any life of the cluster is taken",
        "slave.state.staging:StagingTable.find",
        "self._open.get(push) if push is not None else None",
        "next((s for p, s in self._open.items() if push is not None and p.cluster == push.cluster), None)",
        ("I9",),
        _bounds("orphan_rank", ranks=2, chunks=2),
    ),
    Mutant(
        "digests of a push are not compared",
        "master.state.pushes:Pushes._admit",
        "push.claimed.get(s) != digest",
        "False",
        ("I9",),
        _bounds("orphan_rank", ranks=2, chunks=2),
    ),
)
"""Each stops what a rank of an earlier life sends: only without both of them an invariant breaks."""


def _of_judge(name: str, target: str, old: str, new: str) -> Mutant:
    return Mutant(name, f"master.state.{target}", old, new, ("I18",), Bounds())


JUDGE_MUTANTS: tuple[Mutant, ...] = (
    _of_judge("uniform weights", "penalty:_weights", "float(finding.participant.tokens) for", "1.0 for"),
    _of_judge("weights add up to 2", "penalty:_weights", "part / sum(parts)", "2.0 * part / sum(parts)"),
    _of_judge("no clip", "penalty:judge", "min(1.0, clip_norm / max(merged_norm, MIN_MERGED_NORM))", "1.0"),
    _of_judge("rho is always 1", "penalty:participation", "if not config.participation", "if True or config.p"),
    _of_judge(
        "the detector's sign is reversed", "penalty_detect:_judged", "finding.score > tau", "-finding.score > tau"
    ),
    _of_judge("low norms are outliers", "penalty_detect:_score", "(scaled_norm - known.mean) /", "-scaled_norm /"),
    _of_judge("T_round is a sum", "penalty:round_tokens", " / len(known_s)", ""),
    _of_judge(
        "blocks count twice",
        "penalty_detect:add_blocks",
        "upper = [total + value for",
        "upper = [total + 2 * value for",
    ),
    _of_judge("the clip misses the step", "records:outer_step_of", "    mu =", "    scale = rho\n    mu ="),
)
"""Of JUDGE and what surrounds it: they run in the simulator, whose rounds have unequal tokens, clips and outliers."""
