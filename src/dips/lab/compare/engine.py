"""Runs one method of a comparison: on the simulated servers, with clusters that train or, to get only times, with
symbols.

Training and merging are real; the times come from the set-up. A run is evaluated at exactly the set-up's
tokens, so that methods of unequal rounds can be compared.

Data parallel training (the Di-PS paper, section 5.1, baseline i) has no server and no version. K clusters with equal
batches average their gradients in every step; that equals one optimizer on one batch of all their sequences, and is
computed in this way. A "round" of its record is a step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from dips.core.errors import ConfigError, LocalProtocolError
from dips.core.ids import RoundId, Version, parse_version
from dips.core.layout import FLOAT32_BYTES, Layout, Parameter
from dips.core.messages import DataMode, DataPlan, DataRange
from dips.core.units import parse_bytes
from dips.core.wire import WIRE_DTYPES
from dips.lab.compare.methods import Injection, Method, find_method
from dips.lab.compare.record import CurvePoint, Evaluate, Progress, PushFact, RoundFact, RunRecord, at_tokens
from dips.lab.compare.setup import ChangeTable, ComparisonSetup, Conditions
from dips.lab.sim.arithmetic import F32, Arithmetic, Learner
from dips.lab.sim.content import SYMBOLS
from dips.lab.sim.kernel import SimulatedProcess
from dips.lab.sim.network import LinkPlan, ProcessRates
from dips.lab.sim.numbers import Numbers
from dips.lab.sim.run_plan import SimulatedRunPlan
from dips.lab.sim.seed_run import SeedRun
from dips.lab.sim.world import Host, MasterProcess
from dips.master.config import MasterConfig
from dips.master.state.ledger import push_from_json
from dips.trainer.config import TrainConfig
from dips.trainer.corpus import all_ranges, take_rows
from dips.worker.state.effects import Finished

METHOD = "dp"

_CHUNKS_PER_ROW = 2
"""Chunks that are held for each row of a batch, so that a batch mixes chunks as in training without a master."""


def run_data_parallel(
    setup: ComparisonSetup, seed: int, learner: Learner, evaluate: Evaluate, progress: Progress | None = None
) -> RunRecord:
    """Train `learner` on setup.run.tokens tokens; loss and time at exactly that many by linear interpolation.

    A step's time: its slowest cluster, then a ring all-reduce of the gradient over the clusters' links, as both are at
    its beginning. A training loss that is not finite ends the run; that, or a held-out loss that is not finite, is
    "diverged".
    """
    total, names, rng = setup.run.tokens, setup.cluster_names, Random(seed)
    n_elems = learner.layout().n_elems
    vector = np.empty(n_elems, np.float32)
    batches, mark = _batches(setup, learner), total / setup.run.evaluations
    steps, tokens, now_s, finite = 0, 0, 0.0, True
    curve: list[CurvePoint] = []
    busy_s = dict.fromkeys(names, 0.0)
    while finite and tokens < total:
        rows = next(batches)
        ends_at = tokens + sum(row.tokens for row in rows)
        if ends_at > total and (not curve or curve[-1].tokens != tokens):
            # The loss at the end is interpolated between this point and the one behind the step that crosses the end.
            curve.append(_point(steps, tokens, now_s, learner, evaluate, vector))
        finite = math.isfinite(learner.step(rows, tokens))
        if finite:
            clusters, exchange_s = setup.conditions(now_s), setup.all_reduce_s(n_elems, now_s)
            took = [rng.uniform(1 - one.jitter, 1 + one.jitter) * one.step_s for one in clusters]
            for name, step_s in zip(names, took, strict=True):
                busy_s[name] += step_s
            due = ends_at // mark > tokens // mark
            steps, tokens, now_s = steps + 1, ends_at, now_s + (max(took) + exchange_s)
            if due or tokens >= total:
                curve.append(_point(steps, tokens, now_s, learner, evaluate, vector))
        if progress is not None:
            progress(tokens, now_s)
    loss, virtual_s = at_tokens(curve, total) if finite else (None, now_s)
    return RunRecord(
        METHOD, seed, "", total, "diverged" if loss is None else "finished", loss, virtual_s, steps, 0,
        curve=tuple(curve),
        cluster_tokens=dict.fromkeys(names, tokens // len(names)),
        cluster_steps=dict.fromkeys(names, steps),
        waited_s={name: now_s - trained_s for name, trained_s in busy_s.items()},
    )  # fmt: skip


def _point(steps: int, tokens: int, now_s: float, learner: Learner, evaluate: Evaluate, vector: F32) -> CurvePoint:
    """Evaluate the model as it is; vector: where it is copied to."""
    learner.snapshot(vector)
    loss = evaluate(vector)
    return CurvePoint(str(steps), tokens, now_s, loss if math.isfinite(loss) else None)


def _batches(setup: ComparisonSetup, learner: Learner) -> Iterator[tuple[DataRange, ...]]:
    """Batches of K x batch_size rows, each token of a pass once; never ends."""
    source, held = all_ranges(learner.data_plan()), list[DataRange]()
    n_rows = setup.n_clusters * setup.inner.batch_size
    while True:
        if sum(part.tokens for part in held) < n_rows * setup.inner.sequence_tokens:
            held.extend(next(source) for _ in range(_CHUNKS_PER_ROW * n_rows))
        yield take_rows(held, n_rows, setup.inner.sequence_tokens)


LIMIT_FACTOR = 30.0
"""A run may take so many times the ideal time plus that of its transfers before it counts as stuck."""

LIMIT_EXTRA_S = 3600.0

HOPELESS_VOIDS = 32
"""After so many void rounds in a row nothing more will be published: updates overflow, or the penalty refuses all."""

Versions = Callable[[Mapping[str, Any], F32], None]
"""Called for each published version, with its COMMIT record and the parameters as one flat vector."""


def run_method(
    setup: ComparisonSetup,
    name: str,
    seed: int,
    data: Sequence[Path],
    inject: str,
    progress: Progress,
    threads: int = 1,
) -> RunRecord:
    """Train the byte model on the text of `data` with one method, in this process, on setup.run.device. inject: the
    kind of injection, or empty. Raises DipsError with a sentence when the run fails, or its device is not available."""
    from dips.trainer.train import ByteLearner, evaluator, read_text  # torch, which a run without training needs not

    method, inner, tokens = find_method(name), setup.inner, setup.run.tokens
    config = TrainConfig(
        data=tuple(data),
        data_seed=seed,  # the order of the text
        seed=seed,  # the first parameters
        model_size=setup.model.size,
        heldout_max_bytes=setup.run.heldout_bytes,
        batch_size=inner.batch_size,
        sequence_tokens=inner.sequence_tokens,
        inner_optimizer=inner.inner_optimizer,
        lr=inner.lr,
        warmup_tokens=inner.warmup_tokens,
        min_lr_fraction=inner.min_lr_fraction,
        weight_decay=inner.weight_decay,
        grad_clip=inner.grad_clip,
        threads=threads,
        device=setup.run.device,
    )
    text = read_text(config)
    evaluate = evaluator(config, text)
    if method.kind == "data parallel":
        return run_data_parallel(setup, seed, ByteLearner(config, text, tokens), evaluate, progress)
    injection = Injection(inject) if inject else None
    return ServersRun(
        setup, method, seed, lambda cluster, index: ByteLearner(config, text, tokens), evaluate, injection, progress
    ).through()


# ---- plan ------------------------------------------------------------------------------------------------------------
#
# Makes the simulator's plan from a set-up and a method: a World in which nothing fails. Time-outs that only faults need
# are very long, only the jitter of steps and delays is random, and every size that a transfer has is that of the model
# whose parameters it carries (set-up, [model] wire_parameters).


NEVER_S = 1e7
"""A time-out that never ends."""

LEAVE_S = 600.0
RETRY_S = 0.05
MANY_EVENTS = 50_000_000
TIMING_BLOCKS_PER_SLAVE = 4
TIMING_CHUNKS_PER_BLOCK = 6


def plan_of(
    setup: ComparisonSetup, method: Method, layout: Layout, data: DataPlan, arithmetic: Arithmetic = SYMBOLS
) -> SimulatedRunPlan:
    """The Plan of this method; World(seed, plan=...) runs it. Raises ConfigError for contradicting settings.

    Symbols are not trained: for them a step is one row, since they do not depend on where rows begin.
    """
    config = setup.master_config(method).to_run_config()
    inner, trains = setup.inner, arithmetic is not SYMBOLS
    model_bytes = FLOAT32_BYTES * layout.n_elems
    return SimulatedRunPlan(
        setup.cluster_names,
        setup.slave_names,
        layout,
        data,
        config,
        setup.step_s,
        setup.tokens_per_step,
        delay_s=setup.links.latency,
        flush_s=setup.servers.flush,
        work_s=setup.servers.work,
        call_deadline_s=NEVER_S,
        leave_wait_s=LEAVE_S,
        data_silence_s=NEVER_S,
        data_stall_s=NEVER_S,
        faults_for_s=0.0,
        n_faults=0,
        checkpoints=False,
        snapshots_kept=2,
        arithmetic=arithmetic,
        batch_rows=inner.batch_size if trains else 1,
        sequence_tokens=inner.sequence_tokens if trains else setup.tokens_per_step,
        step_jitter=setup.clusters.jitter,
        declared=True,
        wires=(WIRE_DTYPES[method.wire_dtype],) * setup.n_clusters,
        retry_max_s=RETRY_S,
        slave_memory_bytes=1 << 62,
        max_chunk_bytes=max(config.settings.chunk_bytes, 1 << 16),
        disk_bytes=1 << 40,
        links=link_plan(setup, model_bytes),
        max_events=MANY_EVENTS,
    )


def link_plan(setup: ComparisonSetup, model_bytes: int) -> LinkPlan:
    """The links with the set-up's rates; a model of `model_bytes` takes as long as one of wire_parameters."""
    links = setup.links
    card = links.slave_card or math.inf
    rates = dict.fromkeys(setup.slave_names, ProcessRates(card, card))
    rates |= {
        name: ProcessRates(up or math.inf, down or math.inf)
        for name, up, down in zip(setup.cluster_names, setup.up_bits_per_s, setup.down_bits_per_s, strict=True)
    }
    return LinkPlan(rates, setup.wire_bytes() / model_bytes)


def timing_layout(setup: ComparisonSetup) -> Layout:
    """The layout of a model of symbols, in as many messages as are needed to share links: six for each of a slave's
    four blocks, of the set-up's chunk size."""
    default: int = MasterConfig.model_fields["chunk_bytes"].default
    chunk_bytes = parse_bytes(setup.master.get("chunk_bytes", default))
    n_elems = TIMING_CHUNKS_PER_BLOCK * chunk_bytes // FLOAT32_BYTES
    blocks = [f"layers.{i}" for i in range(TIMING_BLOCKS_PER_SLAVE * setup.servers.slaves)]
    return Layout(tuple(Parameter(f"{block}.w", (n_elems,), "float32", block) for block in blocks))


def timing_data(setup: ComparisonSetup) -> DataPlan:
    """Text without end, in chunks of two steps."""
    chunk_tokens = 2 * setup.tokens_per_step
    n_chunks = math.ceil(4 * setup.run.tokens / chunk_tokens)
    return DataPlan(DataMode.LEASED, b"no text", n_chunks * chunk_tokens, chunk_tokens)


# ---- course ----------------------------------------------------------------------------------------------------------
#
# Runs the simulator without faults: it boots, trains until the master ends the run, and must end in order. The
# processes are those of every simulated run, without faults, readers and restarts: a failed cluster, a broken promise
# or an exception in a state machine ends the comparison with an error, because numbers of a broken run mean nothing.


LOOKS_EVERY_S = 1.0
CLUSTERS_BOOT_S = 1.0
"""The time at which clusters start: the servers are up by then, so all clusters join together."""


class SimulationError(LocalProtocolError):
    """The simulated run broke a promise, or did not end."""


class Course(SeedRun):
    """A simulated run without faults. first_names: the clusters that are there from the beginning, None: all."""

    def __init__(self, seed: int, plan: SimulatedRunPlan, first_names: Sequence[str] | None = None) -> None:
        super().__init__(seed, plan=plan, planned=())
        self._first_names = plan.clusters if first_names is None else first_names
        self.watchers.append(self._watch)

    def run_through(self, stop: Callable[[], bool], limit_s: float) -> None:
        """Run until the master ends the run, or `stop` does. limit_s: virtual. Raises SimulationError."""
        self._boot()
        self._until(lambda: bool(self.ended) or stop(), limit_s)
        if self.ended:
            self.finish_checks()
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
        for name in self._first_names:
            self.kernel.after(CLUSTERS_BOOT_S, None, self.clusters[name].boot)

    # ---- what the set-up changes ----

    def come(self, name: str) -> None:
        """Start a process of this cluster, once the one before has ended."""
        if self.clusters[name].alive:
            self.kernel.after(LOOKS_EVERY_S, None, self.come, name)
        elif not self.ended:
            self.clusters[name].boot()

    def set_conditions(self, name: str, now: Conditions) -> None:
        """Set a cluster's speed and links; the step and the datagrams under way keep theirs."""
        cluster, links = self.clusters[name], self.net.links
        cluster.step_s, cluster.step_jitter = now.step_s, now.jitter
        assert links is not None, "a comparison has links"
        links.change(name, ProcessRates(now.up_bits_per_s or math.inf, now.down_bits_per_s or math.inf))

    def cluster_ended(self, cluster: Host, finished: Finished) -> None:
        if finished.error is not None:
            self.violated(f"cluster {cluster.name} failed: {finished.error}")

    # ---- facts ----

    def appeared(self, version: Version) -> None:
        """This version was published."""

    def _watch(self, role: str, process: SimulatedProcess, kind: str, fields: Mapping[str, Any]) -> None:
        if role == "master" and kind == "publish":
            self.appeared(parse_version(fields["version"]))


# ---- run on the servers ----------------------------------------------------------------------------------------------


class _Watched:
    """A learner, and whether its loss was ever not finite."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self.diverged = False
        self.layout = learner.layout
        self.data_plan = learner.data_plan
        self.snapshot = learner.snapshot
        self.install = learner.install
        self.reset_inner_optimizer = learner.reset_inner_optimizer

    def step(self, ranges: Sequence[DataRange], progress_tokens: int) -> float:
        loss = self._learner.step(ranges, progress_tokens)
        self.diverged |= not math.isfinite(loss)
        return loss


class ServersRun(Course):
    """One run of a method on the simulated servers, and its results: through() trains setup.run.tokens tokens.

    learner_of(cluster, its index) makes what each cluster trains; without it nothing is trained, evaluated or spoilt:
    the record has times, rounds and staleness alone.

    Held-out losses: of the first version at or after each of setup.run.evaluations equally spaced token marks, and of
    the last version below the end. The record's loss and time at exactly setup.run.tokens are linear interpolations
    between the last version below and the first at or above it. A training loss that is not finite, or HOPELESS_VOIDS
    void rounds in a row, end the run as "diverged", with loss None; as "locked out" when the last of those rounds
    refused pushes that are finite.
    """

    def __init__(
        self,
        setup: ComparisonSetup,
        method: Method,
        seed: int,
        learner_of: Callable[[str, int], Learner] | None = None,
        evaluate: Evaluate | None = None,
        injection: Injection | None = None,
        progress: Progress | None = None,
        versions: Versions | None = None,
    ) -> None:
        """Prepare the run. Raises ConfigError for settings that the master refuses, and for a method without servers,
        which has no settings."""
        if method.kind != "servers":
            raise ConfigError(f"method {method.name} has no servers to run on: use run_data_parallel for it")
        self._setup, self._method, self._progress = setup, method, progress
        self._learner_of, self._evaluate, self._versions = learner_of, evaluate, versions
        self._learners: dict[str, _Watched] = {}
        self._begun: set[str] = set()  # clusters whose learner a process has trained
        self._injection = injection
        self._injected = setup.cluster_names[injection.cluster] if injection is not None else ""
        self._pushes = 0  # of the cluster with the injection, without the seed's
        self._spoilt = False  # whether the last of these is a bad one
        if learner_of is not None:
            first = self._fresh(setup.cluster_names[0])
            plan = plan_of(setup, method, first.layout(), first.data_plan(), Numbers(self._of_process, self._corrupt))
        else:
            plan = plan_of(setup, method, timing_layout(setup), timing_data(setup), SYMBOLS)
        super().__init__(seed, plan, setup.first_names)
        self._tally = RunTally()
        self._commits: dict[Version, Mapping[str, Any]] = {}
        self._curve: list[CurvePoint] = []
        self._before: F32 | None = None
        """The newest version that is not evaluated yet."""

        self._at_begin: dict[str, tuple[int, float]] = {}
        self._at_end: dict[str, tuple[int, float]] = {}
        self._ends_s = 0.0

    def _fresh(self, cluster: str) -> _Watched:
        assert self._learner_of is not None, "called only with training"
        self._learners[cluster] = _Watched(self._learner_of(cluster, self._setup.cluster_names.index(cluster)))
        return self._learners[cluster]

    def _of_process(self, cluster: str) -> _Watched:
        """The learner of a new process of this cluster, which knows nothing of the one before."""
        if cluster in self._begun or cluster not in self._learners:
            self._fresh(cluster)
        self._begun.add(cluster)
        return self._learners[cluster]

    def _corrupt(self, cluster: str, push: F32, base: F32) -> bool:
        """Apply the injection to a push; returns whether it is a bad one now."""
        if self._injection is None or cluster != self._injected:
            return False
        self._pushes += 1
        self._spoilt = self._injection.corrupt(self._pushes, push, base, self.seed)
        return self._spoilt

    def through(self) -> RunRecord:
        """Run to the end. Raises SimulationError when the simulated run breaks a promise or does not end."""
        setup = self._setup
        # All pushes and pulls of the run, if the slowest link carries each cluster's share.
        rounds = setup.run.tokens / (setup.n_clusters * setup.run.inner_steps * setup.tokens_per_step)
        transfers_s = 2 * rounds * 8 * setup.wire_bytes() / setup.least_bits_per_s
        rounds_s = setup.run.tokens / setup.least_tokens_per_s + transfers_s
        self.run_through(self._hopeless, LIMIT_EXTRA_S + LIMIT_FACTOR * rounds_s)
        return self._record()

    def _hopeless(self) -> bool:
        """Whether the run will never reach its tokens."""
        lost = (
            any(learner.diverged for learner in self._learners.values()) or self._tally.voids_in_a_row >= HOPELESS_VOIDS
        )
        return lost and not self._done

    @property
    def _done(self) -> bool:
        """All tokens are applied and published."""
        return bool(self._curve) and self._curve[-1].tokens >= self._setup.run.tokens

    # ---- events of the run ----

    def _watch(self, role: str, process: SimulatedProcess, kind: str, fields: Mapping[str, Any]) -> None:
        super()._watch(role, process, kind, fields)
        if role == "master":
            self._tally.watch(process, kind, fields)
        elif kind == "push_begun" and process.name == self._injected and self._spoilt:
            self._tally.bad.add(fields["push"])

    def journalled(self, master: MasterProcess, record: Mapping[str, Any]) -> None:
        super().journalled(master, record)
        self._tally.journal(record, self.kernel.now_s)
        if record["kind"] == "COMMIT" and self._versions is not None:
            self._commits[Version(*record["version"])] = record

    def appeared(self, version: Version) -> None:
        if not self._curve:
            self._tally.began_s = self.kernel.now_s
            self._at_begin = self._made()
            for change in self._setup.changes:
                self.kernel.after(change.at, None, self._change, change)
        tokens, at_s, done = self._tally.tokens[version], self.kernel.now_s - self._tally.began_s, self._done
        if self._versions is not None:
            self._versions(self._commits.pop(version), self.parameters(version))
        self._add(version, tokens, at_s)
        if self._done and not done:
            self._ends_s, self._at_end = at_s, self._made()
        if self._progress is not None:
            self._progress(tokens, at_s)

    def _change(self, change: ChangeTable) -> None:
        now = self._setup.conditions(change.at)[self._setup.cluster_names.index(change.cluster)]
        self.set_conditions(change.cluster, now)
        match change.presence:
            case "comes":
                self.come(change.cluster)
            case "leaves":
                self.clusters[change.cluster].stop_soon("its part is over")
            case "killed":
                self.clusters[change.cluster].kill()

    def _made(self) -> dict[str, tuple[int, float]]:
        """The steps of each cluster, and the time that it spent on them."""
        return {name: (host.steps, host.trained_until_now_s) for name, host in self.clusters.items()}

    # ---- the curve ----

    def _add(self, version: Version, tokens: int, at_s: float) -> None:
        before_tokens = self._curve[-1].tokens if self._curve else 0
        self._curve.append(CurvePoint(str(version), tokens, at_s, None))
        total, marks = self._setup.run.tokens, self._setup.run.evaluations
        if self._evaluate is None or before_tokens >= total:
            return
        if before_tokens < total < tokens and self._before is not None:
            self._measure(-2, self._before)
        theta = self.parameters(version)
        due = tokens * marks // total > before_tokens * marks // total
        self._before = None if due else theta
        if due:
            self._measure(-1, theta)

    def _measure(self, index: int, theta: F32) -> None:
        assert self._evaluate is not None, "called only with training"
        loss = self._evaluate(theta)
        self._curve[index] = replace(self._curve[index], loss=loss if math.isfinite(loss) else None)

    # ---- the end ----

    def _record(self) -> RunRecord:
        setup, tally, hopeless = self._setup, self._tally, self._hopeless()
        if hopeless:
            self._ends_s, self._at_end = self.kernel.now_s - tally.began_s, self._made()
        loss, virtual_s = (None, self._ends_s) if hopeless else at_tokens(self._curve, setup.run.tokens)
        assert hopeless or self._done, "the master ends a run at its tokens"
        untrained = self._done and self._evaluate is None
        ended = "finished" if untrained or loss is not None else "diverged"
        if not self._done and tally.voids_in_a_row >= HOPELESS_VOIDS and tally.locked_out:
            ended = "locked out"
        links, moved_bytes = self.net.links, {"push": 0, "pull": 0}
        assert links is not None, "a comparison has links"
        for (source, _), n_bytes in links.sent_bytes.items():
            moved_bytes["push" if source in setup.cluster_names else "pull"] += n_bytes
        begun, present_s = self._at_begin, setup.present_s(self._ends_s)
        inject = self._injection.kind if self._injection is not None else ""
        return RunRecord(
            self._method.name, self.seed, inject, setup.run.tokens, ended, loss, virtual_s,
            tally.rounds, tally.voids,
            curve=tuple(self._curve),
            judged=tuple(tally.facts),
            alarms=tuple(tally.alarms),
            cluster_tokens=dict(tally.cluster_tokens),
            cluster_steps={name: steps - begun[name][0] for name, (steps, _) in self._at_end.items()},
            waited_s={
                name: max(0.0, present_s[name] - trained_s + begun[name][1])
                for name, (_, trained_s) in self._at_end.items()
            },
            moved_bytes=moved_bytes,
        )  # fmt: skip


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
        self.alarms: list[tuple[float, str, str]] = []
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
            of = f" of {' and '.join(fields['clusters'])}" if fields["clusters"] else ""
            about = f"{fields['code'].replace('_', ' ')}{of}"
            self.alarms.append((process.kernel.now_s - self.began_s, about, fields["sentence"]))

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
        version = Version(*record["version"])
        self.tokens[version] = record["tokens"]
        if record["judgement"] is not None:
            self.rounds, self.voids_in_a_row = self.rounds + 1, 0
            self.facts.append(self._fact(record, version, now_s))
            for item in record["participants"]:
                if item["verdict"] == "APPLIED":
                    self.cluster_tokens[push_from_json(item["push"]).cluster] += item["tokens"]
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
        push, base = push_from_json(item["push"]), Version(*item["base"])  # only the seed has no base
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
