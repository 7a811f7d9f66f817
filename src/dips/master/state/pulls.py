"""Pulls: which version to read, and the pins that keep it readable. Never blocks a round."""

from __future__ import annotations

from dips.core.errors import RefusalCode, Refused
from dips.core.messages import (
    BeginPullReply,
    BeginPullRequest,
    Busy,
    FinishPullReply,
    FinishPullRequest,
    KeyRole,
    PullGrant,
)
from dips.core.wire import DIFFERENCES
from dips.master.state import pacing
from dips.master.state.callers import check_member, check_run
from dips.master.state.reasons import recovery_words, slaves_away, waiting_for
from dips.master.state.records import Kept, Member, Pin
from dips.master.state.schedule import Way
from dips.master.state.world import World

MAX_READERS = 2
"""Readers (evaluator, export) that may hold a pin at once; each cluster has one beside them."""

MAX_READER_NAME = 64
"""Characters."""

READER = "reader "
"""Before a reader's name, where it stands beside cluster ids, which hold no space."""


class Pulls:
    """Grants and pins."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._next_pin = 1

    def begin(self, token: int, request: BeginPullRequest) -> None:
        """Raises Refused: VERSION_GONE for a version that is no longer kept; FENCED for a cluster that must seed."""
        world = self._world
        member = None if request.reader else check_member(world, request.caller)
        if request.reader:
            check_run(world, request.caller.run_id, f"reader {request.caller.name[:64]!r}")
            _check_reader(request.caller.name)
            world.allowed.check(KeyRole.READER, request.caller.name, request.curve_key)
        busy = self._busy(request, member)
        if busy is not None:
            world.reply(token, BeginPullReply(busy))
            return
        kept = self._wanted(request)
        if member is not None:
            member.base = None  # what it stood on is given up for what it pulls
        owner = _owner(request, member)
        pin = Pin(self._next_pin, owner, kept.version, world.now_s + world.config.ticket_ttl_s)
        self._next_pin += 1
        world.pins = {pin_id: old for pin_id, old in world.pins.items() if old.owner != owner} | {pin.pin_id: pin}
        if member is None:
            world.allowed.put(KeyRole.READER, request.caller.name, request.curve_key)
        else:
            world.link_rates.pull_began(member.cluster, world.now_s)
        world.record("pull", request.caller.cause_id, by=owner, version=str(kept.version))
        world.reply(token, BeginPullReply(self._grant(kept, pin, member)))

    def finish(self, token: int, request: FinishPullRequest) -> None:
        world = self._world
        member = None if request.reader else check_member(world, request.caller)
        pin = world.pins.get(request.pin_id)
        if pin is not None and pin.owner == _owner(request, member):
            del world.pins[request.pin_id]
            world.schedule.end(pin.owner)
            if member is None:
                world.allowed.remove(KeyRole.READER, request.caller.name)
            else:
                world.link_rates.pull_ended(member.cluster, world.now_s)
            if member is not None and member.wish in DIFFERENCES:
                member.base = pin.version
        if member is not None:
            member.local_steps = pacing.local_steps(world, member, pulled=True)
        world.reply(token, FinishPullReply(member.local_steps if member else 0))

    def tick(self) -> None:
        """A cluster's pin lasts while it is here, since a pull may take long; a reader's only for a while."""
        world = self._world
        world.pins = {
            pin_id: pin for pin_id, pin in world.pins.items() if pin.owner in world.members or pin.until_s > world.now_s
        }
        owners = {pin.owner for pin in world.pins.values()}
        world.schedule.keep(owners | {push.cluster for push in world.pushes()})
        world.allowed.keep(KeyRole.READER, {owner.removeprefix(READER) for owner in owners if owner.startswith(READER)})

    def end_readers(self) -> None:
        """Nobody reads on: a certificate that readers may have used was revoked. The others simply begin again."""
        self._world.pins = {n: pin for n, pin in self._world.pins.items() if not pin.owner.startswith(READER)}
        self._world.allowed.keep(KeyRole.READER, set())

    def rearm(self, gap_s: float) -> None:
        for pin in self._world.pins.values():
            pin.until_s += gap_s

    def _busy(self, request: BeginPullRequest, member: Member | None) -> Busy | None:
        world = self._world
        if member is not None and member.push is not None:
            return Busy(0.2, f"push {member.push.id} is undecided: pull once its verdict is known")
        if world.published is None:
            if member is not None and world.ledger.version is None and world.seeder() == member.cluster:
                raise Refused(
                    RefusalCode.FENCED,
                    "the cluster that was to seed this run is gone: join again, you are to seed it",
                )
            return Busy(0.5, waiting_for(world) or "no version is published yet")
        if away := recovery_words(world) or slaves_away(world):
            return Busy(0.5, away)
        behind = request.at_least is not None and request.at_least > world.published.version
        if behind and not request.exact:
            return Busy(0.2, f"version {request.at_least} is not published yet")
        if any(slave.version is not None and slave.version > world.published.version for slave in world.ready_slaves()):
            return Busy(0.2, f"version {world.ledger.version} is about to be published")
        readers = {pin.owner for pin in world.pins.values()} - set(world.members) - {_owner(request, member)}
        crowded = member is None and len(readers) >= MAX_READERS
        return Busy(1.0, f"{MAX_READERS} readers pull already") if crowded else None

    def _wanted(self, request: BeginPullRequest) -> Kept:
        world = self._world
        assert world.published is not None, "checked before"
        if not request.exact or request.at_least is None:
            return world.published
        kept = world.kept.get(request.at_least)
        if kept is None:
            held = ", ".join(str(version) for version in sorted(world.kept))
            raise Refused(
                RefusalCode.VERSION_GONE, f"version {request.at_least} is not kept; these can be read: {held}"
            )
        return kept

    def _grant(self, kept: Kept, pin: Pin, member: Member | None) -> PullGrant:
        world = self._world
        if member is not None:
            member.local_steps = pacing.local_steps(world, member)
        return PullGrant(
            kept.version,
            world.ledger.entry(member.cluster).fence if member else 0,
            pin.pin_id,
            world.placement_spec(),
            pacing.transfer_order(world, pin.owner, member.slot if member else pin.pin_id, Way.PULL),
            kept.commit.digest_of_slave,
            kept.tokens,
            member.local_steps if member else 0,
            None if member else world.ledger.layout,
            world.config.settings.chunk_bytes,
            world.epoch,
            world.config.run_id,
        )


def _owner(request: BeginPullRequest | FinishPullRequest, member: Member | None) -> str:
    """Whose pin it is; no cluster id holds a space."""
    return member.cluster if member else READER + request.caller.name


def _check_reader(name: str) -> None:
    """A reader is named in tapes, in the log and to slaves."""
    if not 0 < len(name) <= MAX_READER_NAME:
        raise Refused(
            RefusalCode.MALFORMED, f"a reader's name has 1 to {MAX_READER_NAME} characters, this one has {len(name)}"
        )
