"""Keeps which push is in which row of staging memory, for the state machine.

The data port's StagingTable knows every chunk; this one knows only what rounds need: a push's row, and whether
it is complete. Completeness arrives as an event, which is ignored when the push left its row meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import PushId, Version
from dips.core.messages import OpenStaging, Staged
from dips.core.wire import Codec


@dataclass
class Slot:
    """One open slot. opening: counts new openings, so that late events of an earlier one are recognised. digest: None
    while incomplete.

    base: the version that the push was made from; None for a seed.
    """

    slot: int
    attempt: int
    opening: int
    base: Version | None
    digest: bytes | None = None
    wire: Codec = Codec.F32


class Slots:
    """The open stagings of this incarnation."""

    def __init__(self) -> None:
        self._of_push: dict[PushId, Slot] = {}
        self._openings = 0

    def __len__(self) -> int:
        return len(self._of_push)

    def clear(self) -> None:
        self._of_push.clear()

    def open(self, body: OpenStaging) -> int | None:
        """Note the slot; the same push in the same slot, written in the same way, is adopted.

        Returns its opening, None for an older attempt.
        """
        wire = Codec.F32 if body.wire is Codec.NONE else body.wire  # a master of an earlier release says nothing
        known = self._of_push.get(body.push)
        if known is not None and body.attempt < known.attempt and known.slot == body.slot:
            return None
        if known is not None and (known.slot, known.wire, known.base) == (body.slot, wire, body.base):
            known.attempt = body.attempt
            return known.opening
        for push in [p for p, s in self._of_push.items() if s.slot == body.slot or p == body.push]:
            del self._of_push[push]
        self._openings += 1
        self._of_push[body.push] = Slot(body.slot, body.attempt, self._openings, body.base, wire=wire)
        return self._openings

    def close(self, push: PushId) -> None:
        self._of_push.pop(push, None)

    def slot_of(self, push: PushId) -> int | None:
        known = self._of_push.get(push)
        return None if known is None else known.slot

    def wire_of(self, push: PushId) -> Codec:
        """The codec of an open push."""
        return self._of_push[push].wire

    def base_of(self, push: PushId) -> Version | None:
        known = self._of_push.get(push)
        return None if known is None else known.base

    def staged(self, push: PushId, attempt: int, opening: int, digest: bytes) -> Staged | None:
        """Note a complete push. None when that opening is over, or a newer attempt will report it."""
        known = self._of_push.get(push)
        if known is None or known.opening != opening:
            return None
        known.digest = digest
        return Staged(push, known.attempt, digest) if attempt == known.attempt else None

    def all_staged(self) -> list[Staged]:
        """Every complete push, in push order, to report again after the stream was lost."""
        return [Staged(p, s.attempt, s.digest) for p, s in sorted(self._of_push.items()) if s.digest is not None]

    def complete_row(self, push: PushId, attempt: int) -> int:
        """The row of a complete push. Raises Refused(UNKNOWN_PUSH)."""
        known = self._of_push.get(push)
        if known is None or known.digest is None or known.attempt != attempt:
            have = "it is not here" if known is None else f"here is attempt {known.attempt}"
            state = "" if known is None or known.digest is not None else ", not complete"
            raise Refused(RefusalCode.UNKNOWN_PUSH, f"push {push}, attempt {attempt}: {have}{state}")
        return known.slot
