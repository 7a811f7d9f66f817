"""Handles pulls: which version to read, and the pins that keep it readable. Never blocks a round."""

from __future__ import annotations

from dataclasses import replace

from dips.core import messages
from dips.core.errors import RefusalCode, Refused
from dips.core.ids import Version
from dips.core.protocol import PULL_DIFFERENCES
from dips.core.wire import MOST_DIFFERENCES, WIRE_DTYPES, Codec, pays
from dips.master.state import pacing, tape
from dips.master.state.records import Kept, Member, Pin
from dips.master.state.schedule import Way
from dips.master.state.shared import SharedState
from dips.master.state.status import recovery_words, slaves_away, waiting_for

MAX_READERS = 2
"""The most readers (evaluator, export) with a pin at a time; each cluster has one in addition."""

MAX_READER_NAME = 64
"""Characters."""

READER = "reader "
"""Precedes a reader's name where it is listed with cluster ids, which contain no space."""


class Pulls:
    """Grants pulls and keeps their pins."""

    def __init__(self, shared: SharedState) -> None:
        self._shared = shared
        self._next_pin = 1

    def begin(self, token: int, request: messages.BeginPullRequest) -> None:
        """Raises Refused: VERSION_GONE for a version that is no longer kept; FENCED for a cluster that must seed."""
        shared = self._shared
        member = None if request.reader else shared.member_of(request.caller)
        if request.reader:
            shared.check_run(request.caller.run_id, f"reader {request.caller.name[:64]!r}")
            if not 0 < len(request.caller.name) <= MAX_READER_NAME:  # it appears in tapes, logs and messages to slaves
                raise Refused(
                    RefusalCode.MALFORMED,
                    f"a reader's name has 1 to {MAX_READER_NAME} characters, this one has {len(request.caller.name)}",
                )
            shared.allowed.check(messages.KeyRole.READER, request.caller.name, request.curve_key)
        owner = _owner(request, member)
        pin = self._renewed(request, owner)
        busy = self._busy(request, member)
        if busy is not None:
            shared.reply(token, messages.BeginPullReply(busy))
            return
        kept = self._wanted(request)
        if member is not None:
            member.base = None  # the pulled version replaces its base
        if pin is None or pin.version != kept.version:
            pin = Pin(self._next_pin, owner, kept.version, shared.now_s + shared.config.settings.ticket_ttl_s)
            self._next_pin += 1
            shared.pins = {pin_id: old for pin_id, old in shared.pins.items() if old.owner != owner} | {pin.pin_id: pin}
            shared.record(tape.PullGranted(request.caller.cause_id, by=owner, version=kept.version))
        wire, n_differences = self._wire(request, kept.version)
        if member is None:
            shared.allowed.put(messages.KeyRole.READER, request.caller.name, request.curve_key)
        else:
            shared.link_rates.pull_began(member.cluster, wire, max(1, n_differences), shared.now_s)
        grant = self._grant(kept, pin, member)
        if wire.is_difference:
            grant = replace(grant, wire=wire, base=request.base)
        shared.reply(token, messages.BeginPullReply(grant))

    def finish(self, token: int, request: messages.FinishPullRequest) -> None:
        shared = self._shared
        member = None if request.reader else shared.member_of(request.caller)
        pin = shared.pins.get(request.pin_id)
        if pin is not None and pin.owner == _owner(request, member):
            del shared.pins[request.pin_id]
            shared.schedule.end(pin.owner)
            if member is None:
                shared.allowed.remove(messages.KeyRole.READER, request.caller.name)
            else:
                shared.link_rates.pull_ended(member.cluster, shared.now_s)
            if member is not None and member.wanted_wire.is_difference:
                member.base = pin.version
        if member is not None:
            member.local_steps = pacing.local_steps(shared, member, pulled=True)
            pacing.pull_ended(shared, member)
        shared.reply(token, messages.FinishPullReply(member.local_steps if member else 0))

    def tick(self) -> None:
        """Removes old pins: a cluster's pin lasts while the cluster is here, a reader's for a limited time after its
        last request, because nothing else tells that it is gone."""
        shared = self._shared
        shared.pins = {
            pin_id: pin
            for pin_id, pin in shared.pins.items()
            if pin.owner in shared.members or pin.until_s > shared.now_s
        }
        owners = {pin.owner for pin in shared.pins.values()}
        shared.schedule.keep(owners | {push.cluster for push in shared.pushes()})
        shared.allowed.keep(
            messages.KeyRole.READER, {owner.removeprefix(READER) for owner in owners if owner.startswith(READER)}
        )

    def of_readers(self) -> set[int]:
        """The pins of readers."""
        return {pin_id for pin_id, pin in self._shared.pins.items() if pin.owner.startswith(READER)}

    def end_readers(self) -> None:
        """Ends all readers' pulls: an operator's certificate was revoked, and operators read under any name. The others
        begin again."""
        self._shared.pins = {n: pin for n, pin in self._shared.pins.items() if not pin.owner.startswith(READER)}
        self._shared.allowed.keep(messages.KeyRole.READER, set())

    def end_reader(self, name: str) -> None:
        """Ends the pull of a reader whose certificate, a cluster's, was revoked."""
        self._shared.pins = {n: pin for n, pin in self._shared.pins.items() if pin.owner != READER + name}
        self._shared.allowed.remove(messages.KeyRole.READER, name)

    def rearm(self, gap_s: float) -> None:
        for pin in self._shared.pins.values():
            pin.until_s += gap_s

    def _renewed(self, request: messages.BeginPullRequest, owner: str) -> Pin | None:
        """The reader's pin that the request renews, also where no pull can begin now; None: it renews none."""
        pin = self._shared.pins.get(request.pin_id)
        if not request.reader or pin is None or pin.owner != owner:
            return None
        pin.until_s = self._shared.now_s + self._shared.config.settings.ticket_ttl_s
        return pin

    def _busy(self, request: messages.BeginPullRequest, member: Member | None) -> messages.Busy | None:
        shared = self._shared
        if member is not None and member.push is not None:
            return messages.Busy(0.2, f"push {member.push.id} is undecided: pull once its verdict is known")
        if shared.published is None:
            if member is not None and shared.ledger.version is None and shared.seeder() == member.cluster:
                raise Refused(
                    RefusalCode.FENCED,
                    "the cluster that was to seed this run is gone: join again, you are to seed it",
                )
            return messages.Busy(0.5, waiting_for(shared).sentence or "no version is published yet")
        if away := recovery_words(shared) or slaves_away(shared):
            return messages.Busy(0.5, away)
        behind = request.at_least is not None and request.at_least > shared.published.version
        if behind and not request.exact:
            return messages.Busy(0.2, f"version {request.at_least} is not published yet")
        if any(
            slave.version is not None and slave.version > shared.published.version for slave in shared.ready_slaves()
        ):
            return messages.Busy(0.2, f"version {shared.ledger.version} is about to be published")
        readers = {pin.owner for pin in shared.pins.values()} - set(shared.members) - {_owner(request, member)}
        crowded = member is None and len(readers) >= MAX_READERS
        return messages.Busy(1.0, f"{MAX_READERS} readers are pulling already") if crowded else None

    def _wanted(self, request: messages.BeginPullRequest) -> Kept:
        shared = self._shared
        assert shared.published is not None, "checked before"
        if not request.exact or request.at_least is None:
            return shared.published
        kept = shared.kept.get(request.at_least)
        if kept is None:
            held = ", ".join(str(version) for version in sorted(shared.kept))
            raise Refused(
                RefusalCode.VERSION_GONE, f"version {request.at_least} is not kept; these can be read: {held}"
            )
        return kept

    def _wire(self, request: messages.BeginPullRequest, version: Version) -> tuple[Codec, int]:
        """How the version is to be fetched, and how many differences these are: differences to the request's base,
        where these are fewer bytes and the slaves, if none of them began again meanwhile, have them."""
        shared = self._shared
        codec, base = WIRE_DTYPES.get(shared.config.settings.pull_wire, Codec.F32), request.base
        behind = base.behind(version) if base is not None else None
        if not behind or behind > MOST_DIFFERENCES or not pays(codec, behind):
            return Codec.F32, 0
        offered = all(PULL_DIFFERENCES in slave.capabilities for slave in shared.ready_slaves())
        return (codec, behind) if offered else (Codec.F32, 0)

    def _grant(self, kept: Kept, pin: Pin, member: Member | None) -> messages.PullGrant:
        shared = self._shared
        if member is not None:
            member.local_steps = pacing.local_steps(shared, member)
        return messages.PullGrant(
            kept.version,
            shared.ledger.entry(member.cluster).fence if member else 0,
            pin.pin_id,
            shared.placement_spec(),
            pacing.transfer_order(shared, pin.owner, member.slot if member else pin.pin_id, Way.PULL),
            kept.commit.digest_of_slave,
            kept.tokens,
            member.local_steps if member else 0,
            None if member else shared.ledger.layout,
            shared.config.settings.chunk_bytes,
            shared.epoch,
            shared.config.run_id,
            pin_s=0.0 if member else shared.config.settings.ticket_ttl_s,
        )


def _owner(request: messages.BeginPullRequest | messages.FinishPullRequest, member: Member | None) -> str:
    """The owner of the pin; no cluster id contains a space."""
    return member.cluster if member else READER + request.caller.name
