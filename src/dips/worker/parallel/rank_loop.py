"""One rank's training loop: it counts its steps, and meets the other ranks where something can be decided.

The leader's session decides there, for all: it gets the steps of all ranks since the last meeting, gives commands to
all, and then says that training goes on, with the number of steps until the next meeting.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from dips.core.clock import Clock, SystemClock
from dips.core.messages import DataRange
from dips.worker.commands import ShareOut
from dips.worker.parallel.meetings import RankReport, Tally, next_meeting_steps, same_batches, tally
from dips.worker.parallel.orders import GoOn, Ranges
from dips.worker.parallel.rank_checkpoints import LeadingCheckpoints
from dips.worker.parallel.rank_part import LeadingPart, RankPart, follow
from dips.worker.parallel.ranks import Ranks
from dips.worker.shell import ClusterShell, reason_of

_logger = logging.getLogger("dips")

MOST_NAMED = 8
"""Ranks that a sentence names."""


class RankLoop:
    """Every method is called on all ranks, after the same steps; only __init__ and close() send nothing."""

    def __init__(
        self, ranks: Ranks, part: RankPart, coordinates: Sequence[int], shell: ClusterShell | None,
        leading: LeadingPart | None, checkpoints: LeadingCheckpoints | None = None, *,
        clock: Clock | None = None, wait_s: float = math.inf,
    ) -> None:  # fmt: skip
        """coordinates: of each rank; those with the same one train on the same data. shell, leading, checkpoints: the
        leader's. wait_s: how long a rank that has left waits for others that make no step, at least.
        """
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

    def enter(self) -> None:
        """Join the run: the leader does, and the others do what it says until all may train. Closed after an error."""
        try:
            if self._shell is None:
                self._follow()
            else:
                self._lead(self._join)
            self._part.forget_found()
        except BaseException as error:
            self.close(reason_of(type(error), error))
            raise

    def step(
        self, tokens: int, loss: Callable[[], float], *, wants_to_leave: bool, ranges: Sequence[DataRange] = (),
        is_empty: bool = False,
    ) -> None:  # fmt: skip
        """Count an inner step; meet the others if it is time for that. loss: returns the mean of the losses since it
        was last called, NaN where there is none. wants_to_leave: this rank got a SIGTERM. ranges: of leased data, what
        all ranks together have trained on, the same on each of them. is_empty: this rank had no gradient; one before
        which no rank had does not count in the run.
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
            self._meet(loss(), wants_to_leave=wants_to_leave)

    def lease(self, tokens: int, loss: Callable[[], float], *, wants_to_leave: bool) -> list[DataRange]:
        """Lease about `tokens` tokens of the corpus for all ranks, as ClusterShell.lease() does; the same on each."""
        if self._steps and not self.news.done:
            self._meet(loss(), wants_to_leave=wants_to_leave)  # the session must know of all steps
        if self.news.done:
            return []
        return self._ranges_of(lambda shell: shell.lease(tokens))

    def unused(self) -> list[DataRange]:
        """After enter(), of leased data: what ClusterShell.take_unused() returns, on all ranks."""
        return self._ranges_of(lambda shell: shell.take_unused())

    def leave(self, reason: str, loss: float, *, wants_to_leave: bool, patient: bool = True) -> None:
        """All ranks leave their loops: the steps that are not shared yet are pushed, as ClusterShell.close() does."""
        if not self.news.done:
            self._ranks.leave(self._wait_s)
            self._meet(loss, wants_to_leave=wants_to_leave, leaves_for=reason, patient=patient)

    def checkpoint(self, label: str, loss: Callable[[], float], *, wants_to_leave: bool) -> bool:
        """Take a checkpoint under a label, on all ranks, after the same step; returns when it is durable. Returns
        whether all ranks have it; on the leader only.
        """
        if self._steps and not self.news.done:
            self._meet(loss(), wants_to_leave=wants_to_leave)  # the session must know of all steps
        if self.news.done:
            return False
        if self._shell is None:
            self._follow()
            return False
        shell, taken = self._shell, []
        self._lead(lambda: taken.append(shell.checkpoint_now(label)))
        return taken[0]

    def checkpoint_if_due(self, loss: Callable[[], float], *, wants_to_leave: bool) -> None:
        """Take a checkpoint, or complete one, on all ranks, after the same step, if the ranks heard that it is time
        when they met last. Sends nothing else.
        """
        if self.news.done or not self.news.checkpoint_is_due:
            return
        if self._steps:
            self._meet(loss(), wants_to_leave=wants_to_leave)  # the session must know of all steps
        if self.news.done:
            return
        if self._shell is None:
            self._follow()
        else:
            self._lead(self._shell.checkpoint_if_due)

    def close(self, reason: str) -> None:
        """End this rank's threads and connections. The other ranks notice, where they have not left as well; the leader
        leaves the run, and pushes nothing more.
        """
        try:
            if self._leading is not None:
                self._leading.alone = True
            if self._shell is not None:
                self._shell.close(reason, push_pending=False)
            self._part.close()
        finally:
            self._ranks.close()

    @property
    def progress(self) -> int:
        """Tokens of the run, as far as known here; of leased data, with this cluster's own since the ranks met."""
        return self.news.progress + sum(part.tokens for part in self._trained)

    @property
    def push_is_near(self) -> bool:
        """Whether a push is due after the next step."""
        return self.news.push_is_near and self._steps + 1 >= self.news.next_meeting_steps

    def _join(self) -> None:
        """The leader's part of enter()."""
        assert self._shell is not None, "only the leader joins"
        assert self._leading is not None, "likewise"
        self._shell.__enter__()
        if self._shell.resumed and not self._shell.done:
            # By the master's chunks, while the checkpoint can be read; it may have others. Nothing was pulled yet where
            # the checkpoint's version is still the newest.
            self._leading.do(ShareOut(self._shell.settings.chunk_bytes))

    def _meet(self, loss: float, *, wants_to_leave: bool, leaves_for: str | None = None, patient: bool = True) -> None:
        known = math.isfinite(loss)
        mine = replace(
            self._part.report(),
            steps=self._steps,
            tokens=self._tokens,
            loss_sum=loss * self._tokens if known else 0.0,
            loss_tokens=self._tokens if known else 0,
            wants_to_leave=wants_to_leave,
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
        self._say_what_does_not_train(reports, total)
        if total.steps:
            trained, self._trained = self._trained, []
            self._shell.step(total.tokens, trained, total.loss, steps=total.steps)
        if self._checkpoints is not None and (total.leaves or self._shell.done):
            self._checkpoints.finish()  # as long as the others follow
        if total.leaves and leaves_for is not None:
            self._shell.close(leaves_for, patient=patient and not total.wants_to_leave)
        self.news = replace(self.news, ends=total.wants_to_leave)

    def _say_what_does_not_train(self, reports: Sequence[RankReport], total: Tally) -> None:
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
                    ", ".join(map(str, same[:MOST_NAMED])), more,
                )  # fmt: skip

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
            self._leading.give(Ranges(self.held_ranges, are_all=True))
        self.news = news
        self._leading.go_on(self.news)

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
                leading.give(Ranges(tuple(self._given), are_all=False))

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
