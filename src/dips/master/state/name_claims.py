"""Resolves two processes with one name: the known one keeps it while it is alive; the newcomer waits, then is refused.

Both may have the same certificate, so a name proves nothing. A slave is identified by its directory, a cluster by its
process; each identity is a number that was drawn once (docs/decisions/0034). A newcomer is asked to try again for as
long as the known process could be dead and not yet evicted. If it has not been evicted by then, it sends heartbeats,
and the newcomer is refused permanently. So neither a late beat nor a restarted master gives a name to a wrong process.
"""

from __future__ import annotations

from dataclasses import dataclass

from dips.core.errors import RefusalCode, Refused

AGAIN_S = 0.5
"""The wait before a newcomer asks again; a successor waits at most this much longer after the known process's end."""

DIALS_AGAIN_BEATS = 0.5
"""After a broken stream, a live process dials again within this many heartbeats; one that does not is gone."""

MAX_CLAIMS = 64
"""The most newcomers that are remembered at a time."""


@dataclass
class _Claim:
    since_s: float
    last_s: float


class NameClaims:
    """Newcomers that wait for a name, by role, name and identity."""

    def __init__(self) -> None:
        self._claims: dict[tuple[str, str, bytes], _Claim] = {}

    def refuse(
        self, role: str, name: str, newcomer: bytes, known: str, remedy: str, now_s: float, evict_after_s: float
    ) -> Refused:
        """The refusal for a newcomer while the known process of this name may be alive.

        known: that process, in words; remedy: what a person can do. The refusal asks the newcomer to try again until it
        has waited as long as an eviction takes.
        """
        forgotten_s = now_s - evict_after_s - AGAIN_S  # a newcomer that has not asked since then starts to wait again
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
        """Starts all waits again after a pause of the master itself, in which it received no heartbeats."""
        self._claims.clear()
