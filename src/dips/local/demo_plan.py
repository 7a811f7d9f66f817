"""Makes the plan of `dips demo`: clusters of unequal speed, how long, and which faults.

The numbers are here with their reasons. Decides only; nothing is started or measured here.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dips.core.config import load
from dips.core.errors import ConfigError
from dips.local.demo_faults import CLUSTER, SLAVE, PlannedFault
from dips.local.processes import RunPlan, TrainedCluster, checkpoints_path
from dips.local.run_file import NOT_YET_KNOWN, make_slaves
from dips.local.settings import log_format_asked
from dips.local.tapes import tape_path
from dips.master.config import MasterConfig
from dips.trainer.config import TrainConfig
from dips.worker.config import SECTION as WORKER_SECTION
from dips.worker.config import ClientConfig

RUN_ID = "demo"
LARGEST_GAP = 0.5
PAPER_GAPS = (0.0, 0.16, 0.33, 0.50)
"""The speed gaps of four clusters, as in the simulations that the defaults were chosen by."""

SYNC_EVERY = 16
"""H: small, so that a run of three minutes has some dozens of rounds."""

LOG_EVERY_STEPS = 4
"""Points of the loss picture: four in each round."""

HEARTBEAT_S = 1.0
"""Half the usual one: a killed cluster is evicted within 5 s, which a short run should show."""

CHECKPOINT_EVERY_S = 5.0
"""A tiny model is written in milliseconds, and the killed cluster should come back with little to do again."""

CLUSTER_KILLED_AT = 0.35
SLAVE_KILLED_AT = 0.60
"""Shares of the run's tokens: late enough that there is something to lose, early enough to see it come back."""

FULL_MINUTES = 3.0
LEAST_TOKENS = 1_000_000
"""A run of FULL_MINUTES trains on at least so many tokens, however slow the machine: fewer show too little."""

SPENT_ELSEWHERE = 0.45
"""Share of the machine's time that slaves, master, evaluator, transfers and the two faults take."""


@dataclass(frozen=True)
class DemoOptions:
    """The options of `dips demo`."""

    data: tuple[Path, ...] = ()
    clusters: int = 4
    slaves: int = 2
    minutes: float = FULL_MINUTES
    run_dir: Path = Path("runs/demo")
    faults: bool = True
    model_size: str = "tiny"
    seed: int = 0
    record_pushes: bool = False
    insecure: bool = False
    page: bool = True
    metrics: bool = False


def cluster_names(how_many: int) -> list[str]:
    """The names of the clusters: a, b, c, ... Raises ConfigError beyond z."""
    if not 1 <= how_many <= len(string.ascii_lowercase):
        raise ConfigError(f"a demo has 1 to {len(string.ascii_lowercase)} clusters, not {how_many}")
    return list(string.ascii_lowercase[:how_many])


def speed_gaps(how_many: int) -> list[float]:
    """How much slower than the machine each cluster is made to be: from 0, evenly, to a half."""
    if how_many == len(PAPER_GAPS):
        return list(PAPER_GAPS)
    return [round(LARGEST_GAP * i / max(1, how_many - 1), 3) for i in range(how_many)]


def tokens_to_train(tokens_per_s: float, gaps: Sequence[float], cores: int, minutes: float) -> int:
    """The run's tk_max. tokens_per_s: of one process that has a core to itself.

    A cluster with gap g computes (1 - g) of the time, so that together they ask for sum(1 - g) cores at most.
    """
    cores_used = min(float(cores), sum(1.0 - gap for gap in gaps))
    fits = tokens_per_s * cores_used * (1.0 - SPENT_ELSEWHERE) * minutes * 60.0
    least = LEAST_TOKENS * min(1.0, minutes / FULL_MINUTES)
    return int(max(fits, least))


def train_settings(wanted: DemoOptions) -> TrainConfig:
    """The trainer's settings that all clusters of the demo share, and the evaluator."""
    ours: dict[str, object] = {
        "data": wanted.data,
        "model_size": wanted.model_size,
        "seed": wanted.seed,
        "data_seed": wanted.seed,
        "threads": 1,
        "device": "cpu",
        "log_every_steps": LOG_EVERY_STEPS,
    }
    return load(TrainConfig, "train", overrides=ours).value


def make_plan(wanted: DemoOptions, train: TrainConfig, tk_max: int) -> RunPlan:
    """The plan with all processes of the demo."""
    names, gaps = cluster_names(wanted.clusters), speed_gaps(wanted.clusters)
    master: dict[str, object] = {
        "run_id": RUN_ID,
        "directory": wanted.run_dir / "master",
        "slaves": wanted.slaves,
        "max_clusters": wanted.clusters,
        "min_clusters": wanted.clusters,
        "sync_every": SYNC_EVERY,
        "heartbeat_s": HEARTBEAT_S,
        "preset": "dynamic",
        "tk_max": tk_max,
    }
    clusters = [_cluster(wanted.run_dir, train, name, gap) for name, gap in zip(names, gaps, strict=True)]
    return RunPlan(
        RUN_ID,
        load(MasterConfig, "master", overrides=master).value,
        make_slaves(wanted.run_dir, RUN_ID, wanted.slaves, record_pushes=wanted.record_pushes or None),
        tuple(clusters),
        train,
        wanted.insecure,
        log_format=log_format_asked(None) or "human",
        metrics=wanted.metrics,
    )


def planned_faults(wanted: DemoOptions) -> list[PlannedFault]:
    """Faults for one cluster that is neither the fastest nor the slowest, if there is one, and for the last slave."""
    if not wanted.faults:
        return []
    names = cluster_names(wanted.clusters)
    return [
        PlannedFault(CLUSTER, names[min(1, len(names) - 1)], CLUSTER_KILLED_AT),
        PlannedFault(SLAVE, f"s{wanted.slaves - 1}", SLAVE_KILLED_AT),
    ]


def _cluster(run_dir: Path, train: TrainConfig, name: str, gap: float) -> TrainedCluster:
    ours: dict[str, object] = {
        "run_id": RUN_ID,
        "cluster_id": name,
        "master": NOT_YET_KNOWN,
        "tape": tape_path(run_dir, name),
        "checkpoint_dir": checkpoints_path(run_dir, name),
        "checkpoint_every_s": CHECKPOINT_EVERY_S,
        "resume": True,
    }
    client = load(ClientConfig, WORKER_SECTION, overrides=ours).value
    return TrainedCluster(train.model_copy(update={"emulate_gap": gap}), client)
