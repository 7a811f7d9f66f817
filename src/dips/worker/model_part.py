"""One process's part of the model: its live parameters, their flat copies, and the transfers of these.

A cluster's session decides (worker/state); what it wants done to the model is a command (worker/commands.py), and is
done here. Of a cluster of several ranks each has a part, and all carry out the same commands in the same order
(worker/parallel/rank_part.py). Runs on the training thread, at step boundaries.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from dips.core.clock import Clock
from dips.core.layout import Layout
from dips.core.net.zmq_sockets import CurvePair
from dips.core.observe.failpoints import failpoint
from dips.core.observe.tape import Starting, Tape
from dips.worker.commands import Command, Fetch, KeepPush, Send, ShareOut, Snapshot
from dips.worker.data import LinkCounts, RankShare, Transfers
from dips.worker.parameters import ParameterStore
from dips.worker.state.effects import (
    Cancel,
    ClearResidual,
    CopyBase,
    Event,
    Install,
    KeepResidual,
    SendPush,
)
from dips.worker.vectors import Vectors, chunk_spans

_starts = logging.getLogger("dips.worker")


class ModelPart:
    """The part of one process; its shell sees it as that of a leader, which all ranks follow (rank_part.LeadingPart).
    parameters, vectors: for checkpoints, which copy them.
    """

    alone = False
    late_ranks: Sequence[int] = ()
    look_every_s = math.inf

    def __init__(
        self,
        parameters: ParameterStore,
        layout: Layout,
        deliver: Callable[[Event], None],
        clock: Clock,
        tape: Tape,
        curve: CurvePair | None = None,
        links: LinkCounts | None = None,
        of_rank: RankShare | None = None,
    ) -> None:
        """deliver: gets the ends of transfers, on their thread. curve: this process's keys, if any. links: counts the
        traffic; None: it is not counted. of_rank: what this rank owns of the layout, and where ends go; None: all.
        """
        self.parameters = parameters
        self._share = None if of_rank is None else of_rank.share
        self.vectors = Vectors(
            layout.n_elems if self._share is None else self._share.n_elems,
            parameters,
            lambda: Starting("memory", _starts, tape, clock, quiet_s=0.0),
            n_trained=layout.n_trained if self._share is None else self._share.n_elems_before(layout.n_trained),
        )
        self._layout = layout
        self._chunk_bytes = 0
        self._transfers = Transfers(layout, self.vectors, deliver, clock, curve, links, of_rank)

    def do(self, command: Command) -> None:
        """Carry out a command. Raises ConfigError where it cannot be, for a reason that a person must remove."""
        vectors = self.vectors
        match command:
            case ShareOut(chunk_bytes):
                self._chunk_bytes = chunk_bytes
            case Snapshot(may_stay_live, whole):
                failpoint("worker.push.before_copy")
                self._transfers.settle()
                sums_of = self._chunk_bytes if whole and self._share is None else None
                vectors.snapshot(self.parameters, may_stay_live=may_stay_live, chunk_bytes=sums_of)
            case CopyBase():
                vectors.copy_base()
            case Send(job, push, ticket, caller, settings, times):
                self._transfers.push(job, SendPush(push, ticket), caller, settings, times)
            case Fetch(job, grant, cause, times, push_is_live, push_is_needed):
                landing = vectors.landing(push_is_live=push_is_live, push_is_needed=push_is_needed)
                self._transfers.pull(job, grant, landing, cause, times)
            case KeepPush(needed) if needed:
                vectors.keep_push(self.parameters)
            case KeepPush():
                vectors.forget_push()
            case Cancel(job):
                self._transfers.cancel(job)
            case Install(mode, reset_inner, share):
                failpoint("worker.install.before_swap")
                vectors.install(self.parameters, mode, share)
                if reset_inner:
                    self.parameters.reset_inner_optimizer()
                failpoint("worker.install.after_swap")
            case KeepResidual(wire):
                vectors.keep_residual(wire, chunk_spans(self._layout, self._chunk_bytes, self._share))
            case ClearResidual():
                vectors.clear_residual()

    def look(self) -> None:
        """There are no other ranks."""

    @property
    def push_is_live(self) -> bool:
        """Whether theta_at_push is in the live parameters alone, so that KeepPush comes before they change."""
        return self.vectors.push_is_live

    @property
    def push_is_zero(self) -> bool:
        """Whether this process holds the whole model, and every trained element of theta_at_push is 0."""
        return self._share is None and self.vectors.push_is_zero()

    @property
    def push_is_base(self) -> bool:
        """Whether this process holds the whole model, and theta_at_push is theta_base: training changed nothing."""
        return self._share is None and self.vectors.push_is_base()

    def close(self) -> None:
        """End the running transfer and its thread."""
        self._transfers.close()
