"""Makes one rank's loop in a cluster of several: all ranks agree on what they hold, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from dips.core.clock import SystemClock
from dips.core.layout import Layout
from dips.core.model_description import Untrained
from dips.core.net.keys import security_of
from dips.core.net.zmq_sockets import CurvePair, pair_for
from dips.core.observe.failpoints import install
from dips.worker.checkpoint_files import CheckpointStore
from dips.worker.config import ClientConfig
from dips.worker.parallel.agreement import agree
from dips.worker.parallel.held import Held
from dips.worker.parallel.rank_checkpoints import LeadingCheckpoints, RankCheckpoints
from dips.worker.parallel.rank_loop import RankLoop
from dips.worker.parallel.rank_part import LeadingPart, RankPart
from dips.worker.parallel.rank_state import RankState
from dips.worker.parallel.ranks import Ranks
from dips.worker.parallel.replicas import Replicas
from dips.worker.parallel.untrained import untrained_of_ranks
from dips.worker.shell import ClusterShell, OtherRanks
from dips.worker.torch_state import HasState

ShellOf = Callable[[OtherRanks, Layout, Untrained, frozenset[int]], ClusterShell]
"""Makes the leader's shell of all ranks, the model that they hold together, its tensors that are not trained, and id()
of each of the leader's own that are."""


def loop_of_ranks(
    ranks: Ranks,
    config: ClientConfig | None,
    held: Callable[[ClientConfig], Held],
    optimizers: Sequence[torch.optim.Optimizer],
    state: Mapping[str, HasState],
    shell_of: ShellOf,
    *,
    settings: Mapping[str, object],
    wants_to_leave: Callable[[], bool],
    keeps_only_state: bool = False,
    order: Sequence[str] | None = None,
    replicas: bool = False,
) -> RankLoop | None:
    """This rank's loop, which has not joined yet; call it on all ranks together. None where no rank has a master.

    config: None: this rank has no master. held: what this rank holds. state: the loop's own objects, by name,
    part of checkpoints; keeps_only_state: besides the vectors, as a trainer keeps the optimizer by itself. settings:
    must be equal on all ranks. wants_to_leave: whether this rank got a SIGTERM; asked while it waits. order, replicas:
    as in DiLoCo. Raises ConfigError, the same on every rank, for what cannot be shared.
    """
    mine: Held | Exception | None = None
    curve: CurvePair | None = None
    store: CheckpointStore | None = None
    try:
        if config is not None:
            mine = held(config)
            curve = pair_for(security_of(config, f"cluster {config.cluster_id}"))
            if config.checkpoint_dir is not None and ranks.is_leader:
                store = CheckpointStore(config.checkpoint_dir, config.checkpoints_kept)
    except Exception as error:
        mine = error
    agreed = agree(
        ranks, mine, {**_settings_of(config), **settings, "state": sorted(state)}, order=order, replicas=replicas
    )
    if agreed is None or config is None:
        return None
    install("worker", enabled=config.failpoints)
    compared = Replicas(ranks, agreed)
    if compared.agree(replicas=replicas or agreed.mine.is_replica):
        compared.give(ranks.copy)
    untrained, description = untrained_of_ranks(ranks, ranks.copy, agreed)
    checkpoints: RankCheckpoints | None = None
    if config.checkpoint_dir is not None:
        kept_state = RankState(ranks, agreed, optimizers, state, only_parts=keeps_only_state)
        checkpoints = RankCheckpoints(config.checkpoint_dir, ranks, kept_state)
    clock = SystemClock()
    keys = ranks.gather(b"" if curve is None else curve.public)
    part = RankPart(ranks, agreed, compared, optimizers, clock, curve, checkpoints, wants_to_leave)
    shell: ClusterShell | None = None
    leading: LeadingPart | None = None
    kept: LeadingCheckpoints | None = None
    if ranks.is_leader:
        leading = LeadingPart(ranks, part, clock)
        if checkpoints is not None and store is not None:
            kept = LeadingCheckpoints(checkpoints, leading, store, config, clock)
        others = OtherRanks(ranks.n_ranks, curve, tuple(key for key in keys[1:] if key), leading, kept, agreed.former)
        try:
            shell = shell_of(others, replace(agreed.layout, description=description), untrained, agreed.mine.ids)
        except BaseException as error:
            leading.give_up(error)  # the others have made their loops, and wait in enter()
            raise
        ranks.tell_late(shell.note_late_ranks)
    return RankLoop(ranks, part, agreed.coordinates, shell, leading, kept, clock=clock, wait_s=config.ranks_wait_s)


def _settings_of(config: ClientConfig | None) -> dict[str, object]:
    """What must be equal on all ranks of a cluster."""
    if config is None:
        return {}
    names = ("master", "cluster_id", "run_id", "wire_dtype", "sync_every", "outer_lr", "outer_momentum", "insecure")
    settings: dict[str, object] = {name: getattr(config, name) for name in names}
    return {**settings, "checkpoints": config.checkpoint_dir is not None}
