"""Applies the answer to a new Join to the open push and pull (docs/protocol.md, row FENCED of the verdicts)."""

from __future__ import annotations

from dips.core.errors import ConfigError
from dips.core.ids import PushId
from dips.core.messages import DataMode, JoinReply, Verdict, VerdictKind
from dips.worker.state.effects import InstallMode
from dips.worker.state.pulling import Pulling
from dips.worker.state.pushing import Pushing
from dips.worker.state.shared import SharedState
from dips.worker.state.terms import SessionPhase


class Rejoining:
    """Reconciles the open push, the open pull and the base with the master's answer to Join."""

    def __init__(self, shared: SharedState, pushing: Pushing, pulling: Pulling) -> None:
        self._shared = shared
        self._pushing = pushing
        self._pulling = pulling

    def joined(self, reply: JoinReply) -> None:
        shared = self._shared
        shared.steps = 0
        shared.note = ""
        shared.donate = None
        self._pushing.donation_is_over()
        self._keep(reply)
        shared.record(
            "joined", incarnation=str(reply.incarnation), epoch=reply.epoch, seed=reply.seed, fence=reply.fence,
            last_push=_words(reply.last_push), published=str(reply.published), run_id=reply.run_id,
            kept_tokens=sum(item.tokens for item in reply.kept_ranges),
        )  # fmt: skip
        shared.log("join", f"joined run {reply.run_id} as incarnation {reply.incarnation}")
        match reply.last_push:
            case PushId() as push_id:
                self._undecided(push_id)
            case Verdict() as verdict:
                self._decided(reply, verdict)
            case None:
                self._unknown(reply)
        newest = reply.published or shared.base
        shared.terms.leases_timeline = newest.timeline if newest else None

    def _undecided(self, push_id: PushId) -> None:
        """Wait for the push's verdict, then act on its row of the table."""
        if self._pushing.open is not None and self._pushing.open.id != push_id:
            self._pushing.abandon()
        self._shared.move("joined", SessionPhase.AWAITING)
        self._pushing.await_push(push_id)

    def _decided(self, reply: JoinReply, verdict: Verdict) -> None:
        pushing = self._pushing
        ours = pushing.open is not None and verdict.push == pushing.open.id
        if self._rolled_back(verdict) and not self._acted_on(verdict):
            pushing.tell(verdict)
            pushing.abandon()
            self._keep(reply)
            pushing.drop("joined", at_least=verdict.version)
        elif ours and verdict.kind is not VerdictKind.ABORTED:
            pushing.act(verdict, "joined")
        elif ours:
            pushing.tell(verdict)
            self._unknown(reply)
        elif self._acted_on(verdict):
            pushing.abandon()
            self._resume_or_settle(reply)
        else:
            self._unknown(reply)

    def _acted_on(self, verdict: Verdict) -> bool:
        last = self._pushing.last_verdict
        return last is not None and last.push == verdict.push and last.kind is verdict.kind

    def _rolled_back(self, verdict: Verdict) -> bool:
        return verdict.kind is VerdictKind.ROLLED_BACK and self._shared.base is not None

    def _resume_or_settle(self, reply: JoinReply) -> None:
        """The verdict is known; its pull may still be open, and relies on the fence that the verdict raised."""
        if self._pulling.plan is not None and not self._shared.work.lost:
            self._shared.move("joined", SessionPhase.PULLING)
            self._pulling.resume()
        else:
            self._settle(reply)

    def _unknown(self, reply: JoinReply) -> None:
        """ABORTED, or the master knows no push of this cluster: keep all work, if the base is still valid."""
        self._pushing.abandon()
        plan = self._pulling.plan
        if plan is not None and plan.mode is InstallMode.REBASE_FROM_PUSH:
            # The master no longer knows the verdict that asked for this pull: its fence decides.
            self._pulling.plan = None
        self._settle(reply)

    def _settle(self, reply: JoinReply) -> None:
        shared, pulling = self._shared, self._pulling
        self._keep(reply)  # once more: the open push may have become pending work
        if reply.seed:
            self._must_be_new(reply)
            shared.base, pulling.plan = None, None
            shared.aside_ranges(shared.work.drop())
            shared.clear_residual()
            self._pushing.begin("joined", seed=True)
        elif not self._base_stands(reply) or shared.work.lost:
            reset = pulling.plan is not None and pulling.plan.reset_inner
            self._pushing.drop("joined", reset_inner=reset)
        elif pulling.plan is not None:
            shared.move("joined", SessionPhase.PULLING)
            pulling.resume()
        else:
            shared.move("joined", SessionPhase.TRAINING)

    def _keep(self, reply: JoinReply) -> None:
        if self._shared.config.data_plan.mode is DataMode.LEASED:
            self._shared.work.keep(reply.kept_ranges)

    def _must_be_new(self, reply: JoinReply) -> None:
        """Raises ConfigError for a resumed process: the master does not know the version of its checkpoint."""
        base = self._shared.base
        if self._shared.terms.previous is not None and base is not None:
            raise ConfigError(
                f"this cluster's checkpoint was made on version {base}, but the master of run {reply.run_id} knows no "
                "version: if the run's state is lost, recover it (`dips master --rebuild`); if this is a new run of "
                "the same name, remove the checkpoint or give another --checkpoint-dir"
            )

    def _base_stands(self, reply: JoinReply) -> bool:
        """Whether the work since the base still counts. Every rollback raises the fence, so the fence alone decides
        when a master that has just started knows the run's tokens and has not published its version again yet.
        """
        base, published = self._shared.base, reply.published
        if base is None or self._shared.base_fence != reply.fence:
            return False
        return reply.tokens > 0 if published is None else base.timeline == published.timeline


def _words(last_push: Verdict | PushId | None) -> str:
    if isinstance(last_push, Verdict):
        return f"{last_push.push} {last_push.kind.name}"
    return "none" if last_push is None else f"{last_push} undecided"
