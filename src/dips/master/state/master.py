"""The master's state machine: one function, handle(event, now) -> effects, makes all decisions.

It holds no clock and does no I/O; the same events at the same times give the same effects (I14). Effects that may
depend on a journal entry are held back until the entry is durable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from dips.core import messages
from dips.core.errors import RefusalCode, Refused
from dips.master.state import effects, tape
from dips.master.state.alarms import replica_news
from dips.master.state.ledger import Ledger, ledger_from_journal
from dips.master.state.membership import MAX_TOTAL_TOKENS, Membership
from dips.master.state.pulls import Pulls
from dips.master.state.pushes import Pushes
from dips.master.state.records import Member, RoundPhase
from dips.master.state.recovery import Recovery
from dips.master.state.reshard import Reshard
from dips.master.state.rounds import Rounds
from dips.master.state.shared import RunConfig, SharedState
from dips.master.state.slave_links import SlaveLinks
from dips.master.state.slaves import SlaveRegistry
from dips.master.state.status import status


class MasterMachine:
    """One run's master. Not thread-safe: one owner calls handle() in order of time."""

    def __init__(self, config: RunConfig, epoch: int, snapshot_json: str | None, wall_offset_s: float) -> None:
        """Raises FatalError for a ledger that cannot be read, ConfigError when the settings do not fit the run."""
        ledger = ledger_from_journal(snapshot_json) if snapshot_json else Ledger(config.run_id)
        ledger.check_chunks(config.settings.chunk_bytes)
        ledger.chunk_bytes = config.settings.chunk_bytes
        self.shared = SharedState(config, epoch, ledger, wall_offset_s)
        self._pushes = Pushes(self.shared)
        self._rounds = Rounds(self.shared, self._pushes)
        links = SlaveLinks(self.shared, self._rounds)
        self._recovery = Recovery(self.shared, self._pushes, self._rounds, links)
        self._reshard = Reshard(self.shared, self._pushes, links)
        self._slaves = SlaveRegistry(self.shared, self._pushes, self._rounds, links, self._recovery, self._reshard)
        self._members = Membership(self.shared, self._pushes, self._slaves)
        self._pulls = Pulls(self.shared)
        self._last_tick_s: float | None = None
        self._last_pulls: set[int] | None = None  # pins of readers for which an ended run's master still waits
        self._since_s = 0.0
        self._calls: dict[type[Any], Callable[[int, Any], None]] = {
            messages.JoinRequest: self._members.join,
            messages.HeartbeatRequest: self._members.beat,
            messages.LeaveRequest: self._members.leave,
            messages.BeginPushRequest: self._pushes.begin,
            messages.FinishPushRequest: self._pushes.finish,
            messages.AwaitVerdictRequest: self._pushes.await_verdict,
            messages.BeginPullRequest: self._pulls.begin,
            messages.FinishPullRequest: self._pulls.finish,
            messages.LeaseDataRequest: self._members.lease_data,
            messages.ReturnDataRequest: self._members.return_data,
        }

    def start(self, now_s: float) -> list[effects.Effect]:
        """The first effects after the process's start."""
        self.shared.now_s = now_s
        self._last_tick_s = self._since_s = now_s
        self._slaves.start()
        self._members.start()
        version = self.shared.ledger.version
        self.shared.record(
            tape.EpochBegun(
                "-",
                epoch=self.shared.epoch,
                version=version,
                tokens=self.shared.ledger.tokens,
                durability=self.shared.config.settings.durability,
            )
        )
        found = f"version {version}, {self.shared.ledger.tokens} tokens" if version else "no version yet"
        about = f"epoch {self.shared.epoch}, {found}; {self.shared.outer_step_words()}"
        self.shared.log("master", f"run {self.shared.config.run_id}: {about}")
        if self.shared.take_back_end():
            limit = self.shared.settings().tk_max_tokens
            self.shared.journal("EXTEND", {"tk_max_tokens": limit, "reason": "the settings at the master's start"})
            self.shared.log("master", f"the run had ended at its token limit; tk_max is {limit} now, so it continues")
        self._recovery.start()
        return self.shared.out.take()

    def handle(self, event: effects.Event, now_s: float) -> list[effects.Effect]:
        """Handles one event. Raises LocalProtocolError, with the last events, only for a bug in this code, and
        ConfigError when the settings do not fit what the slaves hold (--rebuild).
        """
        self.shared.now_s = now_s
        match event:
            case effects.ClusterCall(token, request):
                self._call(token, request)
            case effects.OperatorCall(token, action):
                try:
                    self._operate(token, action)
                except Refused as refused:
                    self.shared.refuse(token, refused)
            case effects.SlaveSaid(link, message):
                try:
                    self._slaves.said(link, message)
                except Refused as refused:
                    self.shared.close(link, refused)
            case effects.SlaveLinkDown(link):
                self._slaves.link_down(link)
            case effects.Revoked(role, name, reason):
                # Removes a revoked holder from the run, with its data key; the server refuses its calls.
                sentence = f"its certificate was revoked{f' ({reason})' if reason else ''}"
                self.shared.record(tape.CertificateRevoked("operator", holder=f"{role} {name}", reason=reason))
                self.shared.log(f"revoked {role} {name}", f"{role} {name}: {sentence}", logging.WARNING)
                if role == "cluster":
                    self._pulls.end_reader(name)
                    if name in self.shared.members:
                        self._members.evict(name, sentence)
                if role == "operator":
                    self._pulls.end_readers()
            case effects.ReplicaNews():
                replica_news(self.shared, event)
            case effects.JournalWritten(entry_id):
                self.shared.out.written(entry_id)
            case effects.CallGone(token):
                self._pushes.gone(token)
            case effects.BeatsEnded(cluster, incarnation):
                self._members.beats_ended(cluster, incarnation)
            case effects.Tick():
                self._tick()
        self._settle()
        return self.shared.out.take()

    def next_deadline_s(self) -> float | None:
        """When the next Tick is due at the latest."""
        deadlines = [*self._rounds.deadlines(), *self._pushes.deadlines(), *self._reshard.deadlines()]
        shared = self.shared
        if shared.stopped_s is not None and self._last_pulls is None:
            deadlines.append(shared.stopped_s + shared.config.linger_s)
        return min(deadlines, default=None)

    # ---- calls ----

    def _call(self, token: int, request: messages.ClusterRequest) -> None:
        try:
            self._calls[type(request)](token, request)
        except Refused as refused:
            name = request.caller.name
            self.shared.record(
                tape.CallRefused(
                    request.caller.cause_id,
                    peer=name,
                    call=type(request).__name__,
                    code=refused.code.name,
                    sentence=refused.sentence,
                )
            )
            sentence = f"{type(request).__name__} refused: {refused.sentence}"
            self.shared.log(f"refused {name[:64]}", sentence, cause=request.caller.cause_id)
            self.shared.refuse(token, refused)

    def _operate(self, token: int, action: effects.OperatorAction) -> None:
        shared = self.shared
        asked = action.request if isinstance(action, effects.Pause | effects.Resume | effects.Stop) else action
        shared.check_run(asked.run_id, "the request")
        match action:
            case messages.StatusRequest():
                shared.reply(token, status(shared))
            case effects.Pause(request):
                shared.ledger.paused, shared.changes.paused = request.reason or "no reason given", True
                shared.journal("PAUSE", {"reason": shared.ledger.paused})
                self._done(token, "pause", "no new round begins until `dips resume`; clusters train on")
            case effects.Resume():
                shared.ledger.paused, shared.changes.paused = "", True
                shared.journal("RESUME", {})
                self._done(token, "resume", "rounds go on")
            case effects.Stop(request):
                self._stop(token, request.reason or "stopped by the operator")
            case messages.EvictRequest(_, cluster, reason):
                self._live(cluster)
                shared.ledger.draining.pop(cluster, None)  # after an eviction it may join again
                shared.changes.drains.add(cluster)
                self._members.evict(cluster, reason or "by the operator")
                self._done(token, "evict", f"cluster {cluster} is evicted; it may join again")
            case messages.DrainRequest(_, cluster, reason):
                self._live(cluster)
                shared.ledger.draining[cluster] = reason or "by the operator"
                shared.changes.drains.add(cluster)
                shared.journal("DRAIN", {"cluster": cluster, "reason": shared.ledger.draining[cluster]})
                self._done(token, "drain", f"cluster {cluster} pushes its last steps and leaves")
            case messages.ExtendRequest() as request:
                self._extend(token, request)
            case messages.ReshardRequest() as request:
                self._done(token, "reshard_asked", self._reshard.ask(request))

    def _extend(self, token: int, request: messages.ExtendRequest) -> None:
        """Takes back the run's end, also one that was only asked for, and moves its token limit."""
        shared, ledger = self.shared, self.shared.ledger
        moved = request.no_limit or request.tk_max_tokens > 0
        limit = 0 if request.no_limit else request.tk_max_tokens or shared.settings().tk_max_tokens
        if request.no_limit and request.tk_max_tokens:
            raise Refused(RefusalCode.CONFIG, "a limit and none are asked for: give --tokens N or --no-limit")
        if request.tk_max_tokens > MAX_TOTAL_TOKENS:
            raise Refused(
                RefusalCode.TOKENS, f"a limit of {limit} tokens is too large: give at most {MAX_TOTAL_TOKENS}"
            )
        if 0 < limit <= ledger.tokens:
            raise Refused(
                RefusalCode.CONFIG,
                f"{ledger.tokens} tokens are applied, and the run's limit would be {limit}: give --tokens with more "
                "than are applied, or --no-limit",
            )
        if not (moved or ledger.stopping or ledger.stop_asked):
            raise Refused(
                RefusalCode.CONFIG, "the run has not ended, and nothing asks it to: give --tokens N to move its limit"
            )
        if moved:
            ledger.extended = limit, shared.config.settings.tk_max_tokens
            shared.changes.token_limit = True
        ended = ledger.stopping or ledger.stop_asked
        ledger.stopping = ledger.stop_asked = ""
        shared.changes.end = True
        shared.stopped_s = None
        shared.journal("EXTEND", {"tk_max_tokens": limit, "reason": request.reason or "no reason given"})
        until = f"until {limit} tokens are applied" if limit else "until it is stopped"
        taken_back = f"; its end is taken back ({ended}), start the clusters that left again" if ended else ""
        self._done(token, "extend", f"the run continues {until}{taken_back}")

    def _done(self, token: int, kind: str, sentence: str) -> None:
        self.shared.record(tape.OperatorAsked("operator", request=kind, sentence=sentence))
        self.shared.log("operator", f"{kind}: {sentence}")
        self.shared.reply(token, messages.OperatorReply(sentence))

    def _stop(self, token: int, reason: str) -> None:
        shared = self.shared
        if shared.ledger.stopping and not shared.members:
            awaited = self._awaited()
            if awaited:
                sentence = f"the run has ended; the master waits for {', '.join(awaited)}, attached before its restart"
                self._done(token, "stop", sentence)
                return
            self._done(token, "stop", "no cluster is left; the master stops now")
            self._halt()
            return
        shared.ledger.stop_asked, shared.changes.end = reason, True
        shared.journal("STOP", {"reason": reason})
        self._done(token, "stop", "the open round finishes, then every cluster pulls the last version and leaves")

    def _awaited(self) -> list[str]:
        """Processes from before the master's restart that had no time yet to return: they must learn of the end."""
        shared = self.shared
        if shared.now_s - self._since_s > shared.config.evict_after_s:
            return []
        attached = {name for name, slave in shared.slaves.items() if slave.link is not None}
        return self._members.awaited() + [str(name) for name in shared.slaves_expected() if name not in attached]

    def _live(self, cluster: str) -> Member:
        member = self.shared.members.get(cluster)
        if member is None:
            names = ", ".join(sorted(self.shared.members)) or "none"
            raise Refused(RefusalCode.UNKNOWN_NAME, f"no cluster {cluster!r} is here; live clusters: {names}")
        return member

    # ---- time ----

    def _tick(self) -> None:
        shared = self.shared
        gap_s = shared.now_s - (self._last_tick_s if self._last_tick_s is not None else shared.now_s)
        self._last_tick_s = shared.now_s
        if gap_s > shared.config.settings.heartbeat_s / 2:
            shared.record(tape.MasterStoodStill("-", gap_s=gap_s))
            self._members.rearm(gap_s)
            self._slaves.rearm(gap_s)
            self._pushes.rearm(gap_s)
            self._pulls.rearm(gap_s)
            self._rounds.rearm(gap_s)
            self._recovery.rearm(gap_s)
            self._reshard.rearm(gap_s)
        self._recovery.tick()
        self._slaves.tick()
        self._members.tick()
        self._pushes.tick()
        self._pulls.tick()
        self._rounds.tick()

    def _settle(self) -> None:
        shared = self.shared
        self._recovery.settle()
        self._reshard.settle()
        self._rounds.settle()
        idle = shared.round.phase.now is RoundPhase.IDLE
        if shared.ledger.stop_asked and idle and not shared.ledger.stopping:
            shared.ledger.stopping = shared.ledger.stop_asked
            self._rounds.settle()
        self._members.finish_leaving()
        shared.tell_allowed()
        ended = shared.ledger.stopping and idle and not shared.members and shared.everything_out
        if ended and shared.stopped_s is None and not self._members.awaited():
            shared.stopped_s = shared.now_s
            shared.record(tape.RunStopped("-", reason=shared.ledger.stopping, tokens=shared.ledger.tokens))
            go_on = f"`dips extend` takes the end back for {shared.config.linger_s:g} s"
            shared.log("master", f"the run has ended: {shared.ledger.stopping}; no cluster is left; {go_on}")
        if shared.stopped_s is None or shared.now_s < shared.stopped_s + shared.config.linger_s:
            self._last_pulls = None
            return
        # A reader that pulls the model may end its pull: one of a large model takes longer than linger_s. Pulls that
        # begin later keep no master; nor does this one's reader, once it no longer renews its pin.
        if self._last_pulls is None:
            self._last_pulls = self._pulls.of_readers()
            if self._last_pulls:
                shared.log("master", "the run has ended; the master waits for the readers that pull its model")
        if self._last_pulls.isdisjoint(shared.pins):
            self._halt()

    def _halt(self) -> None:
        self._slaves.stop_all("the run has ended")
        self.shared.halt(0, f"the run has ended: {self.shared.ledger.stopping}")
