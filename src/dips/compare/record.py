"""The record of one run of one method, as plain data for the tables, the pictures, compare.json and tests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np

from dips.core.errors import LocalProtocolError
from dips.core.ids import RoundId, Version, parse_version
from dips.sim.arithmetic import F32
from dips.sim.checks import push_of, version_of
from dips.sim.kernel import SimulatedProcess
from dips.sim.run_plan import SimulatedRunPlan
from dips.sim.seed_run import SeedRun
from dips.sim.world import Host, MasterProcess
from dips.worker.state.effects import Finished


@dataclass(frozen=True)
class CurvePoint:
    """A point of the loss curve: a published version. virtual_s: since the first version; loss: held-out, nats per
    byte, None: not evaluated, or not finite."""

    version: str
    tokens: int
    virtual_s: float
    loss: float | None


def at_tokens(curve: Sequence[CurvePoint], tokens: int) -> tuple[float | None, float]:
    """(loss, virtual_s) at exactly `tokens`: linear between the last point below and the first at or above it.

    A curve that ends before gives its last point; loss None: one of the two was not evaluated. Raises ValueError for
    an empty curve.
    """
    above = next((i for i, point in enumerate(curve) if point.tokens >= tokens), len(curve) - 1)
    if above < 0:
        raise ValueError("a curve without points has no loss")
    last = curve[above]
    if last.tokens <= tokens or above == 0:
        return last.loss, last.virtual_s
    before = curve[above - 1]
    share = (tokens - before.tokens) / (last.tokens - before.tokens)
    virtual_s = before.virtual_s + share * (last.virtual_s - before.virtual_s)
    if before.loss is None or last.loss is None:
        return None, virtual_s
    return before.loss + share * (last.loss - before.loss), virtual_s


@dataclass(frozen=True)
class PushFact:
    """One judged push. norm, score, cosine: None where undefined. bad: an injected one."""

    cluster: str
    push: str
    verdict: str
    reason: str
    tokens: int
    staleness: int
    norm: float | None
    score: float | None
    cosine: float | None
    bad: bool


@dataclass(frozen=True)
class RoundFact:
    """One committed or void round. kappa, rho, merged_norm: None in a VOID."""

    version: str
    virtual_s: float
    kappa: float | None
    rho: float | None
    merged_norm: float | None
    pushes: tuple[PushFact, ...]


@dataclass(frozen=True)
class RunRecord:
    """The record of one run: a (method, seed, injection).

    loss, virtual_s: at exactly `tokens`, by linear interpolation between the last version below and the first at or
    above it; loss None: not finite, or nothing was trained. ended: "finished", "diverged", or "locked out": the penalty
    refused every push from some time on, finite ones too. alarms: (virtual second, sentence). cluster_tokens: applied.
    timing-only runs have no losses.
    """

    method: str
    seed: int
    inject: str
    tokens: int
    ended: str
    loss: float | None
    virtual_s: float
    rounds: int
    voids: int
    curve: tuple[CurvePoint, ...] = ()
    judged: tuple[RoundFact, ...] = ()
    alarms: tuple[tuple[float, str], ...] = ()
    cluster_tokens: dict[str, int] = field(default_factory=dict)
    cluster_steps: dict[str, int] = field(default_factory=dict)
    waited_s: dict[str, float] = field(default_factory=dict)
    """Cluster -> virtual seconds in which it did not train, from the first version to the end."""

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and None; a number that is not finite is None."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Self:
        """The inverse of to_json. Raises KeyError or TypeError for anything else."""
        rounds = [{**row, "pushes": tuple(PushFact(**push) for push in row["pushes"])} for row in plain["judged"]]
        return cls(
            **{
                **plain,
                "curve": tuple(CurvePoint(**point) for point in plain["curve"]),
                "judged": tuple(RoundFact(**row) for row in rounds),
                "alarms": tuple((at_s, sentence) for at_s, sentence in plain["alarms"]),
            }
        )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# ---- tally -----------------------------------------------------------------------------------------------------------
#
# Collects a run's record from its tapes and journal. It decides nothing and computes no time of its own.


class RunTally:
    """Counts one run. began_s: when the first version was published; all times here count from it."""

    def __init__(self) -> None:
        self.began_s = math.nan
        self.tokens: dict[Version, int] = {}
        """Tokens applied up to each version."""

        self.rounds = 0
        self.voids = 0
        self.voids_in_a_row = 0
        self.locked_out = False
        """Whether the last void round refused pushes that are finite."""

        self.facts: list[RoundFact] = []
        self.alarms: list[tuple[float, str]] = []
        self.cluster_tokens: Counter[str] = Counter()
        self.bad: set[str] = set()
        """Injected pushes."""

        self._judged: dict[str, Mapping[str, Any]] = {}
        self._version: Version | None = None

    def watch(self, process: SimulatedProcess, kind: str, fields: Mapping[str, Any]) -> None:
        """Take a line of the master's tape."""
        if kind == "judged":
            self._judged = {fields["round"]: fields}
        elif kind == "alarm":
            self.alarms.append((process.kernel.now_s - self.began_s, fields["sentence"]))

    def journal(self, record: Mapping[str, Any], now_s: float) -> None:
        """Take a durable record of the journal."""
        if record["kind"] == "COMMIT":
            self._committed(record, now_s)
        elif record["kind"] == "VOID":
            self.voids, self.voids_in_a_row = self.voids + 1, self.voids_in_a_row + 1
            fact = self._fact(record, self._version, now_s)
            rejected = self._judged[_round_of(record)]["rejected"]
            self.locked_out = any(push.cluster in rejected and push.norm is not None for push in fact.pushes)
            self.facts.append(fact)

    def _committed(self, record: Mapping[str, Any], now_s: float) -> None:
        version = version_of(record["version"])
        assert version is not None, "a COMMIT names its version"
        self.tokens[version] = record["tokens"]
        if record["judgement"] is not None:
            self.rounds, self.voids_in_a_row = self.rounds + 1, 0
            self.facts.append(self._fact(record, version, now_s))
            for item in record["participants"]:
                if item["verdict"] == "APPLIED":
                    self.cluster_tokens[push_of(item["push"]).cluster] += item["tokens"]
        self._version = version

    def _fact(self, record: Mapping[str, Any], version: Version | None, now_s: float) -> RoundFact:
        judged = self._judged[_round_of(record)]
        merged = record["kind"] == "COMMIT"
        return RoundFact(
            str(version),
            now_s - self.began_s,
            judged["kappa"] if merged else None,
            judged["rho"] if merged else None,
            judged["merged_norm"] if merged else None,
            tuple(self._push(item, record, judged) for item in record["participants"]),
        )

    def _push(self, item: Mapping[str, Any], record: Mapping[str, Any], judged: Mapping[str, Any]) -> PushFact:
        push, base = push_of(item["push"]), version_of(item["base"])
        assert base is not None, "only the seed has no base"
        assert self._version is not None, "and it is merged unjudged"
        why = "merged" if item["verdict"] == "APPLIED" else judged["rejected"].get(push.cluster, record.get("reason"))
        return PushFact(
            push.cluster,
            str(push),
            item["verdict"],
            why,
            item["tokens"],
            self._version.v - base.v,
            _known(judged["norms"], push.cluster),
            _known(judged["scores"], push.cluster),
            _known(judged.get("cosines", {}), push.cluster),
            str(push) in self.bad,
        )


def _round_of(record: Mapping[str, Any]) -> str:
    return str(RoundId(*record["round"]))


def _known(values: Mapping[str, float], cluster: str) -> float | None:
    value = values.get(cluster, math.nan)
    return value if math.isfinite(value) else None


# ---- course ----------------------------------------------------------------------------------------------------------
#
# Runs the simulator without faults: it boots, trains until the master ends the run, and must end in order.
#
# The same processes as in every simulated run, without faults, readers and restarts: a failed cluster, a broken
# promise or an exception in a state machine ends the comparison with an error: numbers of a broken run mean nothing.


CLUSTERS_BOOT_S = 1.0
"""The time at which clusters start: the servers are up by then, so all clusters join together."""


class SimulationError(LocalProtocolError):
    """The simulated run broke a promise, or did not end."""


class Course(SeedRun):
    """A simulated run without faults. published: called for each published version; journal: for each durable
    record."""

    def __init__(
        self,
        seed: int,
        plan: SimulatedRunPlan,
        published: Callable[[Version], None],
        journal: Callable[[Mapping[str, Any]], None],
    ) -> None:
        super().__init__(seed, plan=plan, planned=())
        self._published = published
        self._journal = journal
        self.watchers.append(self._watch)

    def run_through(self, stop: Callable[[], bool], limit_s: float) -> None:
        """Run until the master ends the run, or `stop` does. limit_s: virtual. Raises SimulationError."""
        self._boot()
        self._until(lambda: bool(self.ended) or stop(), limit_s)
        if self.ended:
            self.judge.finish()
        if self.violations:
            raise SimulationError(f"the simulated run is broken: {self.violations[0]}")
        if not self.ended and not stop():
            raise SimulationError(f"the simulated run does not end within {limit_s:.0f} s: {self.waiting_for()}")

    def parameters(self, version: Version) -> F32:
        """The parameters of a published version on the slaves, in layout order. Only when chunks are numbers."""
        flat = np.full(self.plan.layout.n_elems, math.nan, np.float32)
        for slave in self.slaves.values():
            memory = slave.port.memory
            assert memory is not None, "a published version is on all slaves"
            theta, start = memory.readable[version].theta, 0
            for block in memory.blocks:
                flat[block.start_elem : block.stop_elem] = theta[start : start + block.n_elems]
                start += block.n_elems
        return flat

    # ---- what SeedRun draws at random or repairs ----

    def _boot(self) -> None:
        for boot in (self.masters[0].boot, *(slave.boot for slave in self.slaves.values())):
            self.kernel.after(0.0, None, boot)
        for cluster in self.clusters.values():
            self.kernel.after(CLUSTERS_BOOT_S, None, cluster.boot)

    def cluster_ended(self, cluster: Host, finished: Finished) -> None:
        if finished.error is not None:
            self.violated(f"cluster {cluster.name} failed: {finished.error}")

    # ---- facts ----

    def journalled(self, master: MasterProcess, record: Mapping[str, Any]) -> None:
        super().journalled(master, record)
        self._journal(record)

    def _watch(self, role: str, process: SimulatedProcess, kind: str, fields: Mapping[str, Any]) -> None:
        if role == "master" and kind == "publish":
            self._published(parse_version(fields["version"]))
