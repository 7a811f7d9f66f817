"""The plan of one run: numbers of processes and all settings. A seed chooses them all (BUGGIFY: no setting keeps its
default where that could hide a mistake); a comparison of methods gives its own (dips.lab.compare.setup).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from dips.core.ids import ClusterId
from dips.core.layout import AVERAGED_LAYER, Layout, Parameter
from dips.core.messages import DataMode, DataPlan, DataRange, Settings
from dips.core.wire import Codec
from dips.lab.sim.arithmetic import Arithmetic
from dips.lab.sim.content import SYMBOLS
from dips.lab.sim.network import LinkPlan
from dips.master.state.penalty_types import PenaltyConfig
from dips.master.state.shared import RunConfig
from dips.trainer.corpus import take_rows
from dips.worker.state.shared import SessionConfig

# ---- shapes ----------------------------------------------------------------------------------------------------------
#
# Decides the kind of run of a seed: most are small, some wide, some with one bad cluster, a few of thousands of
# rounds. The seed alone decides, with a separate generator, so that all other choices of a small run stay the same.


@dataclass(frozen=True)
class Shape:
    """A kind of run."""

    name: str
    # clusters, slaves: possible numbers, each entry equally likely
    clusters: tuple[int, ...]
    slaves: tuple[int, ...]
    share: float  # of all seeds
    spares: int = 0  # more clusters that may join and leave
    rounds: tuple[int, ...] = ()  # the faults last until so many rounds have begun; none: for the plan's time
    sabotage: bool = False  # all faults are of one cluster, and the others' waits are judged (I15)
    lean: bool = False  # small models and short rounds, so that many fit


SMALL = Shape("small", (2, 2, 3, 3, 4, 5), (1, 2, 2, 3, 3, 4), 0.798)
WIDE = Shape("wide", tuple(range(2, 17)), tuple(range(1, 9)), 0.1, spares=3)
SABOTAGE = Shape("sabotage", (3, 3, 4, 5), (1, 2, 3), 0.1, sabotage=True)
LONG = Shape("long", (2, 3, 3), (1, 2), 0.002, spares=1, rounds=(1000, 2000, 3000), lean=True)
SHAPES = (LONG, WIDE, SABOTAGE, SMALL)

GIVEN = Shape("given", (), (), 0.0)
"""The shape of a run whose plan was given."""


def of_seed(seed: int) -> Shape:
    """The seed's shape."""
    chance = Random(f"shape of {seed}").random()
    for shape in SHAPES:
        chance -= shape.share
        if chance < 0:
            return shape
    return SMALL


# ---- run plan --------------------------------------------------------------------------------------------------------


RUN_ID = "sim"

CHUNK_BYTES = 1024
"""The least that slaves accept; blocks hold a few of them."""

MAX_CLUSTERS = 6
"""The setting max_clusters of a run with few clusters; larger runs use their number of clusters."""

NAMES = "abcdefghijklmnopqrstuvwxyz"

OWN_BATCHES = (1, 3, 8, 20)
SHORT_BATCH_EVERY = 37
BATCH_GROWS_AFTER = 100
"""Of clusters with data of their own: batches, as multiples of tokens_per_step, and the steps of each process at which
one is short, and after which they double. None of it may be taken for a wrong count."""

MIXED_CHUNKS_PER_ROW = 2
"""As in dips.trainer.train, which the simulator cannot import: it trains with torch."""


@dataclass(frozen=True)
class SimulatedRunPlan:
    """One run's settings. Times in seconds."""

    clusters: tuple[str, ...]
    slaves: tuple[str, ...]
    layout: Layout
    data: DataPlan
    config: RunConfig
    step_s: tuple[float, ...]
    """Seconds of one inner step, cluster by cluster."""

    tokens_per_step: int
    delay_s: float
    flush_s: float
    work_s: float
    """About how long a slave's job (measure, prepare, write) takes."""

    call_deadline_s: float
    leave_wait_s: float
    data_silence_s: float
    data_stall_s: float
    faults_for_s: float
    n_faults: int
    checkpoints: bool
    snapshots_kept: int
    arithmetic: Arithmetic = SYMBOLS
    batch_rows: int = 0
    """Rows of a step, cut from what is held as the trainer does it; 0: a step is one piece of one range."""

    sequence_tokens: int = 0
    """The most tokens of a row."""

    step_jitter: float = 0.1
    """A step takes between 1 - step_jitter and 1 + step_jitter of its time."""

    declared: bool = False
    """Whether clusters declare their rates when they join."""

    wires: tuple[Codec, ...] = ()
    """The wire type that each cluster asks for, cluster by cluster; none: all float32."""

    pushers: tuple[int, ...] = ()
    """The ranks of each cluster, cluster by cluster and again from the first: each sends and fetches its share of every
    transfer; none: all clusters have one."""

    later_pushers: tuple[int, ...] = ()
    """The ranks of a cluster whose process begins again: for its second life, the third, and so on, and again from the
    first; none: as many as in its first."""

    retry_max_s: float = 2.0
    slave_memory_bytes: int = 1 << 20
    max_chunk_bytes: int = 1 << 16
    disk_bytes: int = 1 << 30
    """Disk size of each slave."""

    links: LinkPlan | None = None
    """The rates of the data flow's links; None: only the delay."""

    max_events: int = 400_000
    """After so many events the run counts as an endless loop."""

    spares: tuple[str, ...] = ()
    """Clusters that are absent at first, and join and leave."""

    rounds: int = 0
    """The faults last until so many rounds have begun, or for faults_for_s; 0: for faults_for_s."""

    fault_every_s: float = 0.0
    """Mean interval at which new faults are planned; 0: all are planned at the beginning."""

    standby: str = ""
    """Whether decisions wait for a standby ("waits"), or one only follows ("follows"); empty: there is none."""

    sabotaged: str = ""
    """The only cluster with faults, if set."""

    longest_wait_s: float = 0.5
    """A cluster that waits looks after so long at the latest whether it must still wait."""

    steps_at_once: int = 1
    """Most inner steps that a cluster makes in one event, where nothing can happen between them."""

    measured_pace: bool = True
    """Whether beats tell the speed of a cluster's last steps; else the speed that it has, since with many steps in one
    event the last ones would be rounds ago."""

    def __post_init__(self) -> None:
        if self.checkpoints and not self.arithmetic.remembers:
            raise ValueError("checkpoints are of symbols: a run that trains numbers has none")

    def step_tokens(self, name: str) -> int:
        """Tokens of one inner step of this cluster, on leased data."""
        return self.tokens_per_step

    def least_held_tokens(self, name: str) -> int:
        """With fewer tokens a cluster requests a lease before its next step."""
        return self.tokens_per_step if self.batch_rows else 1

    def lease_tokens(self, name: str, local_steps: int) -> int:
        """Tokens that a cluster requests then; with rows as dips.trainer.train does."""
        if not self.batch_rows:
            return self.tokens_per_step * 2
        return max(local_steps * self.tokens_per_step, MIXED_CHUNKS_PER_ROW * self.batch_rows * self.data.chunk_tokens)

    def batch_of(self, name: str, held: Sequence[DataRange], n_steps: int = 1) -> tuple[DataRange, ...]:
        """The next step's tokens from the leased ranges; none with data of its own."""
        if not held:
            return ()
        if self.batch_rows:
            return take_rows(list(held), self.batch_rows, self.sequence_tokens)
        item = held[0]
        return (replace(item, end_tokens=min(item.end_tokens, item.begin_tokens + self.tokens_per_step)),)

    def own_tokens(self, name: str, steps: int) -> int:
        """Tokens of the next step, of the cluster's own data: batches differ, grow, and the last one is short."""
        return 1 if steps % SHORT_BATCH_EVERY == 0 else self.usual_tokens(name, steps)

    def usual_tokens(self, name: str, steps: int) -> int:
        """Tokens of the next step without the short batches."""
        number = self._number(name)
        growth = 2 if number % 2 and steps > BATCH_GROWS_AFTER else 1
        return self.tokens_per_step * OWN_BATCHES[number % len(OWN_BATCHES)] * growth

    @property
    def durability(self) -> str:
        return self.config.settings.durability

    def session_config(
        self, name: str, *, curve_key: bytes = b"", process_id: bytes = b"", rank_keys: Sequence[bytes] = (), pushers:
        int = 1,
    ) -> SessionConfig:  # fmt: skip
        return SessionConfig(
            ClusterId(name),
            self.layout,
            self.data,
            declared_tokens_per_s=self._most_tokens(name) / self.step_s_of(name) if self.declared else 0.0,
            connect_wait_s=1e6,
            call_deadline_s=self.call_deadline_s,
            retry_max_s=self.retry_max_s,
            leave_wait_s=self.leave_wait_s,
            durable_pushes=self.checkpoints,
            wire=self.wires[self._number(name)] if self.wires else Codec.F32,
            curve_key=curve_key,
            rank_keys=tuple(rank_keys),
            pushers=pushers,
            process_id=process_id,
        )

    def _most_tokens(self, name: str) -> int:
        """The most tokens of one step."""
        leased = self.data.mode is DataMode.LEASED
        return self.tokens_per_step if leased else self.usual_tokens(name, BATCH_GROWS_AFTER + 1)

    def pushers_of(self, name: str, life: int) -> int:
        """The ranks of this cluster in its first life, or a later one."""
        if life > 1 and self.later_pushers:
            return self.later_pushers[(life - 2) % len(self.later_pushers)]
        return self.pushers[self._number(name) % len(self.pushers)] if self.pushers else 1

    def step_s_of(self, name: str) -> float:
        """Seconds of one inner step of this cluster; a spare one is like another."""
        return self.step_s[self._number(name)]

    def _number(self, name: str) -> int:
        return (self.clusters + self.spares).index(name) % len(self.clusters)


AVERAGED_SHARE = 0.15
"""The share of small, wide and sabotaged runs whose models have averaged buffers."""


def make_plan(rng: Random, durability: str | None = None, shape: Shape = SMALL) -> SimulatedRunPlan:
    """Choose all settings. durability: to fix that one choice."""
    n_clusters, n_slaves = rng.choice(shape.clusters), rng.choice(shape.slaves)
    clusters = tuple(NAMES[i] for i in range(n_clusters))
    slaves = tuple(f"s{i}" for i in range(n_slaves))
    tokens_per_step = rng.choice((4, 10, 16))
    slowest = rng.choice((1.0, 1.3, 2.0, 4.0))
    step_s = rng.choice((0.2, 0.3, 0.4))
    settings = _settings(rng, n_clusters, durability or rng.choice(("sync", "sync", "sync", "async")))
    plan = SimulatedRunPlan(
        clusters,
        slaves,
        _with_buffers(rng, _layout(rng, n_slaves)),
        _data(rng, tokens_per_step),
        _config(rng, settings, n_slaves, n_clusters),
        tuple(step_s * (1 + (slowest - 1) * i / max(1, n_clusters - 1)) for i in range(n_clusters)),
        tokens_per_step,
        delay_s=rng.choice((0.001, 0.005, 0.03)),
        flush_s=rng.choice((0.001, 0.01, 0.08)),
        work_s=rng.choice((0.005, 0.05, 0.2)),
        call_deadline_s=rng.choice((2.0, 4.0, 7.0)),
        leave_wait_s=rng.choice((8.0, 10.0)),
        data_silence_s=rng.choice((0.8, 1.5)),
        data_stall_s=rng.choice((5.0, 9.0)),
        faults_for_s=rng.choice((10.0, 16.0, 24.0)),
        n_faults=rng.choice((2, 3, 4, 6)),
        checkpoints=rng.random() < 0.7,
        snapshots_kept=rng.choice((2, 3)),
        wires=_wires(rng, n_clusters),
    )
    # As many as the slaves' disks can keep: with more they would refuse to be configured.
    settings = replace(plan.config.settings, async_lag_versions=plan.snapshots_kept - 1)
    plan = replace(plan, config=replace(plan.config, settings=settings))
    plan = _with_pull_wire(rng, plan)
    return _shaped(rng, replace(plan, config=_judged(rng, plan.config)), shape)


def _shaped(rng: Random, plan: SimulatedRunPlan, shape: Shape) -> SimulatedRunPlan:
    """Apply the settings of this shape; a small run is unchanged."""
    n = len(plan.clusters)
    if n > MAX_CLUSTERS or shape.spares:
        plan = replace(
            plan,
            spares=tuple(NAMES[n + i] for i in range(shape.spares)),
            config=replace(plan.config, max_clusters=max(MAX_CLUSTERS, n + shape.spares - rng.randint(0, 1))),
            slave_memory_bytes=plan.slave_memory_bytes * 4,
        )
    if shape.sabotage:
        plan = replace(plan, sabotaged=rng.choice(plan.clusters), n_faults=rng.choice((4, 6, 8)))
    return _lean(rng, plan, shape) if shape.lean else plan


def _lean(rng: Random, plan: SimulatedRunPlan, shape: Shape) -> SimulatedRunPlan:
    """Use one small block for each slave and short rounds: thousands of them fit into a run."""
    layout = Layout(tuple(Parameter(f"layers.{i}.w", (8,), "float32", f"layers.{i}") for i in range(len(plan.slaves))))
    settings = replace(plan.config.settings, sync_every_steps=2, window_chunks=16)
    return replace(
        plan,
        layout=layout,
        config=replace(plan.config, settings=settings, grace_s=rng.choice((0.0, 0.3))),
        step_s=tuple(0.3 for _ in plan.clusters),
        rounds=rng.choice(shape.rounds),
        faults_for_s=6.0 * max(shape.rounds),
        fault_every_s=rng.choice((8.0, 15.0, 30.0)),
        n_faults=0,
        max_events=400 * max(shape.rounds),
    )


MINIMUM_FROM_SEED = 500
"""Earlier seeds, whose records are frozen (tests/frozen/seeds.txt), have no minimum for each round, and no standby."""

MINIMUM_SHARE = 0.3
"""The share of all later ones that have it."""


def with_minimum(seed: int, plan: SimulatedRunPlan) -> SimulatedRunPlan:
    """Some runs wait in each round for a number of pushes; drawn apart, so that seeds keep all other choices."""
    if seed < MINIMUM_FROM_SEED or Random(f"minimum of {seed}").random() >= MINIMUM_SHARE:
        return plan
    own = Random(f"size of the minimum of {seed}")
    n = len(plan.clusters)
    minimum, deadline_s = own.choice((2, n, n, n + 1)), own.choice((1.0, 2.0, 6.0))
    config = replace(plan.config, min_clusters_per_round=minimum, round_deadline_s=deadline_s)
    return replace(plan, config=config)


STANDBY_SHARE = 0.3


def with_standby(seed: int, plan: SimulatedRunPlan, always: bool = False) -> SimulatedRunPlan:
    """Some of the same seeds, or all, have a standby for the master, drawn apart as well; none where all faults are of
    one cluster."""
    chosen = always or (seed >= MINIMUM_FROM_SEED and Random(f"standby of {seed}").random() < STANDBY_SHARE)
    if plan.sabotaged or not chosen:
        return plan
    return replace(plan, standby=Random(f"kind of standby of {seed}").choice(("waits", "waits", "waits", "follows")))


def _wires(rng: Random, n_clusters: int) -> tuple[Codec, ...]:
    """Choose wire types; drawn from a copy of the generator, so that seeds in tests keep all other choices."""
    own = Random()
    own.setstate(rng.getstate())
    return tuple(own.choice((Codec.F32, Codec.BF16, Codec.INT8, Codec.INT4)) for _ in range(n_clusters))


def _with_pull_wire(rng: Random, plan: SimulatedRunPlan) -> SimulatedRunPlan:
    """Half of the runs publish rounded versions, where the model allows it; drawn from a copy, as _wires."""
    own = Random()
    own.setstate(rng.getstate())
    pull_wire = own.choice(("float32",) * 3 + ("bfloat16", "int8", "int4"))
    if any(block.averaged for block in plan.layout.blocks):
        return plan
    settings = replace(plan.config.settings, pull_wire=pull_wire)
    return replace(plan, config=replace(plan.config, settings=settings))


def _judged(rng: Random, config: RunConfig) -> RunConfig:
    """Every rule of JUDGE and every outer optimizer in some seeds; drawn from a copy, as _wires."""
    own = Random()
    own.setstate(rng.getstate())
    optimizer = own.choice(("nesterov",) * 5 + ("heavy-ball", "delayed-nesterov", "averaging"))
    scaled = own.random() < 0.2 and optimizer == "nesterov"
    penalty = replace(
        config.penalty,
        clip_norm=own.choice((1.0, 0.15, 0.05)),
        clip_scope=own.choice(("global", "global", "auto")),
        detector=own.choice(("score",) * 9 + ("literal", "edit", "off")),
        weighting=own.choice(("tokens", "tokens", "tokens", "softmax")),
        outer_optimizer=optimizer,
        momentum_scaling="tokens" if scaled else "off",
        outer_momentum=0.0 if optimizer == "averaging" else config.penalty.outer_momentum,
    )
    return replace(config, penalty=penalty, grace_sliding=own.random() < 0.3)


def _settings(rng: Random, n_clusters: int, durability: str) -> Settings:
    return Settings(
        sync_every_steps=rng.choice((3, 5, 7)),
        dynamic_local_steps=rng.random() < 0.4,
        heartbeat_s=rng.choice((1.0, 1.5, 2.0)),
        evict_after_beats=rng.choice((3, 5)),
        verdict_wait_s=rng.choice((0.0, 1.0, 4.0)),
        chunk_bytes=CHUNK_BYTES,
        window_chunks=rng.choice((1, 2, 16)),
        max_staleness_versions=rng.choice((0, 0, 2, 3)),
        outer_lr=0.7,
        outer_momentum=rng.choice((0.0, 0.8)),
        preset=rng.choice(("safe", "paper")),
        durability=durability,
        ticket_ttl_s=rng.choice((8.0, 15.0)),
        round_timeout_s=rng.choice((3.0, 6.0)),
        overlap=rng.choice(("none", "none", "push", "full")),
    )


def _config(rng: Random, settings: Settings, n_slaves: int, n_clusters: int) -> RunConfig:
    return RunConfig(
        RUN_ID,
        n_slaves,
        settings,
        PenaltyConfig(
            outer_momentum=settings.outer_momentum,
            participation_scaling=rng.random() < 0.7,
            warm_up_pushes=rng.choice((3, 8)),
            quarantine_after_flags=rng.choice((2, 3)),
        ),
        max_clusters=MAX_CLUSTERS,
        min_clusters=rng.choice((1, 1, n_clusters)),
        grace_s=rng.choice((None, 0.0, 0.3, 1.5)),
        lease_ttl_s=rng.choice((10.0, 60.0, 3600.0)),
        pinned_versions=rng.choice((0, 1, 2)),
        linger_s=2.0,
    )


def _layout(rng: Random, n_slaves: int) -> Layout:
    """A few layers of one to three chunks each; at least one block for each slave."""
    n_layers = n_slaves + rng.choice((0, 1, 2))
    chunk_elems = CHUNK_BYTES // 4
    sizes = [chunk_elems * rng.choice((1, 1, 2)) + rng.choice((0, 0, 40)) for _ in range(n_layers)]
    return Layout(tuple(Parameter(f"layers.{i}.w", (size,), "float32", f"layers.{i}") for i, size in enumerate(sizes)))


def _with_buffers(rng: Random, layout: Layout) -> Layout:
    """Some models have averaged buffers; drawn from a copy, as _wires is."""
    own = Random()
    own.setstate(rng.getstate())
    if own.random() >= AVERAGED_SHARE:
        return layout
    buffers = (Parameter(f"norm.{i}", (own.choice((8, 90)),), "float32", AVERAGED_LAYER, averaged=True) for i in "ab")
    return Layout((*layout.parameters, *buffers))


def _data(rng: Random, tokens_per_step: int) -> DataPlan:
    if rng.random() < 0.4:
        return DataPlan(DataMode.OWN)
    chunk_tokens = tokens_per_step * rng.choice((2, 3, 7)) + rng.choice((0, 1))
    return DataPlan(DataMode.LEASED, b"corpus", chunk_tokens * rng.choice((20, 60)), chunk_tokens)
