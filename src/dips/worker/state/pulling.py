"""Pulls a version and installs it as the live parameters, at a step boundary (docs/protocol.md)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from dips.core.errors import RemoteProtocolError
from dips.core.ids import Version
from dips.core.messages import BeginPullRequest, Busy, FinishPullRequest, PlacementSpec, PullGrant
from dips.core.wire import Codec
from dips.worker.state import tape
from dips.worker.state.effects import Cancel, Done, Failed, Install, InstallMode
from dips.worker.state.shared import SharedState
from dips.worker.state.waiting import ExchangeStage

MAX_CORRUPT = 3
"""Pulls in a row whose bytes contradict the master's digest, before this cluster gives up."""


@dataclass(frozen=True)
class PullPlan:
    """The purpose of a pull."""

    mode: InstallMode
    at_least: Version | None
    reset_inner: bool = False
    drops: bool = False  # the live parameters will be dropped, so training waits for the pull


class Pulling:
    """The open pull, if there is one: its plan, then the master's grant, then the job that fetches the version."""

    def __init__(self, shared: SharedState) -> None:
        self._shared = shared
        self.plan: PullPlan | None = None
        self.job: int | None = None
        self._grant: PullGrant | None = None
        self._began_s = 0.0
        self._corrupt = 0
        self._whole = False
        """Differences could not be fetched: the next version is to come as parameters."""

    def begin(self, plan: PullPlan) -> None:
        """Ask for a version; the caller has moved the phase to PULLING."""
        self.plan, self._began_s = plan, self._shared.now_s
        self.ask_again()

    def ask_again(self) -> None:
        """Ask for the plan's version; after a new Join, earlier grants are void."""
        self._grant = self.job = None
        self._shared.hold(ExchangeStage.PULL)
        self._shared.ask(self._request)

    def answered(self, answer: PullGrant | Busy) -> None:
        """Take the answer to BeginPull. Raises RemoteProtocolError when the grant's placement is not of this layout."""
        shared = self._shared
        if isinstance(answer, Busy):
            shared.note = answer.sentence
            shared.not_taken()
            shared.ask(self._request, max(answer.retry_after_s, 0.05))
            return
        check_placement(answer.placement, len(shared.config.layout.blocks))
        if answer.wire.is_difference and (answer.base is None or not answer.base.behind(answer.version)):
            raise RemoteProtocolError(f"the master grants differences of {answer.version} to {answer.base}")
        if answer.wire.is_difference and answer.base != shared.base:
            raise RemoteProtocolError(f"the master grants differences to {answer.base}, here is {shared.base}")
        assert self.plan is not None, "a grant answers the question of a plan"
        shared.terms.granted(answer)
        shared.note = f"pulling version {answer.version}"
        shared.hold(ExchangeStage.FETCH)
        self._grant, self.job = answer, shared.run(answer)

    def version_gone(self) -> None:
        """After a rollback no version is as new as the verdict's: pull the newest one instead."""
        if self.plan is not None:
            self.plan = replace(self.plan, at_least=None)

    def failed(self, event: Failed) -> None:
        """Ask again after a failure. Raises RemoteProtocolError when the bytes were wrong too often in a row."""
        shared = self._shared
        shared.train_on()
        shared.record(tape.PullFailed(shared.cause, reason=event.sentence))
        shared.log("pull", f"the pull failed: {event.sentence}; trying again", logging.WARNING)
        self._corrupt = self._corrupt + 1 if event.corrupt else 0
        if self._corrupt >= MAX_CORRUPT:
            raise RemoteProtocolError(
                f"{self._corrupt} pulls in a row had wrong bytes ({event.sentence}): the slaves' memory or snapshots "
                "are damaged; restart the slaves, then this cluster"
            )
        self._release_pin()
        self._grant = self.job = None
        self._whole = self._whole or event.base_gone or event.corrupt
        shared.ask(self._request, 0.0 if event.base_gone else 0.5)

    def install(self, event: Done) -> None:
        """Install the pulled version as the base; the caller moves the phase."""
        shared, plan, grant = self._shared, self.plan, self._grant
        assert plan is not None, "only the open pull ends"
        assert grant is not None, "a transfer begins with a grant"
        self._corrupt, self._whole = 0, False
        mode = plan.mode
        rolled_back = shared.base is not None and shared.base.timeline != grant.version.timeline
        if rolled_back or plan.drops or shared.terms.stop:
            # No local steps are kept across a rollback, whatever the pull was for, nor after the run's end: a cluster
            # that leaves has the last version. Nor is a step kept that began before the loop was made to wait.
            shared.aside_ranges(shared.work.drop())
            mode = InstallMode.REPLACE
        if rolled_back:
            shared.clear_residual()
        mode = self._exact(mode)
        share = shared.terms.settings.overlap_share if mode is InstallMode.REBASE_FROM_PUSH else 1.0
        shared.emit(Install(mode, plan.reset_inner, share))
        shared.base, shared.base_fence = grant.version, grant.fence
        shared.pull_s = shared.now_s - self._began_s
        shared.patience.transferred(ExchangeStage.FETCH, event.seconds)
        # Steps towards the next push. A dynamic H_j counts from the pull; a fixed H from the last push.
        if mode is InstallMode.REPLACE:
            shared.steps_towards_push = shared.steps_since_snapshot = 0
        elif mode is InstallMode.REBASE_FROM_PUSH and shared.terms.settings.dynamic_local_steps:
            shared.steps_towards_push = 0
        shared.record(
            tape.VersionInstalled(
                shared.cause,
                version=grant.version,
                mode=mode.name,
                transfer_s=event.seconds,
                pull_s=shared.pull_s,
                reset_inner=plan.reset_inner,
                tokens=grant.tokens,
                local_steps=shared.terms.local_steps,
                digest_of_slave=dict(grant.digest_of_slave),
                wire=grant.wire.name if grant.wire.is_difference else Codec.F32.name,
            )
        )
        shared.note = ""
        self._release_pin()
        self.forget()

    def cancel(self) -> None:
        """Stop the transfer; the caller forgets the plan or asks again."""
        if self.job is not None:
            self._shared.emit(Cancel(self.job))
            self.job = None

    def give_up(self) -> None:
        """Forget the open pull, if there is one, and release its pin."""
        self.cancel()
        self._release_pin()
        self.forget()

    def forget(self) -> None:
        """No pull is open any longer; its pin, if it has one, ends with the incarnation."""
        self.plan = self.job = self._grant = None
        self._began_s = 0.0

    def _exact(self, mode: InstallMode) -> InstallMode:
        """REPLACE for a rebase over no steps, whose result is the pulled version to the bit; else the mode itself."""
        shared = self._shared
        ahead = shared.steps_since_snapshot if mode is InstallMode.REBASE_FROM_PUSH else shared.work.pending.steps
        return mode if ahead else InstallMode.REPLACE

    def _release_pin(self) -> None:
        if self._grant is not None:
            pin_id, cause = self._grant.pin_id, self._shared.cause
            self._shared.aside(lambda: FinishPullRequest(self._shared.terms.caller(cause), pin_id))

    def _request(self) -> BeginPullRequest:
        assert self.plan is not None, "asked only for an open plan"
        shared = self._shared
        takes = shared.config.takes_differences and shared.terms.settings.pull_wire != "float32" and not self._whole
        base = shared.base if takes else None
        return BeginPullRequest(shared.terms.caller(shared.cause), at_least=self.plan.at_least, base=base)


def check_placement(placement: PlacementSpec, n_blocks: int) -> None:
    """Check a placement. Raises RemoteProtocolError unless every block has a known slave."""
    indices = placement.slave_of_block
    if len(indices) != n_blocks or any(not 0 <= index < len(placement.slaves) for index in indices):
        raise RemoteProtocolError(
            f"the master's placement names {len(indices)} blocks on {len(placement.slaves)} slaves, the model has "
            f"{n_blocks} blocks: the master and this cluster do not agree on the layout"
        )
