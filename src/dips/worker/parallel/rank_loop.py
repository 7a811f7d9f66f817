"""One rank's training loop: it counts its steps, and meets the other ranks where something can be decided.

The leader's session decides there, for all: it gets the steps of all ranks since the last meeting, gives commands to
all, and then says that training goes on, with the number of steps until the next meeting. Before the first one all
ranks agree on what they hold (loop_of_ranks()).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from dips.core.clock import Clock, SystemClock
from dips.core.ids import Version
from dips.core.layout import Layout
from dips.core.messages import DataRange
from dips.core.model_description import Untrained
from dips.core.net.keys import security_of
from dips.core.net.zmq_sockets import CurvePair, pair_for
from dips.core.observe.failpoints import install
from dips.core.observe.tape import Tape
from dips.worker.checkpoint_files import CheckpointStore
from dips.worker.commands import GoOn, Ranges, ShareOut
from dips.worker.config import ClientConfig
from dips.worker.parallel.agreement import agree
from dips.worker.parallel.held import Held
from dips.worker.parallel.meetings import RankReport, next_meeting_steps, same_batches, tally
from dips.worker.parallel.rank_checkpoints import LeadingCheckpoints, RankCheckpoints
from dips.worker.parallel.rank_part import LeadingPart, RankPart, follow
from dips.worker.parallel.rank_state import RankState
from dips.worker.parallel.ranks import Ranks
from dips.worker.parallel.replicas import Replicas
from dips.worker.parallel.untrained import untrained_of_ranks
from dips.worker.shell import ClusterShell, OtherRanks, reason_of
from dips.worker.torch_state import HasState

_logger = logging.getLogger("dips")

MOST_NAMED = 8
"""Ranks that a sentence names."""


class RankLoop:
    """A cluster of several ranks, with the methods that ClusterShell has for one process. Each is called on all ranks,
    after the same steps, but request_stop(); only __init__ sends nothing, and close() of what is not pushed.
    """

    def __init__(
        self, ranks: Ranks, part: RankPart, coordinates: Sequence[int], shell: ClusterShell | None,
        leading: LeadingPart | None, checkpoints: LeadingCheckpoints | None = None, *,
        loss: Callable[[bool], float], clock: Clock | None = None, wait_s: float = math.inf,
    ) -> None:  # fmt: skip
        """coordinates: of each rank; those with the same one train on the same data. shell, leading, checkpoints: the
        leader's. loss: given whether a push is due, returns the mean of the losses since it was last called, NaN where
        there is none. wait_s: how long a rank that has left waits for others that make no step, at least.
        """
        self._loss = loss
        self._clock = clock or SystemClock()
        self._wait_s = wait_s
        self._stepped_s: float | None = None
        self._ranks = ranks
        self._part = part
        self._coordinates = coordinates
        self._shell = shell
        self._leading = leading
        self._checkpoints = checkpoints
        self._steps = self._tokens = self._empty_steps = self._empty_tokens = 0
        self.first_batches = b""
        """Digest of this rank's first batches, once it is known."""
        self._compares_batches = True
        self._told_empty = False
        self._trained: list[DataRange] = []
        self._given: list[DataRange] = []
        self.news = GoOn()
        self.held_ranges: tuple[DataRange, ...] = ()
        """Leased to this cluster and not trained on, when news.times_forgotten went up; others may not be."""

    @property
    def shell(self) -> ClusterShell | None:
        """The leader's."""
        return self._shell

    def start(self) -> None:
        """Join the run: the leader does, and the others do what it says until all may train. Closed after an error."""

        def join() -> None:
            assert self._shell is not None, "only the leader joins"
            assert self._leading is not None, "likewise"
            self._shell.__enter__()
            if self._shell.resumed and not self._shell.done:
                # By the master's chunks, while the checkpoint can be read; it may have others. Nothing was pulled yet
                # where the checkpoint's version is still the newest.
                self._leading.do(ShareOut(self._shell.settings.chunk_bytes))

        try:
            if self._shell is None:
                self._follow()
            else:
                self._lead(join)
            self._part.forget_found()
        except BaseException as error:
            self.close(reason_of(type(error), error))
            raise

    def step(self, tokens: int, ranges: Sequence[DataRange] = (), *, is_empty: bool = False) -> None:
        """Count an inner step; meet the others if it is time for that. ranges: of leased data, what all ranks together
        have trained on, the same on each of them. is_empty: this rank had no gradient; one before which no rank had
        does not count in the run.
        """
        self._steps += 1
        self._empty_steps += is_empty
        self._empty_tokens += tokens * is_empty
        now_s = self._clock.monotonic_s()
        if self._stepped_s is not None:
            self._wait_s = max(self._wait_s, now_s - self._stepped_s)  # such as an evaluation
        self._stepped_s = now_s
        self._tokens += tokens
        self._trained += ranges
        if not self.news.done and self._steps >= self.news.next_meeting_steps:
            self._meet(is_due=self.news.push_is_near)

    def lease(self, tokens: int) -> list[DataRange]:
        """Lease about `tokens` tokens of the corpus for all ranks, as ClusterShell.lease() does; the same on each."""
        return [] if self._is_over() else self._ranges_of(lambda shell: shell.lease(tokens))

    def take_unused(self) -> list[DataRange]:
        """After start(), of leased data: what ClusterShell.take_unused() returns, on all ranks."""
        return self._ranges_of(lambda shell: shell.take_unused())

    def checkpoint_now(self, label: str) -> bool:
        """Take a checkpoint under a label, on all ranks, after the same step; returns when it is durable. Returns
        whether all ranks have it; on the leader only.
        """
        if self._is_over():
            return False
        if self._shell is None:
            self._follow()
            return False
        shell, taken = self._shell, []
        self._lead(lambda: taken.append(shell.checkpoint_now(label)))
        return taken[0]

    def checkpoint_if_due(self) -> None:
        """Take a checkpoint, or complete one, on all ranks, after the same step, if the ranks heard that it is time
        when they met last. Sends nothing else.
        """
        if not self.news.checkpoint_is_due or self._is_over():
            return
        if self._shell is None:
            self._follow()
        else:
            self._lead(self._shell.checkpoint_if_due)

    def _is_over(self) -> bool:
        """Whether the run has ended for this cluster, once the session knows of all steps."""
        if self._steps and not self.news.done:
            self._meet()
        return self.news.done

    def request_stop(self, reason: str = "SIGTERM") -> None:
        """As ClusterShell.request_stop(). The other ranks learn it when they meet."""
        if self._shell is not None:
            self._shell.request_stop(reason)

    def close(self, reason: str, *, push_pending: bool = False, patient: bool = True) -> None:
        """End this rank's threads and connections. push_pending: all ranks leave their loops, and first the steps that
        are not shared yet are pushed, as ClusterShell.close() does; else the other ranks notice, where they have not
        left as well, and the leader leaves the run and pushes nothing more.
        """
        try:
            if push_pending and not self.news.done:
                self._ranks.leave(self._wait_s)
                self._meet(leaves_for=reason, patient=patient)
        except BaseException as raised:
            reason = reason_of(type(raised), raised)
            raise
        finally:
            try:
                if self._leading is not None:
                    self._leading.alone = True
                if self._shell is not None:
                    self._shell.close(reason, push_pending=False)
                self._part.close()
            finally:
                self._ranks.close()

    # ---- what all ranks know, since they met last ----

    @property
    def done(self) -> bool:
        return self.news.done

    @property
    def released(self) -> bool:
        return self.news.released

    @property
    def resumed(self) -> bool:
        return self.news.resumed

    @property
    def version(self) -> Version | None:
        return Version(self.news.timeline, self.news.version) if self.news.timeline else None

    @property
    def total_tokens(self) -> int:
        return self.news.total_tokens

    @property
    def local_steps(self) -> int:
        return self.news.local_steps

    @property
    def times_forgotten(self) -> int:
        return self.news.times_forgotten

    @property
    def tape(self) -> Tape | None:
        """The leader's."""
        return None if self._shell is None else self._shell.tape

    @property
    def cause(self) -> str:
        """Known to the leader, which alone writes records."""
        return "" if self._shell is None else self._shell.cause

    @property
    def progress(self) -> int:
        """Tokens of the run, as far as known here; of leased data, with this cluster's own since the ranks met."""
        return self.news.progress + sum(part.tokens for part in self._trained)

    # ---- meetings ----

    def _meet(self, *, is_due: bool = True, leaves_for: str | None = None, patient: bool = True) -> None:
        """is_due: a push is, or its losses are read for another reason."""
        loss = self._loss(is_due)
        known = math.isfinite(loss)
        mine = replace(
            self._part.report(),
            steps=self._steps,
            tokens=self._tokens,
            loss_sum=loss * self._tokens if known else 0.0,
            loss_tokens=self._tokens if known else 0,
            leaves=leaves_for is not None,
            empty_steps=self._empty_steps,
            empty_tokens=self._empty_tokens,
            first_batches=int.from_bytes(self.first_batches[:6], "little"),  # a float64 has them to the bit
        )
        self._steps = self._tokens = self._empty_steps = self._empty_tokens = 0
        reports = [RankReport.of_numbers(numbers) for numbers in self._ranks.report(mine.numbers())]
        if self._shell is None:
            self._follow()
        else:
            self._lead(lambda: self._decide(reports, leaves_for, patient))

    def _decide(self, reports: Sequence[RankReport], leaves_for: str | None, patient: bool) -> None:
        """The leader's part of a meeting."""
        assert self._shell is not None, "only the leader decides"
        assert self._leading is not None, "likewise"
        total = tally(reports, self._coordinates)
        self._leading.heard(reports)
        if total.empty_steps and not self._told_empty:
            self._told_empty = True
            _logger.warning(
                "optimizer.step() changed nothing, as no rank's optimizer had a gradient: its tokens are not counted, "
                "and such a step is none; call loss.backward() before it, and zero_grad() after it"
            )
        if self._compares_batches and (same := same_batches(reports, self._coordinates)) is not None:
            self._compares_batches = False
            if same:
                more = f" and {len(same) - MOST_NAMED} more" if len(same) > MOST_NAMED else ""
                _logger.warning(
                    "ranks %s%s of this cluster began with the same batches: all but one add nothing, and each one's "
                    "tokens count; give each its own part of the data, as with torch.utils.data.DistributedSampler, or "
                    "dips.Parallel(data_mesh=...) where they share it on purpose",
                    ", ".join(map(str, same[:MOST_NAMED])),
                    more,
                )
        if total.steps:
            trained, self._trained = self._trained, []
            self._shell.step(total.tokens, trained, total.loss, steps=total.steps)
        if self._checkpoints is not None and (total.leaves or self._shell.done):
            self._checkpoints.finish()  # as long as the others follow
        if total.leaves and leaves_for is not None:
            self._shell.close(leaves_for, patient=patient and not total.wants_to_leave)
        self.news = replace(self.news, ends=total.wants_to_leave)

    def _lead(self, decide: Callable[[], object]) -> None:
        """Decide, then let all train on. What is raised is raised on all ranks, as far as they can be told."""
        assert self._leading is not None, "only the leader decides"
        try:
            decide()
        except BaseException as error:
            self._leading.give_up(error)
            raise
        news = self._facts()
        if news.times_forgotten != self.news.times_forgotten:
            assert self._shell is not None, "only the leader decides"
            self.held_ranges = self._shell.held_ranges
            self._leading.say(Ranges(self.held_ranges, are_all=True))
        self.news = news
        self._leading.say(self.news)

    def _follow(self) -> None:
        self.news = follow(self._ranks, self._part, self._get)
        self._trained.clear()

    def _ranges_of(self, taken: Callable[[ClusterShell], list[DataRange]]) -> list[DataRange]:
        """What the leader's shell gives, on all ranks."""
        if self._shell is None:
            self._follow()
        else:
            shell, leading = self._shell, self._leading
            assert leading is not None, "only the leader decides"

            def give() -> None:
                self._given += taken(shell)
                leading.say(Ranges(tuple(self._given), are_all=False))

            self._lead(give)
        given, self._given = self._given, []
        return given

    def _get(self, told: Ranges) -> None:
        if told.are_all:
            self.held_ranges = told.ranges
        else:
            self._given += told.ranges

    def _facts(self) -> GoOn:
        assert self._shell is not None, "only the leader knows"
        shell = self._shell
        # A SIGTERM that came to any rank while the leader waited is one of all ranks, too.
        ends = self.news.ends or (shell.done and shell.exit_reason.startswith("SIGTERM"))
        base = shell.version
        at = (base.timeline, base.v) if base is not None else (0, 0)
        to_push = shell.steps_to_push
        steps = next_meeting_steps(to_push, shell.steps_per_s)
        is_due = self._checkpoints is not None and not shell.done and self._checkpoints.wants_boundary
        return GoOn(
            shell.done, shell.released, ends, *at, shell.progress, steps, steps == to_push, shell.local_steps,
            shell.total_tokens, shell.times_forgotten, shell.resumed, is_due,
        )  # fmt: skip


# ---- at the start ----------------------------------------------------------------------------------------------------


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
    loss: Callable[[bool], float],
    keeps_only_state: bool = False,
    order: Sequence[str] | None = None,
    replicas: bool = False,
) -> RankLoop | None:
    """This rank's loop, which has not joined yet; call it on all ranks together. None where no rank has a master.

    config: None: this rank has no master. held: what this rank holds. state: the loop's own objects, by name,
    part of checkpoints; keeps_only_state: besides the vectors, as a trainer keeps the optimizer by itself. settings:
    must be equal on all ranks. wants_to_leave: whether this rank got a SIGTERM; asked while it waits. loss: as RankLoop
    has it. order, replicas: as in DiLoCo. Raises ConfigError, the same on every rank, for what cannot be shared.
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
    equal = {**settings, "state": sorted(state)}  # on all ranks of a cluster
    if config is not None:
        names = ("master", "cluster_id", "run_id", "wire_dtype", "sync_every", "outer_lr", "outer_momentum", "insecure")
        of_client = {name: getattr(config, name) for name in names}
        equal = {**of_client, "checkpoints": config.checkpoint_dir is not None, **equal}
    agreed = agree(ranks, mine, equal, order=order, replicas=replicas)
    if agreed is None:
        return None
    assert config is not None, "a rank without a master has been refused"
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
            kept = LeadingCheckpoints(leading, store, config, clock)
        others = OtherRanks(ranks.n_ranks, curve, tuple(key for key in keys[1:] if key), leading, kept, agreed.former)
        try:
            shell = shell_of(others, replace(agreed.layout, description=description), untrained, agreed.mine.ids)
        except BaseException as error:
            leading.give_up(error)  # the others have made their loops, and wait in enter()
            raise
        ranks.tell_late(shell.note_late_ranks)
    return RankLoop(
        ranks, part, agreed.coordinates, shell, leading, kept, loss=loss, clock=clock, wait_s=config.ranks_wait_s
    )
