"""Two processes under one name: the one that is known keeps it while it lives; a newcomer waits, and then ends.

Both may bring the same certificate, so a name proves nothing. A slave is known by its directory, a cluster by its
process; each of the two is a number that was drawn once (docs/decisions/0034). A newcomer is asked to come again for as
long as the known one could be dead without its eviction; if it has not been evicted then, it beats, and the newcomer is
refused for good. So a late beat or a master that has just started never hands a name to the wrong process.
"""

from __future__ import annotations

from dataclasses import dataclass

from dips.core.errors import RefusalCode, Refused

AGAIN_S = 0.5
"""How soon a newcomer is to ask again: when the known process dies, its successor is not to wait for longer."""

DIALS_AGAIN_BEATS = 0.5
"""A process that lives dials again within so many heartbeats when its stream breaks; one that does not is gone."""

MAX_CLAIMS = 64
"""Newcomers that are remembered at once."""


@dataclass
class _Claim:
    since_s: float
    last_s: float


class NameClaims:
    """Newcomers that wait for a name, by what they claim to be."""

    def __init__(self) -> None:
        self._claims: dict[tuple[str, str, bytes], _Claim] = {}

    def refuse(
        self, role: str, name: str, newcomer: bytes, known: str, remedy: str, now_s: float, evict_after_s: float
    ) -> Refused:
        """What to tell a newcomer while the process that is known under this name may live.

        known: that process, in words; remedy: what a person can do. The refusal asks it to come again until it has
        waited for an eviction in vain.
        """
        forgotten_s = now_s - evict_after_s - AGAIN_S  # who has not asked for so long begins to wait from the start
        self._claims = {key: claim for key, claim in self._claims.items() if claim.last_s > forgotten_s}
        key = (role, name, newcomer)
        claim = self._claims.get(key)
        if claim is None:
            if len(self._claims) >= MAX_CLAIMS:
                del self._claims[min(self._claims, key=lambda one: self._claims[one].last_s)]
            claim = self._claims[key] = _Claim(now_s, now_s)
        claim.last_s = now_s
        taken = f"another process is {role} {name!r}"
        if now_s - claim.since_s < evict_after_s:
            sentence = f"{taken} ({known}) and may be alive: this one waits up to {evict_after_s:g} s for its end"
            return Refused(RefusalCode.NAME_TAKEN, sentence, AGAIN_S)
        del self._claims[key]
        return Refused(RefusalCode.NAME_TAKEN, f"{taken} and beats ({known}): {remedy}")

    def rearm(self) -> None:
        """The master itself stood still: whom it has not heard since may be alive, and waiting begins again."""
        self._claims.clear()
