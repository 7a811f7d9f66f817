"""Handles the membership of clusters: join, beat, leave, eviction, and the data that a member leases.

Eviction changes liveness and fencing only.
"""

from __future__ import annotations

import logging
import math

from dips.core import messages
from dips.core.errors import ConfigError, RefusalCode, Refused
from dips.core.ids import Incarnation, PushId, check_name
from dips.core.layout import first_difference
from dips.core.model_description import Untrained, difference
from dips.core.protocol import MAX_LEASED_CHUNKS, MAX_RANKS, PROTOCOL_MIN, RANKS, agree
from dips.master.state import pacing, tape
from dips.master.state.alarms import forget_pushes, look_at_beats
from dips.master.state.leases import MAX_RANGES_IN_A_MESSAGE, LeaseTable, TokenState, overlapping
from dips.master.state.ledger import ClusterEntry, pair
from dips.master.state.pushes import OWN_DATA_START_S, Pushes
from dips.master.state.reasons import Reason, VerdictCode
from dips.master.state.records import Member, Push
from dips.master.state.shared import SharedState
from dips.master.state.slave_links import DIALS_AGAIN_BEATS, NameClaims
from dips.master.state.slaves import MAX_DRAWN_BYTES, SlaveRegistry

MAX_DECLARED_TOKENS_PER_S = 1e12
MAX_TOTAL_TOKENS = 1 << 60
MAX_HOST_CHARACTERS = 200
MAX_CLUSTER_IDS = 1024
"""An id that took part is never forgotten, because its fence must never start again."""


class Membership:
    """The clusters that take part in the run."""

    def __init__(self, shared: SharedState, pushes: Pushes, slaves: SlaveRegistry) -> None:
        self._shared = shared
        self._pushes = pushes
        self._slaves = slaves
        self._away_since_s: dict[str, float] = {}
        self._claims = NameClaims()
        self._since_s = 0.0

    def start(self) -> None:
        self._since_s = self._shared.now_s

    # ---- join ----

    def join(self, token: int, request: messages.JoinRequest) -> None:
        """Starts a new incarnation; what an older one of this cluster has not sealed is aborted."""
        shared, name = self._shared, request.caller.name
        self._check_join(request)
        hello = agree(request.hello.protocol_min, request.hello.protocol_max, request.hello.capabilities, name)
        slot = self._slot(name)
        self._adopt_model(request)
        entry = shared.ledger.entry(name)
        if not entry.incarnations:
            shared.counted_since_s[name] = shared.now_s - OWN_DATA_START_S
        before = shared.members.get(name)
        undecided = self._retire(name, Reason(VerdictCode.REJOINED, f"cluster {name} joined again"))
        entry.incarnations += 1
        entry.incarnation = Incarnation(shared.epoch, entry.incarnations)
        entry.member, entry.declared_tokens_per_s = True, request.declared_tokens_per_s
        if request.process_id != entry.process_id or not request.process_id:
            entry.steps_before, entry.steps_heard = entry.steps_before + entry.steps_heard, 0
            forget_pushes(shared, name)
        entry.process_id = request.process_id
        held = self._reattach(name, request.held_ranges, undecided)
        member = Member(name, entry.incarnation, slot, shared.now_s, held_at_join=held, push=undecided)
        member.process_id, member.host = request.process_id, request.host
        member.pushers = max(1, request.pushers)
        shared.members[name] = member
        shared.stopped_s = None  # a run that has ended waits for it
        shared.allowed.put(messages.KeyRole.CLUSTER, name, request.curve_key, request.rank_keys)
        self._away_since_s.pop(name, None)
        if shared.ledger.version is None and shared.seed_cluster not in shared.members:
            shared.seed_cluster = name  # unless it is drained: see seeder()
        shared.journal("JOIN", {"cluster": name, "incarnation": pair(entry.incarnation)})
        shared.record(
            tape.ClusterJoined(
                request.caller.cause_id, cluster=name, incarnation=entry.incarnation, process=request.process_id
            )
        )
        sentence = f"cluster {name} joined as incarnation {entry.incarnation}"
        sentence += f", with {member.pushers} ranks" if member.pushers > 1 else ""
        shared.log(f"cluster {name}", sentence, cause=request.caller.cause_id)
        self._answer_leave(before)
        versions = messages.Hello(PROTOCOL_MIN, hello.version, tuple(sorted(hello.capabilities)))
        shared.reply(token, self._join_reply(member, entry, versions))

    def _join_reply(self, member: Member, entry: ClusterEntry, hello: messages.Hello) -> messages.JoinReply:
        shared = self._shared
        last: messages.Verdict | PushId | None = member.push.id if member.push else entry.last_verdict
        member.local_steps = pacing.local_steps(shared, member)
        return messages.JoinReply(
            shared.epoch,
            member.incarnation,
            hello,
            shared.settings(),
            shared.ledger.version is None and shared.seeder() == member.cluster,
            entry.fence,
            last,
            shared.published.version if shared.published else None,
            shared.ledger.tokens,
            member.local_steps,
            shared.config.run_id,
            member.held_at_join,
        )

    def _check_join(self, request: messages.JoinRequest) -> None:
        shared, name, previous = self._shared, request.caller.name, request.caller.incarnation
        try:
            check_name(name, "cluster id")
        except ConfigError as error:
            raise Refused(RefusalCode.MALFORMED, str(error)) from error
        shared.check_run(request.caller.run_id, f"cluster {name!r}")
        if shared.ledger.stopping and not self._comes_back(request):
            raise Refused(RefusalCode.STOPPING, f"the run has reached its end: {shared.ledger.stopping}")
        # Each id that the ledger remembers, with fence and statistics, is 1 KB in every journal entry.
        most = MAX_CLUSTER_IDS + shared.config.max_clusters
        if name not in shared.ledger.clusters and len(shared.ledger.clusters) >= most:
            raise Refused(
                RefusalCode.CONFIG,
                f"{len(shared.ledger.clusters)} cluster ids have taken part in this run, and no more are remembered: "
                "give a cluster that comes back the id that it had",
            )
        self._check_process(name, request)
        # An incarnation that never called may be this process's own, if the answer to its Join was lost.
        spoke = shared.ledger.clusters[name].spoke if name in shared.ledger.clusters else None
        if previous is not None and spoke is not None and previous < spoke:
            raise Refused(
                RefusalCode.FENCED,
                f"another process took over cluster {name!r} as incarnation {spoke}: this one, {previous}, must stop; "
                "give each process a cluster id of its own",
            )
        self._check_ranks(name, request)
        if not 0 <= request.declared_tokens_per_s <= MAX_DECLARED_TOKENS_PER_S:
            raise Refused(
                RefusalCode.TOKENS,
                f"{request.declared_tokens_per_s} tokens/s are declared: state 0 (unknown) to "
                f"{MAX_DECLARED_TOKENS_PER_S:g}",
            )
        if len(request.process_id) > MAX_DRAWN_BYTES or len(request.host) > MAX_HOST_CHARACTERS:
            raise Refused(RefusalCode.MALFORMED, f"the process identity or the host of cluster {name!r} is too long")
        if len(request.held_ranges) > MAX_RANGES_IN_A_MESSAGE:
            raise Refused(
                RefusalCode.RANGES,
                f"{len(request.held_ranges)} ranges are named as held: at most {MAX_RANGES_IN_A_MESSAGE} can be",
            )
        Untrained(request.frozen, request.buffers).check()
        if request.layout.layout_hash != request.layout_hash:
            raise Refused(
                RefusalCode.LAYOUT,
                "the layout does not have the hash that came with it: both sides need one release",
            )

    def _comes_back(self, request: messages.JoinRequest) -> bool:
        """Whether it took part before: after the master's restart or an eviction it still pulls the last version.

        A process is known by its identity, one of a release without identities and one that resumes a checkpoint by
        its incarnation. The incarnation counts for members only: a cluster that left would keep the master by coming
        again and again.
        """
        entry, previous = self._shared.ledger.clusters.get(request.caller.name), request.caller.incarnation
        if entry is None:
            return False
        same_process = request.process_id != b"" and request.process_id == entry.process_id
        return same_process or (entry.member and previous is not None and previous == entry.incarnation)

    def _check_ranks(self, name: str, request: messages.JoinRequest) -> None:
        """Checks the number of ranks and their data keys."""
        shared, pushers = self._shared, max(1, request.pushers)
        if pushers > MAX_RANKS:
            raise Refused(
                RefusalCode.CONFIG,
                f"cluster {name!r} has {pushers} ranks, at most {MAX_RANKS} can push: make several clusters of it",
            )
        if len(request.rank_keys) != (pushers - 1 if shared.allowed.encrypted else 0):
            raise Refused(
                RefusalCode.KEY,
                f"cluster {name!r} has {pushers} ranks and brings {len(request.rank_keys)} data keys besides its "
                "first: with --keys there is one for each other rank, with --insecure none; start all ranks alike",
            )
        shared.allowed.check(messages.KeyRole.CLUSTER, name, request.curve_key, request.rank_keys)
        if pushers == 1:
            return
        here = (slave for slave in shared.slaves.values() if slave.link is not None)
        older = sorted(slave.id for slave in here if RANKS not in slave.capabilities)
        if older:
            raise Refused(
                RefusalCode.CONFIG,
                f"cluster {name!r} has {pushers} ranks, and slave {older[0]} runs a release that does not know such "
                "clusters: install the same release of dips on all slaves",
            )

    def _check_process(self, name: str, request: messages.JoinRequest) -> None:
        """Checks which process may hold this name. A process that joins again is accepted at once.

        Another process is a second one or the successor of one that died: it gets the name once the known process
        is gone.
        """
        shared = self._shared
        member, entry = shared.members.get(name), shared.ledger.clusters.get(name)
        beat_s, evict_after_s = shared.config.settings.heartbeat_s, shared.config.evict_after_s
        if member is not None:
            known, words = member.process_id, f"incarnation {member.incarnation}"
            words += f", {member.host}" if member.host else ""
            gone_s = (
                member.silent_since_s + DIALS_AGAIN_BEATS * beat_s if member.silent_since_s is not None else math.inf
            )
            gone = shared.now_s >= gone_s
        elif entry is not None and entry.member:
            # Known from before the master's restart. A live cluster dials within a beat and joins after its step.
            known, words = entry.process_id, f"incarnation {entry.incarnation}, before the master's restart"
            called_s = shared.called_of_old_s.get(name)
            until_s = self._since_s + beat_s if called_s is None else called_s + evict_after_s
            gone = shared.now_s >= until_s
        else:
            return
        if known in (b"", request.process_id) or gone:
            return
        remedy = "stop one of the two, or give each process a cluster id of its own"
        raise self._claims.refuse("cluster", name, request.process_id, words, remedy, shared.now_s, evict_after_s)

    def _slot(self, name: str) -> int:
        """The cluster's staging slot on every slave. Raises Refused(BUSY) when all are taken."""
        shared = self._shared
        if name in shared.members:
            return shared.members[name].slot
        used = {m.slot for m in shared.members.values()} | {p.slot for p in shared.round.participants}
        own = next((push.slot for push in shared.round.participants if push.cluster == name), None)
        free = [slot for slot in range(shared.config.max_clusters) if slot not in used]
        if own is not None:
            return own
        if not free:
            raise Refused(
                RefusalCode.BUSY,
                f"all {shared.config.max_clusters} staging slots are taken: wait for a cluster to leave, or start the "
                "master with a larger max_clusters",
                retry_after_s=5.0,
            )
        return free[0]

    def _adopt_model(self, request: messages.JoinRequest) -> None:
        """Takes layout and data plan from the first joiner; every other cluster must match them."""
        ledger = self._shared.ledger
        _check_plan(request.data_plan)
        if ledger.layout is None:
            self._slaves.place_model(request.layout)
        elif ledger.layout.layout_hash != request.layout_hash:
            raise Refused(
                RefusalCode.LAYOUT,
                f"the model of cluster {request.caller.name!r} is not this run's: "
                f"{first_difference(ledger.layout, request.layout)}; give it the same model, or start another run",
            )
        if ledger.data_plan is not None and ledger.data_plan != request.data_plan:
            raise Refused(RefusalCode.DATA_PLAN, _plan_difference(ledger.data_plan, request.data_plan))
        self._compare_untrained(request)
        if ledger.data_plan is None:
            ledger.data_plan = request.data_plan
            ledger.leases = (
                LeaseTable(request.data_plan) if request.data_plan.mode is messages.DataMode.LEASED else None
            )

    def _compare_untrained(self, request: messages.JoinRequest) -> None:
        """Compares frozen parameters and buffers with those of the first joiner (docs/decisions/0029).

        Buffers are compared strictly at a cluster's first Join only: later it may load a checkpoint of its own, whose
        buffers its training has changed. Raises Refused(FROZEN) with the names of the tensors that differ.
        """
        shared, ledger, name = self._shared, self._shared.ledger, request.caller.name
        rule, theirs = shared.config.settings.frozen, Untrained(request.frozen, request.buffers)
        if rule == "any":
            return
        if ledger.untrained is None:
            ledger.untrained = theirs.to_text()
            return
        ours = Untrained.from_text(ledger.untrained)
        if found := difference("frozen parameters", ours.frozen, theirs.frozen):
            raise Refused(
                RefusalCode.FROZEN,
                f"cluster {name!r} has other frozen weights than this run: {found}; load the same weights in "
                'every cluster, or start the master with frozen = "any" if they may differ',
            )
        found = difference("buffers", ours.buffers, theirs.buffers) if rule == "same" else ""
        entry = ledger.clusters.get(name)
        if found and entry is not None and entry.incarnations:
            shared.log(f"cluster {name}", f"cluster {name} came back with other buffers: {found}", logging.WARNING)
        elif found:
            raise Refused(
                RefusalCode.FROZEN,
                f"cluster {name!r} has other constant buffers than this run: {found}; make the model alike in every "
                'cluster, or start the master with frozen = "parameters" if training changes these buffers',
            )

    def _retire(self, name: str, reason: Reason) -> Push | None:
        """Ends the current incarnation; returns its push if that is sealed and must be waited for."""
        shared = self._shared
        member = shared.members.pop(name, None)
        shared.allowed.remove(messages.KeyRole.CLUSTER, name)
        if member is not None:
            shared.link_rates.gone(name)
            shared.end_pulls(name)
            if member.push is not None and not member.push.sealed:
                self._pushes.abort(member.push, reason)
        return next((push for push in shared.round.participants if push.cluster == name), None)

    def _reattach(
        self, name: str, held: tuple[messages.DataRange, ...], undecided: Push | None
    ) -> tuple[messages.DataRange, ...]:
        """Keeps the leases that this process still holds (they are returned) or that a sealed push carries; frees the
        rest."""
        leases = self._shared.ledger.leases
        if leases is None:
            return ()
        kept = tuple(item for item in held if _leased(leases, name, item))
        leases.free_all_but(name, [*kept, *(undecided.request.ranges if undecided else ())])
        return kept

    # ---- leased data ----

    def lease_data(self, token: int, request: messages.LeaseDataRequest) -> None:
        shared = self._shared
        member = shared.member_of(request.caller)
        leases, plan = self._leases(member.cluster), shared.ledger.data_plan
        assert plan is not None, "a lease table has a plan"
        most = MAX_LEASED_CHUNKS * plan.chunk_tokens
        if not 0 < request.want_tokens <= most:
            raise Refused(
                RefusalCode.TOKENS,
                f"{request.want_tokens} tokens are asked for: ask for 1 to {most} at a time",
            )
        number, ranges = member.last_lease
        if request.request and request.request == number:
            shared.reply(token, messages.LeaseDataReply(ranges))  # the first answer was lost on the way
            return
        if 0 < request.request < number:
            raise Refused(RefusalCode.SEQ, f"request {request.request} is older than request {number}: ask again")
        ranges = leases.lease(member.cluster, request.want_tokens)
        member.last_lease = (request.request, ranges)
        shared.journal("LEASE", {"cluster": member.cluster, "leases": [r.lease_id for r in ranges]})
        shared.record(
            tape.DataLeased(request.caller.cause_id, cluster=member.cluster, tokens=sum(item.tokens for item in ranges))
        )
        shared.reply(token, messages.LeaseDataReply(ranges))

    def return_data(self, token: int, request: messages.ReturnDataRequest) -> None:
        shared = self._shared
        member = shared.member_of(request.caller)
        leases = self._leases(member.cluster)
        leases.check(member.cluster, request.ranges)
        in_push = member.push.request.ranges if member.push else ()
        if taken := overlapping(request.ranges, in_push):
            raise Refused(RefusalCode.RANGES, f"{len(taken)} of the ranges are in an undecided push: await its verdict")
        leases.settle(request.ranges, TokenState.FREE)
        shared.journal("RETURN", {"cluster": member.cluster, "tokens": sum(item.tokens for item in request.ranges)})
        shared.reply(token, messages.ReturnDataReply())

    def _leases(self, cluster: str) -> LeaseTable:
        leases = self._shared.ledger.leases
        if leases is None:
            raise Refused(
                RefusalCode.DATA_PLAN,
                f"this run's clusters bring their own data: cluster {cluster!r} needs no lease",
            )
        return leases

    # ---- beats, leaving, eviction ----

    def beat(self, token: int, request: messages.HeartbeatRequest) -> None:
        shared = self._shared
        member = shared.member_of(request.caller)
        member.beat_s, member.beat = shared.now_s, pacing.plausible(request)
        member.silent_since_s = None
        look_at_beats(shared)
        entry = shared.ledger.entry(member.cluster)
        entry.steps_heard = max(entry.steps_heard, member.beat.steps)
        if not member.local_steps:
            member.local_steps = pacing.local_steps(shared, member)
        published = shared.published.version if shared.published else None
        leaving = shared.ledger.stopping or member.cluster in shared.ledger.draining
        stop = bool(leaving) and member.push is None and shared.everything_out
        donor = shared.recovery.asks(member)
        shared.reply(
            token,
            messages.HeartbeatReply(
                shared.epoch,
                published,
                shared.ledger.tokens,
                member.local_steps,
                stop,
                shared.round.phase.now.value,
                donor.base if donor is not None else None,
                bool(shared.ledger.stopping),
                messages.TokenLimit(shared.settings().tk_max_tokens),
            ),
        )

    def beats_ended(self, cluster: str, incarnation: Incarnation | None) -> None:
        """Notes that the heartbeat stream broke: if the process does not dial again, its successor need not wait for an
        eviction."""
        member = self._shared.members.get(cluster)
        if member is not None and member.incarnation == incarnation:
            member.silent_since_s = self._shared.now_s

    def leave(self, token: int, request: messages.LeaveRequest) -> None:
        """Handles Leave: waits for the verdict of a sealed push, aborts any other."""
        shared = self._shared
        member = shared.member_of(request.caller)
        if member.leave_token is not None:
            shared.refuse(member.leave_token, Refused(RefusalCode.BUSY, "Leave was called again", 1.0))
        member.leave_token = token
        if member.push is None or not member.push.sealed:
            self._depart(member, "LEAVE", request.reason or "it left")

    def awaited(self) -> list[str]:
        """Members from before the master's restart that had no time yet to return."""
        shared = self._shared
        if shared.now_s - self._since_s > shared.config.evict_after_s:
            return []
        clusters = sorted(shared.ledger.clusters.items())
        return [name for name, entry in clusters if entry.member and name not in shared.members]

    def finish_leaving(self) -> None:
        """Lets clusters leave whose verdict, for which they waited, is decided."""
        shared = self._shared
        while shared.leave_ready:
            member = shared.members.get(shared.leave_ready.pop())
            if member is not None and member.leave_token is not None:
                self._depart(member, "LEAVE", "it left")

    def evict(self, cluster: str, reason: str) -> None:
        member = self._shared.members[cluster]
        sentence = f"cluster {cluster} is evicted: {reason}"
        self._shared.log(f"cluster {cluster}", sentence, logging.WARNING, str(member.incarnation))
        self._depart(member, "EVICT", reason)

    def _depart(self, member: Member, kind: str, reason: str) -> None:
        shared, name = self._shared, member.cluster
        undecided = self._retire(name, Reason(VerdictCode.GONE, f"cluster {name} is gone: {reason}"))
        shared.ledger.entry(name).member = False
        self._away_since_s[name] = shared.now_s
        if kind == "LEAVE" and shared.ledger.draining.pop(name, None) is not None:
            shared.changes.drains.add(name)
        if kind == "LEAVE" and shared.ledger.leases is not None:
            shared.ledger.leases.free_all_but(name, undecided.request.ranges if undecided else ())
        if shared.seed_cluster == name:
            shared.seed_cluster = min(shared.members, default=None)
        shared.journal(kind, {"cluster": name, "incarnation": pair(member.incarnation), "reason": reason})
        gone = tape.ClusterLeft if kind == "LEAVE" else tape.ClusterEvicted
        shared.record(gone(str(member.incarnation), cluster=name, reason=reason))
        if kind == "LEAVE":
            shared.log(f"cluster {name}", f"cluster {name} left: {reason}", cause=str(member.incarnation))
        self._answer_leave(member)

    def _answer_leave(self, member: Member | None) -> None:
        """Answers a waiting Leave: for any end of its incarnation, the cluster has left."""
        if member is not None and member.leave_token is not None:
            self._shared.reply(member.leave_token, messages.LeaveReply())
            member.leave_token = None

    # ---- time ----

    def tick(self) -> None:
        shared = self._shared
        for member in shared.live():
            silent_s = shared.now_s - member.beat_s
            if silent_s > shared.config.evict_after_s:
                self.evict(member.cluster, f"its last heartbeat came {silent_s:.1f} s before")
        self._evict_absent()
        # Frees the leases of clusters that stayed away for lease_ttl.
        leases = shared.ledger.leases
        if leases is None:
            return
        for name, entry in shared.ledger.clusters.items():
            if name in shared.members or not entry.incarnations:
                continue
            away_s = shared.now_s - self._away_since_s.setdefault(name, shared.now_s)
            if away_s <= shared.config.lease_ttl_s:
                continue
            sealed = [r for p in shared.round.participants if p.cluster == name for r in p.request.ranges]
            if freed := leases.free_all_but(name, sealed):
                shared.journal("RETURN", {"cluster": name, "tokens": freed, "reason": "lease_ttl"})

    def _evict_absent(self) -> None:
        """Evicts members that only the ledger knows, from before the master's restart, once they had time to join.

        Not in a run that ends: there they may come back for the last version as long as the master answers.
        """
        shared = self._shared
        if shared.ledger.stopping:
            return
        for name, entry in sorted(shared.ledger.clusters.items()):
            if not entry.member or name in shared.members:
                continue
            away_since_s = self._away_since_s.setdefault(name, shared.now_s)
            silent_s = shared.now_s - max(away_since_s, shared.called_of_old_s.get(name, away_since_s))
            if silent_s > shared.config.evict_after_s:
                reason = f"a member before the master's restart, it has not joined for {silent_s:.1f} s"
                shared.log(f"cluster {name}", f"cluster {name} is evicted: {reason}", logging.WARNING)
                entry.member = False
                shared.journal("EVICT", {"cluster": name, "incarnation": pair(entry.incarnation), "reason": reason})
                shared.record(tape.ClusterEvicted(str(entry.incarnation), cluster=name, reason=reason))

    def rearm(self, gap_s: float) -> None:
        self._claims.rearm()
        self._since_s += gap_s
        for member in self._shared.members.values():
            member.beat_s = self._shared.now_s
            if member.silent_since_s is not None:
                member.silent_since_s += gap_s
        self._away_since_s = {name: since_s + gap_s for name, since_s in self._away_since_s.items()}


def _leased(leases: LeaseTable, cluster: str, item: messages.DataRange) -> bool:
    try:
        leases.check(cluster, [item])
    except Refused:
        return False
    return True


def _check_plan(plan: messages.DataPlan) -> None:
    if plan.mode is messages.DataMode.OWN:
        return
    if not 0 < plan.chunk_tokens <= plan.total_tokens <= MAX_TOTAL_TOKENS:
        raise Refused(
            RefusalCode.DATA_PLAN,
            f"{plan.total_tokens} tokens in chunks of {plan.chunk_tokens} cannot be leased: "
            "give more text or smaller chunks",
        )


def _plan_difference(ours: messages.DataPlan, theirs: messages.DataPlan) -> str:
    if ours.mode is not theirs.mode:
        return f"this run's data is {ours.mode.name}, the cluster's {theirs.mode.name}: start all clusters alike"
    if (ours.total_tokens, ours.chunk_tokens) != (theirs.total_tokens, theirs.chunk_tokens):
        return (
            f"the cluster has {theirs.total_tokens} tokens in chunks of {theirs.chunk_tokens}, this run "
            f"{ours.total_tokens} in chunks of {ours.chunk_tokens}: give every cluster the same files, seed and chunks"
        )
    return "the cluster's text has another digest than this run's: give every cluster the same files and seed"
