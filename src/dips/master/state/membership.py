"""Clusters: join, beat, leave, eviction. Eviction changes liveness and fencing only."""

from __future__ import annotations

import logging
import math

from dips.core.errors import ConfigError, RefusalCode, Refused
from dips.core.ids import Incarnation, PushId, Version, check_name
from dips.core.layout import first_difference
from dips.core.messages import (
    DataMode,
    DataPlan,
    DataRange,
    HeartbeatReply,
    HeartbeatRequest,
    Hello,
    JoinReply,
    JoinRequest,
    KeyRole,
    LeaveReply,
    LeaveRequest,
    Verdict,
)
from dips.core.protocol import PROTOCOL_MIN, agree
from dips.core.untrained import Untrained, difference
from dips.master.state import pacing
from dips.master.state.callers import check_member, check_run
from dips.master.state.leases import MAX_RANGES_IN_A_MESSAGE, LeaseTable
from dips.master.state.ledger import ClusterEntry, pair
from dips.master.state.name_claims import DIALS_AGAIN_BEATS, NameClaims
from dips.master.state.push_checks import OWN_DATA_START_S
from dips.master.state.records import Member, Push
from dips.master.state.slave_desk import MAX_DRAWN_BYTES, SlaveDesk
from dips.master.state.verdicts import Verdicts
from dips.master.state.world import World

MAX_DECLARED_TOKENS_PER_S = 1e12
MAX_TOTAL_TOKENS = 1 << 60
MAX_HOST_CHARACTERS = 200
MAX_CLUSTER_IDS = 1024
"""An id that took part once is never forgotten: its fence must never begin anew."""


def most_cluster_ids(world: World) -> int:
    """Ids that the ledger remembers, each with its fence and statistics: 1 KB in every journal entry."""
    return MAX_CLUSTER_IDS + world.config.max_clusters


class Membership:
    """Who takes part."""

    def __init__(self, world: World, verdicts: Verdicts, slaves: SlaveDesk) -> None:
        self._world = world
        self._verdicts = verdicts
        self._slaves = slaves
        self._away_since_s: dict[str, float] = {}
        self._claims = NameClaims()
        self._since_s = 0.0

    def start(self) -> None:
        self._since_s = self._world.now_s

    # ---- join ----

    def join(self, token: int, request: JoinRequest) -> None:
        """A new incarnation; whatever an older one of this cluster has not sealed is aborted."""
        world, name = self._world, request.caller.name
        self._check_join(request)
        hello = agree(request.hello.protocol_min, request.hello.protocol_max, request.hello.capabilities, name)
        slot = self._slot(name)
        self._adopt_model(request)
        entry = world.ledger.entry(name)
        if not entry.incarnations:
            world.counted_since_s[name] = world.now_s - OWN_DATA_START_S
        before = world.members.get(name)
        undecided = self._retire(name, f"cluster {name} joined anew")
        entry.incarnations += 1
        entry.incarnation = Incarnation(world.epoch, entry.incarnations)
        entry.member, entry.declared_tokens_per_s = True, request.declared_tokens_per_s
        entry.process_id = request.process_id
        held = self._reattach(name, request.held_ranges, undecided)
        member = Member(name, entry.incarnation, slot, world.now_s, held_at_join=held, push=undecided)
        member.process_id, member.host = request.process_id, request.host
        world.members[name] = member
        world.allowed.put(KeyRole.CLUSTER, name, request.curve_key)
        self._away_since_s.pop(name, None)
        if world.ledger.version is None and world.seed_cluster not in world.members:
            world.seed_cluster = name  # unless it is drained: see seeder()
        world.journal("JOIN", {"cluster": name, "incarnation": pair(entry.incarnation)})
        world.record(
            "join",
            request.caller.cause_id,
            cluster=name,
            incarnation=str(entry.incarnation),
            process=request.process_id.hex(),
        )
        sentence = f"cluster {name} joined as incarnation {entry.incarnation}"
        world.log(f"cluster {name}", sentence, cause=request.caller.cause_id)
        self._answer_leave(before)
        versions = Hello(PROTOCOL_MIN, hello.version, tuple(sorted(hello.capabilities)))
        world.reply(token, self._join_reply(member, entry, versions))

    def _join_reply(self, member: Member, entry: ClusterEntry, hello: Hello) -> JoinReply:
        world = self._world
        last: Verdict | PushId | None = member.push.id if member.push else entry.last_verdict
        member.local_steps = pacing.local_steps(world, member)
        return JoinReply(
            world.epoch,
            member.incarnation,
            hello,
            world.settings(),
            world.ledger.version is None and world.seeder() == member.cluster,
            entry.fence,
            last,
            world.published.version if world.published else None,
            world.ledger.tokens,
            member.local_steps,
            world.config.run_id,
            member.held_at_join,
        )

    def _check_join(self, request: JoinRequest) -> None:
        world, name, previous = self._world, request.caller.name, request.caller.incarnation
        try:
            check_name(name, "cluster id")
        except ConfigError as error:
            raise Refused(RefusalCode.MALFORMED, str(error)) from error
        check_run(world, request.caller.run_id, f"cluster {name!r}")
        if world.ledger.stopping:
            raise Refused(RefusalCode.STOPPING, f"the run has reached its end: {world.ledger.stopping}")
        if name not in world.ledger.clusters and len(world.ledger.clusters) >= most_cluster_ids(world):
            raise Refused(
                RefusalCode.CONFIG,
                f"{len(world.ledger.clusters)} cluster ids have taken part in this run, and no more are remembered: "
                "give a cluster that comes back the id that it had",
            )
        self._check_process(name, request)
        # An incarnation that never spoke may be this very process's, whose Join was answered in vain.
        spoke = world.ledger.clusters[name].spoke if name in world.ledger.clusters else None
        if previous is not None and spoke is not None and previous < spoke:
            raise Refused(
                RefusalCode.FENCED,
                f"another process took over cluster {name!r} as incarnation {spoke}: this one, {previous}, must stop; "
                "give each process a cluster id of its own",
            )
        world.allowed.check(KeyRole.CLUSTER, name, request.curve_key)
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

    def _check_process(self, name: str, request: JoinRequest) -> None:
        """A process that joins again is welcome at once. Another one under its name is a second process, or the next
        after one that died: the name is free for it once the known one is gone, and that one trains on undisturbed.
        """
        world = self._world
        member, entry = world.members.get(name), world.ledger.clusters.get(name)
        beat_s, evict_after_s = world.config.settings.heartbeat_s, world.config.evict_after_s
        if member is not None:
            known, words = member.process_id, f"incarnation {member.incarnation}"
            words += f", {member.host}" if member.host else ""
            gone_s = (
                member.silent_since_s + DIALS_AGAIN_BEATS * beat_s if member.silent_since_s is not None else math.inf
            )
            gone = world.now_s >= gone_s
        elif entry is not None and entry.member:
            # As the master before this one left it. Who lives dials within a beat, and joins when its step is over.
            known, words = entry.process_id, f"incarnation {entry.incarnation}, before the master's restart"
            called_s = world.called_of_old_s.get(name)
            until_s = self._since_s + beat_s if called_s is None else called_s + evict_after_s
            gone = world.now_s >= until_s
        else:
            return
        if known in (b"", request.process_id) or gone:
            return
        remedy = "stop one of the two, or give each process a cluster id of its own"
        raise self._claims.refuse("cluster", name, request.process_id, words, remedy, world.now_s, evict_after_s)

    def _slot(self, name: str) -> int:
        """The cluster's staging slot on every slave. Raises Refused(BUSY) when all are taken."""
        world = self._world
        if name in world.members:
            return world.members[name].slot
        used = {m.slot for m in world.members.values()} | {p.slot for p in world.round.participants}
        own = next((push.slot for push in world.round.participants if push.cluster == name), None)
        free = [slot for slot in range(world.config.max_clusters) if slot not in used]
        if own is not None:
            return own
        if not free:
            raise Refused(
                RefusalCode.BUSY,
                f"all {world.config.max_clusters} staging slots are taken: wait for a cluster to leave, or start the "
                "master with a larger max_clusters",
                retry_after_s=5.0,
            )
        return free[0]

    def _adopt_model(self, request: JoinRequest) -> None:
        """The first joiner brings layout and data; everybody else must match."""
        ledger = self._world.ledger
        _check_plan(request.data_plan)
        if ledger.layout is None:
            self._slaves.place_model(request.layout)
        elif ledger.layout.layout_hash != request.layout_hash:
            raise Refused(
                RefusalCode.LAYOUT,
                f"the model of cluster {request.caller.name!r} is not this run's: "
                f"{first_difference(ledger.layout, request.layout)}; give it the same model, or start another run",
            )
        self._compare_untrained(request)
        if ledger.data_plan is None:
            ledger.data_plan = request.data_plan
            ledger.leases = LeaseTable(request.data_plan) if request.data_plan.mode is DataMode.LEASED else None
        elif ledger.data_plan != request.data_plan:
            raise Refused(RefusalCode.DATA_PLAN, _plan_difference(ledger.data_plan, request.data_plan))

    def _compare_untrained(self, request: JoinRequest) -> None:
        """The first joiner's frozen parameters and buffers are the run's (docs/decisions/0029).

        Buffers decide at a cluster's first Join only: later it may come from a checkpoint of its own, with what its
        training made of them. Raises Refused(FROZEN) with the names of the tensors that differ.
        """
        world, ledger, name = self._world, self._world.ledger, request.caller.name
        rule, theirs = world.config.settings.frozen, Untrained(request.frozen, request.buffers)
        if rule == "any":
            return
        if ledger.untrained is None:
            ledger.untrained = theirs.to_text()
            return
        ours = Untrained.from_text(ledger.untrained)
        if found := difference("frozen parameters", ours.frozen, theirs.frozen):
            raise Refused(
                RefusalCode.FROZEN,
                f"cluster {name!r} trains over other frozen weights than this run: {found}; load the same weights in "
                'every cluster, or start the master with frozen = "any" if they may differ',
            )
        found = difference("buffers", ours.buffers, theirs.buffers) if rule == "same" else ""
        entry = ledger.clusters.get(name)
        if found and entry is not None and entry.incarnations:
            world.log(f"cluster {name}", f"cluster {name} came back with other buffers: {found}", logging.WARNING)
        elif found:
            raise Refused(
                RefusalCode.FROZEN,
                f"cluster {name!r} has other constant buffers than this run: {found}; make the model alike in every "
                'cluster, or start the master with frozen = "parameters" if training changes these buffers',
            )

    def _retire(self, name: str, reason: str) -> Push | None:
        """End the current incarnation; returns its push if that is sealed and must be waited for."""
        world = self._world
        member = world.members.pop(name, None)
        world.allowed.remove(KeyRole.CLUSTER, name)
        if member is not None:
            entry = world.ledger.entry(name)
            entry.steps_before += member.beat.steps if member.beat else 0
            world.link_rates.gone(name)
            world.pins = {pin_id: pin for pin_id, pin in world.pins.items() if pin.owner != name}
            if member.push is not None and not member.push.sealed:
                self._verdicts.abort(member.push, reason)
        return next((push for push in world.round.participants if push.cluster == name), None)

    def _reattach(self, name: str, held: tuple[DataRange, ...], undecided: Push | None) -> tuple[DataRange, ...]:
        """Leases that this process still holds (they are returned), or that a sealed push carries, stay; the rest is
        free."""
        leases = self._world.ledger.leases
        if leases is None:
            return ()
        kept = tuple(item for item in held if _leased(leases, name, item))
        leases.free_all_but(name, [*kept, *(undecided.request.ranges if undecided else ())])
        return kept

    # ---- beats, leaving, eviction ----

    def beat(self, token: int, request: HeartbeatRequest) -> None:
        world = self._world
        member = check_member(world, request.caller)
        member.beat_s, member.beat = world.now_s, pacing.plausible(request)
        member.silent_since_s = None
        if not member.local_steps:
            member.local_steps = pacing.local_steps(world, member)
        published = world.published.version if world.published else None
        leaving = world.ledger.stopping or member.cluster in world.ledger.draining
        stop = bool(leaving) and member.push is None and world.everything_out
        world.reply(
            token,
            HeartbeatReply(
                world.epoch,
                published,
                world.ledger.tokens,
                member.local_steps,
                stop,
                world.round.phase.now.value,
                _wanted_copy(world, member),
            ),
        )

    def beats_ended(self, cluster: str, incarnation: Incarnation | None) -> None:
        """A sign of death, if the process does not dial again: its successor need not wait for the eviction."""
        member = self._world.members.get(cluster)
        if member is not None and member.incarnation == incarnation:
            member.silent_since_s = self._world.now_s

    def leave(self, token: int, request: LeaveRequest) -> None:
        """Waits for the verdict of a sealed push, aborts any other."""
        world = self._world
        member = check_member(world, request.caller)
        if member.leave_token is not None:
            world.refuse(member.leave_token, Refused(RefusalCode.BUSY, "Leave was called again", 1.0))
        member.leave_token = token
        if member.push is None or not member.push.sealed:
            self._depart(member, "LEAVE", request.reason or "it left")

    def finish_leaving(self) -> None:
        """Clusters that waited for a verdict before they leave."""
        world = self._world
        while world.leave_ready:
            member = world.members.get(world.leave_ready.pop())
            if member is not None and member.leave_token is not None:
                self._depart(member, "LEAVE", "it left")

    def evict(self, cluster: str, reason: str) -> None:
        member = self._world.members[cluster]
        sentence = f"cluster {cluster} is evicted: {reason}"
        self._world.log(f"cluster {cluster}", sentence, logging.WARNING, str(member.incarnation))
        self._depart(member, "EVICT", reason)

    def _depart(self, member: Member, kind: str, reason: str) -> None:
        world, name = self._world, member.cluster
        undecided = self._retire(name, f"cluster {name} is gone: {reason}")
        world.ledger.entry(name).member = False
        self._away_since_s[name] = world.now_s
        if kind == "LEAVE":
            world.ledger.draining.pop(name, None)
        if kind == "LEAVE" and world.ledger.leases is not None:
            world.ledger.leases.free_all_but(name, undecided.request.ranges if undecided else ())
        if world.seed_cluster == name:
            world.seed_cluster = min(world.members, default=None)
        world.journal(kind, {"cluster": name, "incarnation": pair(member.incarnation), "reason": reason})
        world.record(kind.lower(), str(member.incarnation), cluster=name, reason=reason)
        if kind == "LEAVE":
            world.log(f"cluster {name}", f"cluster {name} left: {reason}", cause=str(member.incarnation))
        self._answer_leave(member)

    def _answer_leave(self, member: Member | None) -> None:
        """Whatever ended it, a cluster that is gone has left."""
        if member is not None and member.leave_token is not None:
            self._world.reply(member.leave_token, LeaveReply())
            member.leave_token = None

    # ---- time ----

    def tick(self) -> None:
        world = self._world
        for member in world.live():
            silent_s = world.now_s - member.beat_s
            if silent_s > world.config.evict_after_s:
                self.evict(member.cluster, f"no heartbeat for {silent_s:.1f} s")
        self._expire_leases()

    def rearm(self, gap_s: float) -> None:
        self._claims.rearm()
        self._since_s += gap_s
        for member in self._world.members.values():
            member.beat_s = self._world.now_s
            if member.silent_since_s is not None:
                member.silent_since_s += gap_s
        self._away_since_s = {name: since_s + gap_s for name, since_s in self._away_since_s.items()}

    def _expire_leases(self) -> None:
        """What a cluster leased is free again when it stays away for lease_ttl."""
        world = self._world
        leases = world.ledger.leases
        if leases is None:
            return
        for name, entry in world.ledger.clusters.items():
            if name in world.members or not entry.incarnations:
                continue
            away_s = world.now_s - self._away_since_s.setdefault(name, world.now_s)
            if away_s <= world.config.lease_ttl_s:
                continue
            sealed = [r for p in world.round.participants if p.cluster == name for r in p.request.ranges]
            if freed := leases.free_all_but(name, sealed):
                world.journal("RETURN", {"cluster": name, "tokens": freed, "reason": "lease_ttl"})


def _wanted_copy(world: World, member: Member) -> Version | None:
    """The version whose parameters this cluster is asked to give back to the slaves."""
    donor = world.recovery.donor if world.recovery.donating else None
    asked = donor is not None and (donor.cluster, donor.incarnation) == (member.cluster, member.incarnation)
    return donor.base if donor is not None and asked else None


def _leased(leases: LeaseTable, cluster: str, item: DataRange) -> bool:
    try:
        leases.check(cluster, [item])
    except Refused:
        return False
    return True


def _check_plan(plan: DataPlan) -> None:
    if plan.mode is DataMode.OWN:
        return
    if not 0 < plan.chunk_tokens <= plan.total_tokens <= MAX_TOTAL_TOKENS:
        raise Refused(
            RefusalCode.DATA_PLAN,
            f"{plan.total_tokens} tokens in chunks of {plan.chunk_tokens} cannot be lent: more text or smaller chunks",
        )


def _plan_difference(ours: DataPlan, theirs: DataPlan) -> str:
    if ours.mode is not theirs.mode:
        return f"this run's data is {ours.mode.name}, the cluster's {theirs.mode.name}: start all clusters alike"
    if (ours.total_tokens, ours.chunk_tokens) != (theirs.total_tokens, theirs.chunk_tokens):
        return (
            f"the cluster has {theirs.total_tokens} tokens in chunks of {theirs.chunk_tokens}, this run "
            f"{ours.total_tokens} in chunks of {ours.chunk_tokens}: give every cluster the same files, seed and chunks"
        )
    return "the cluster's text has another digest than this run's: give every cluster the same files and seed"
