"""One rank's place in its cluster's session: what the training loop uses of ClusterShell, for several ranks.

The leader talks to the master and leases text; all ranks hold the same leased ranges, so that each knows the batch of
every step and takes its own rows. Between two meetings no rank sends a message for that.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from dips.core.ids import Version
from dips.core.layout import Layout
from dips.core.messages import DataPlan, DataRange
from dips.core.model_description import Untrained
from dips.core.observe.tape import Tape
from dips.trainer.config import TrainConfig
from dips.trainer.cut_model import CutModel
from dips.trainer.progress import StopSignals
from dips.worker.config import ClientConfig
from dips.worker.parallel.joining import loop_of_ranks
from dips.worker.parallel.rank_loop import RankLoop
from dips.worker.parallel.ranks import ranks_here
from dips.worker.shell import ClusterShell, OtherRanks
from dips.worker.step_checks import Losses
from dips.worker.torch_state import HasState


class ClusterOfRanks:
    """Every method is called on all ranks, after the same steps; but request_stop(), from a signal handler."""

    def __init__(
        self, train: TrainConfig, client: ClientConfig, cut: CutModel, optimizers: Sequence[torch.optim.Optimizer],
        plan: DataPlan, tape: Tape, signals: StopSignals, state: Mapping[str, HasState],
    ) -> None:  # fmt: skip
        """Agree with the other ranks. state: kept in checkpoints, besides the model's and the optimizers'.

        Raises ConfigError, on all of them, where their settings or models differ.
        """
        ranks = ranks_here()
        assert ranks is not None, "the process group has several"
        self._cut = cut
        self._signals = signals
        self._losses = Losses()

        def shell_of(others: OtherRanks, layout: Layout, untrained: Untrained, trained: frozenset[int]) -> ClusterShell:
            return ClusterShell(client, others, layout, plan, tape=tape, untrained=untrained)

        try:
            loop = loop_of_ranks(
                ranks, client, lambda _: cut.held(optimizers), optimizers, state, shell_of,
                settings=train.model_dump(mode="json"), order=cut.names,
                wants_to_leave=lambda: signals.caught is not None,
            )  # fmt: skip
        except BaseException:
            ranks.close()
            raise
        assert loop is not None, "all ranks have a master"
        self._loop: RankLoop = loop

    def start(self) -> None:
        """As ClusterShell.start()."""
        self._loop.enter()

    def step(self, tokens: int, ranges: Sequence[DataRange], loss: float) -> None:
        """As ClusterShell.step(); ranges (one for each row) and loss are the cluster's, the same on all ranks."""
        self._losses.add(loss)
        own = sum(part.tokens for part in ranges[self._cut.rows])
        self._loop.step(own, self._loss, wants_to_leave=self._wants_to_leave, ranges=ranges)

    def lease(self, tokens: int) -> list[DataRange]:
        """As ClusterShell.lease(), on all ranks."""
        return self._loop.lease(tokens, self._loss, wants_to_leave=self._wants_to_leave)

    def take_unused(self) -> list[DataRange]:
        """As ClusterShell.take_unused(), on all ranks."""
        return self._loop.unused()

    def checkpoint_if_due(self) -> None:
        """As ClusterShell.checkpoint_if_due(), on all ranks."""
        self._loop.checkpoint_if_due(self._loss, wants_to_leave=self._wants_to_leave)

    def request_stop(self) -> None:
        """As ClusterShell.request_stop(). The other ranks learn it when they meet."""
        if self._loop.shell is not None:
            self._loop.shell.request_stop("SIGTERM")

    def close(self, reason: str, *, push_pending: bool) -> None:
        """As ClusterShell.close()."""
        try:
            if push_pending:
                self._loop.leave(reason, self._loss(), wants_to_leave=self._wants_to_leave)
                if self._loop.news.ends:
                    self._signals.another_rank_was_told()
        finally:
            self._loop.close(reason)

    @property
    def done(self) -> bool:
        return self._loop.news.done

    @property
    def released(self) -> bool:
        return self._loop.news.released

    @property
    def resumed(self) -> bool:
        return self._loop.news.resumed

    @property
    def version(self) -> Version | None:
        news = self._loop.news
        return Version(news.timeline, news.version) if news.timeline else None

    @property
    def cause(self) -> str:
        """Known to the leader, which alone writes records."""
        return "" if self._loop.shell is None else self._loop.shell.cause

    @property
    def progress(self) -> int:
        """As ClusterShell.progress; the same on all ranks, by which all have one learning rate."""
        return self._loop.progress

    @property
    def total_tokens(self) -> int:
        return self._loop.news.total_tokens

    @property
    def local_steps(self) -> int:
        return self._loop.news.local_steps

    @property
    def times_forgotten(self) -> int:
        return self._loop.news.times_forgotten

    @property
    def held_ranges(self) -> tuple[DataRange, ...]:
        return self._loop.held_ranges

    def _loss(self) -> float:
        return self._losses.take(time.monotonic(), True)

    @property
    def _wants_to_leave(self) -> bool:
        return self._signals.caught is not None
