"""RESHARD: moves the model's blocks to other slaves during the run (docs/decisions/0019-reshard.md).

NONE -> WAITING -> LISTING -> MOVING -> NONE. Before its one journal record nothing is changed, and any failure leads
back to WAITING; after it the new version is handled like any committed version. It must never begin while a round is
open, and never journal a digest that does not follow from the lists of the committed version.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence

from dips.core import messages
from dips.core.errors import ConfigError, RefusalCode, Refused
from dips.core.ids import RoundId, SlaveId, check_name
from dips.core.layout import Chunk, chunks_of, shard_digest
from dips.core.placement import Placement, check_measured, redeal
from dips.master.state import tape
from dips.master.state.ledger import CommitInfo, Ledger, PendingReshard, canonical, pair, same_as
from dips.master.state.pushes import Pushes
from dips.master.state.reasons import Reason, VerdictCode
from dips.master.state.records import ReshardPhase, RoundPhase, Slave
from dips.master.state.shared import SharedState
from dips.master.state.slave_links import SlaveLinks
from dips.master.state.status import reshard_waits_for

_P = ReshardPhase

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""The wait after a try that was given up; it doubles each time, because no round runs during a try."""

MAX_NAMES = 1024
"""The most slaves in one request."""


class Reshard:
    """Drives shared.reshard; settle() is called after every event and makes all steps that are possible."""

    def __init__(self, shared: SharedState, pushes: Pushes, links: SlaveLinks) -> None:
        self._shared = shared
        self._pushes = pushes
        self._links = links

    # ---- the operator's request ----

    def ask(self, request: messages.ReshardRequest) -> str:
        """Takes a request or cancels one. Returns what is going to happen. Raises Refused: CONFIG, UNKNOWN_NAME, BUSY,
        MEMORY or STOPPING."""
        if request.cancel:
            return self._take_back()
        shared, placement = self._shared, self._shared.ledger.placement
        add, remove = (tuple(sorted({SlaveId(name) for name in names})) for names in (request.add, request.remove))
        if shared.ledger.stopping or shared.ledger.stop_asked:
            raise Refused(RefusalCode.STOPPING, "the run ends: its slaves stay as they are")
        if placement is None:
            raise Refused(RefusalCode.CONFIG, "no model is placed yet: start the master with another number of slaves")
        if (not add and not remove) or len(add) + len(remove) > MAX_NAMES:
            raise Refused(RefusalCode.CONFIG, f"name 1 to {MAX_NAMES} slaves to add or to remove")
        for name in add:
            try:
                check_name(name, "slave id")
            except ConfigError as error:
                raise Refused(RefusalCode.CONFIG, str(error)) from error
        if unknown := sorted({*remove} - {*placement.slaves}):
            names = ", ".join(placement.slaves)
            raise Refused(RefusalCode.UNKNOWN_NAME, f"no slave {unknown[0]!r} holds blocks; those that do: {names}")
        if held := sorted({*add} & {*placement.slaves}):
            raise Refused(RefusalCode.CONFIG, f"slave {held[0]} holds blocks already")
        pending = PendingReshard(add, remove, request.reason or "no reason given")
        self._check_size(pending, placement)
        known = self._shared.ledger.reshard
        if known is not None and (known.add, known.remove) != (pending.add, pending.remove):
            raise Refused(RefusalCode.BUSY, f"{_say(known)} is under way: wait for it, or `dips reshard --cancel` it")
        if known is None:
            self._shared.ledger.reshard = pending
            self._shared.journal(
                "RESHARD_ASKED", {"add": list(pending.add), "remove": list(pending.remove), "reason": pending.reason}
            )
        start = f"; start slave {', '.join(pending.add)} now if it does not run yet" if pending.add else ""
        return f"{_say(pending)} begins between two rounds, when all slaves are here{start}"

    def _check_size(self, pending: PendingReshard, placement: Placement) -> None:
        """Refuses at once what can never be placed; a slave that has not attached yet may have any memory."""
        shared, names = self._shared, pending.slaves_of(placement.slaves)
        if not names:
            raise Refused(RefusalCode.CONFIG, "a run needs a slave: remove all but one at most")
        memory = [(name, shared.slaves[name].memory_bytes if name in shared.slaves else 1 << 62) for name in names]
        dealt = self._redeal(placement, memory)
        if all(name in shared.slaves for name in names):
            self._check_measured(dealt)

    def _redeal(self, before: Placement, memory: Sequence[tuple[SlaveId, int]]) -> Placement:
        shared, config = self._shared, self._shared.config
        assert shared.ledger.layout is not None, "what is placed has a layout"
        settings, slots, pins = config.settings, config.max_clusters, config.pinned_versions
        return redeal(
            shared.ledger.layout, before, memory, slots, pins, settings.chunk_bytes, settings.memory_files,
            settings.pull_wire,
        )  # fmt: skip

    def _check_measured(self, placement: Placement) -> None:
        config = self._shared.config
        check_measured(placement, config.max_clusters, config.settings.max_message_bytes)

    def _take_back(self) -> str:
        shared, pending = self._shared, self._shared.ledger.reshard
        if pending is None:
            return "no RESHARD is under way: there is nothing to take back"
        self._give_up("the operator took it back")
        shared.ledger.reshard = None
        shared.journal("RESHARD_CANCELLED", {})
        self._dismiss(pending.add, "its RESHARD was taken back")
        return f"{_say(pending)} is taken back; the slaves stay as they are"

    # ---- reports of slaves ----

    def listed(self, slave: Slave, body: messages.ShardList) -> None:
        """Takes the checksums of a slave's shard; together they must give the committed digest."""
        shared, state = self._shared, self._shared.reshard
        placement, commit = shared.ledger.placement, shared.ledger.commit
        if state.phase.now is not _P.LISTING or body.round != state.round or placement is None or commit is None:
            return
        if slave.id not in placement.slaves:
            return
        n_chunks = len(self._chunks(placement, slave.id))
        committed = dict(commit.digest_of_slave)[slave.id]
        whole = len(body.theta) == len(body.momentum) == n_chunks
        if not whole or shard_digest(body.theta) != committed:
            self._give_up(f"what slave {slave.id} lists is not version {commit.version}")
            return
        state.lists[slave.id] = body
        if len(state.lists) == len(placement.slaves):
            self._move(placement, commit)

    def prepared(self, slave: Slave, body: messages.Prepared) -> bool:
        """Takes a slave's answer; returns whether it belongs to this RESHARD. The record follows the last answer."""
        state = self._shared.reshard
        if state.phase.now is not _P.MOVING or body.round != state.round or slave.id not in state.digests:
            return False
        if body.digest != state.digests[slave.id][0]:
            self._give_up(f"the new shard of slave {slave.id} does not have the digest of the lists")
            return True
        state.prepared.add(slave.id)
        if len(state.prepared) == len(state.digests):
            # The one journal entry: before it nothing has changed, after it other slaves hold the blocks.
            shared, ledger = self._shared, self._shared.ledger
            before, after, origin = ledger.placement, state.placement, ledger.commit
            assert before is not None, "it starts from a placement"
            assert after is not None, "it has a new placement"
            assert origin is not None, "it moves a version"
            self._abort_pushes("the model's blocks moved to other slaves; nothing of this push is lost")
            ledger.placement, ledger.reshard, ledger.origin = after, None, None
            ledger.slaves = {name: shared.slaves[name].memory_bytes for name in after.slaves}
            ledger.directories = {name: shared.slaves[name].directory_id for name in after.slaves}
            ledger.remember_applied(origin.version.next(), ())
            commit, record = self._record(before, after, origin, ledger)
            shared.commits.clear()  # their digests are of other shards
            shared.set_commit(commit)
            shared.kept, shared.pins = {}, {}
            shared.journal("RESHARD", record)
            n_moved = len(_moved(before, after))
            self._to("journaled", _P.NONE, f"version {commit.version}")
            state.trouble, state.pause_s = "", 0.0
            shared.record(tape.Resharded(str(state.round), version=commit.version, blocks=n_moved))
            shared.log(
                "reshard", f"version {commit.version} is on slaves {', '.join(after.slaves)}; {n_moved} blocks moved"
            )
            self._dismiss(set(before.slaves) - set(after.slaves), "its blocks are on other slaves now")
            for name in after.slaves:
                self._links.configure(shared.slaves[name])
        return True

    def refused(self, slave: Slave, body: messages.RoundRefused) -> bool:
        """Handles a slave's refusal; returns whether it belongs to this RESHARD."""
        state = self._shared.reshard
        if not state.moving or body.round != state.round:
            return False
        self._give_up(f"slave {slave.id}: {body.refusal.sentence}")
        return True

    def slave_came(self) -> None:
        """Ends the wait, because the cause of the last failure may be repaired."""
        state = self._shared.reshard
        state.not_before_s, state.pause_s = min(state.not_before_s, self._shared.now_s), 0.0

    # ---- the steps ----

    def settle(self) -> None:
        """Makes all steps that are possible with what is known."""
        shared, state = self._shared, self._shared.reshard
        pending = shared.ledger.reshard
        if state.phase.now is _P.NONE and pending is not None:
            self._to("asked", _P.WAITING, _say(pending))
        if state.phase.now is _P.WAITING and pending is None:
            self._to("nothing asked", _P.NONE)
        if state.moving and (gone := self._gone()):
            self._give_up(f"slave {', '.join(gone)} went away")
        if state.phase.now is _P.WAITING and pending is not None and shared.now_s >= state.not_before_s:
            if reshard_waits_for(shared):
                return
            if shared.round.phase.now is RoundPhase.WINDOW and shared.ledger.paused:
                self._abort_pushes("the slaves change while the run is paused")  # or the window would never end
            if shared.round.phase.now is RoundPhase.IDLE:
                self._begin(pending)

    def deadlines(self) -> list[float]:
        """Times at which settle() must be called without an event."""
        state = self._shared.reshard
        waits = state.phase.now is _P.WAITING and state.not_before_s > self._shared.now_s
        return [state.not_before_s] if waits else []

    def rearm(self, gap_s: float) -> None:
        """Extends all deadlines by gap_s, a pause of the master itself."""
        self._shared.reshard.not_before_s += gap_s

    def _gone(self) -> list[SlaveId]:
        shared = self._shared
        here = {name: slave.incarnation for name, slave in shared.slaves.items() if slave.link is not None}
        return [name for name, incarnation in shared.reshard.incarnations.items() if here.get(name) != incarnation]

    def _begin(self, pending: PendingReshard) -> None:
        shared, state = self._shared, self._shared.reshard
        before = shared.ledger.placement
        assert before is not None, "a request needs placed blocks"
        assert shared.ledger.version is not None, "there is something to move"
        names = pending.slaves_of(before.slaves)
        try:
            placement = self._redeal(before, [(name, shared.slaves[name].memory_bytes) for name in names])
            self._check_measured(placement)
        except Refused as refused:
            self._pause(refused.sentence)
            return
        state.placement, state.round = placement, RoundId(shared.epoch, shared.ledger.round_n + 1)
        shared.ledger.round_n += 1
        state.incarnations = {name: shared.slaves[name].incarnation for name in sorted({*before.slaves, *names})}
        state.lists, state.digests, state.prepared = {}, {}, set()
        self._to("all are here", _P.LISTING, _say(pending))
        shared.log("reshard", f"{_say(pending)}: version {shared.ledger.version} is listed")
        for name in before.slaves:
            shared.command(
                shared.slaves[name], messages.ListShard(state.round, shared.ledger.version), str(state.round)
            )

    def _move(self, before: Placement, commit: CommitInfo) -> None:
        shared, state, layout = self._shared, self._shared.reshard, self._shared.ledger.layout
        assert state.placement is not None, "chosen when it began"
        assert state.round is not None, "likewise"
        assert layout is not None, "what is placed has a layout"
        self._to("all listed", _P.MOVING)
        state.digests = self._digests(before, state.placement, state.lists)
        state.lists = {}
        moved = _moved(before, state.placement)
        shared.log("reshard", f"{len(moved)} of {len(layout.blocks)} blocks move; clusters train on")
        sources, target = shared.spec_of(before), shared.spec_of(state.placement)
        for name in state.placement.slaves:
            theta, momentum = state.digests[name]
            body = messages.MoveBlocks(
                state.round, commit.version, commit.version.next(), layout, layout.layout_hash, target, sources,
                shared.config.max_clusters, shared.config.pinned_versions, theta, momentum,
            )  # fmt: skip
            shared.command(shared.slaves[name], body, str(state.round))

    def _digests(
        self, before: Placement, after: Placement, lists: Mapping[SlaveId, messages.ShardList]
    ) -> dict[SlaveId, tuple[bytes, bytes]]:
        """theta's and the momentum's digest of each new shard, from the checksums of the old ones."""
        sums: dict[Chunk, tuple[int, int]] = {}
        for name in before.slaves:
            listed = lists[name]
            sums |= dict(zip(self._chunks(before, name), zip(listed.theta, listed.momentum, strict=True), strict=True))
        found = {name: [sums[chunk] for chunk in self._chunks(after, name)] for name in after.slaves}
        return {
            name: (shard_digest([theta for theta, _ in mine]), shard_digest([momentum for _, momentum in mine]))
            for name, mine in found.items()
        }

    def _chunks(self, placement: Placement, slave: SlaveId) -> list[Chunk]:
        layout = self._shared.ledger.layout
        assert layout is not None, "what is placed has a layout"
        return chunks_of(placement.blocks_of(slave, layout), self._shared.config.settings.chunk_bytes)

    # ---- the record ----

    def _record(
        self, before: Placement, after: Placement, origin: CommitInfo, ledger: Ledger
    ) -> tuple[CommitInfo, dict[str, object]]:
        shared, state = self._shared, self._shared.reshard
        assert state.round is not None, "it has a round"
        version = origin.version.next()
        digests = tuple(sorted((name, theta) for name, (theta, _) in state.digests.items()))
        record: dict[str, object] = {
            "kind": "RESHARD",
            "epoch": shared.epoch,
            "round": pair(state.round),
            "version": pair(version),
            "from_version": pair(origin.version),
            "tokens": ledger.tokens,
            "s_max": shared.s_max(),
            "digests": {name: digest.hex() for name, digest in digests},
            "participants": [],
            "judgement": None,
            "same_as": [pair(known) for known in (*same_as(origin), origin.version)],
            "placement_before": _placement_json(before),
            "placement": _placement_json(after),
            "wall_s": shared.now_s + shared.wall_offset_s,
        }
        full = record | {"ledger": json.loads(ledger.to_json(with_commit=False))}
        commit = CommitInfo(state.round, version, digests, canonical(full).encode())
        return commit, record | {"ledger": "in the snapshot"}

    # ---- the other ends ----

    def _give_up(self, reason: str) -> None:
        """Gives up this try without any change; the request stays and is tried again."""
        shared, state = self._shared, self._shared.reshard
        if not state.moving:
            return
        assert state.round is not None, "what moves has a round"
        for name in state.incarnations:
            slave = shared.slaves.get(name)
            if slave is not None:
                shared.command(slave, messages.AbortRound(state.round, reason), str(state.round))
        self._to("given up", _P.WAITING, reason)
        state.lists, state.digests, state.incarnations = {}, {}, {}
        self._pause(reason)

    def _pause(self, reason: str) -> None:
        shared, state = self._shared, self._shared.reshard
        state.pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * state.pause_s))
        state.not_before_s, state.trouble = shared.now_s + state.pause_s, reason
        shared.log("reshard", f"the RESHARD is put off: {reason}", logging.WARNING)

    def _abort_pushes(self, reason: str) -> None:
        for push in list(self._shared.pushes()):
            if push.phase.allows("aborted"):
                self._pushes.abort(push, Reason(VerdictCode.RESHARD, reason))

    def _dismiss(self, names: Iterable[SlaveId], reason: str) -> None:
        """Tells these slaves, which hold nothing of the run, that they may end."""
        for name in sorted(names):
            slave = self._shared.slaves.get(name)
            if slave is not None:
                self._links.dismiss(slave, f"slave {name} is no longer needed: {reason}")

    def _to(self, input_name: str, to: ReshardPhase, why: str = "") -> None:
        shared, state = self._shared, self._shared.reshard
        state.phase.move(input_name, to, shared.now_s, "reshard", why)
        shared.record(tape.ReshardMoved(str(state.round), phase=to.value, input=input_name, why=why))


def _moved(before: Placement, after: Placement) -> list[int]:
    """Blocks whose slave changes."""
    old, new = before.slave_of_block, after.slave_of_block
    return [b for b in range(len(old)) if before.slaves[old[b]] != after.slaves[new[b]]]


def _placement_json(placement: Placement) -> dict[str, object]:
    return {
        "slaves": list(placement.slaves),
        "slave_of_block": list(placement.slave_of_block),
        "hash": placement.placement_hash.hex(),
    }


def _say(pending: PendingReshard) -> str:
    parts = [
        f"{what} {', '.join(names)}" for what, names in (("add", pending.add), ("remove", pending.remove)) if names
    ]
    return f"the RESHARD ({'; '.join(parts)})"
