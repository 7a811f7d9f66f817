"""Actions on slaves that several machines need: configuring, losing, disconnecting and dismissing one."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from dips.core.errors import RefusalCode, Refused
from dips.core.messages import Configure, KeyRole, StopSlave
from dips.master.state import tape
from dips.master.state.records import Slave, SlavePhase
from dips.master.state.rounds import Rounds
from dips.master.state.shared import SharedState

# ---- name claims -----------------------------------------------------------------------------------------------------
#
# Resolves two processes with one name: the known one keeps it while it is alive; the newcomer waits, then is refused.
#
# Both may have the same certificate, so a name proves nothing. A slave is identified by its directory, a cluster by its
# process; each identity is a number that was drawn once (docs/decisions/0034). A newcomer is asked to try again for as
# long as the known process could be dead and not yet evicted. If it has not been evicted by then, it sends heartbeats,
# and the newcomer is refused permanently. So neither a late beat nor a restarted master gives a name to a wrong
# process.


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


# ---- slave links -----------------------------------------------------------------------------------------------------


class SlaveLinks:
    """Configures, loses, disconnects and dismisses slaves."""

    def __init__(self, shared: SharedState, rounds: Rounds) -> None:
        self._shared = shared
        self._rounds = rounds

    def configure(self, slave: Slave) -> None:
        """Configures a slave that promised the epoch: with the newest version, or none while a cluster donates it."""
        shared, ledger = self._shared, self._shared.ledger
        assert ledger.layout is not None, "configured only once the model is known"
        slave.trouble = ""
        slave.phase.move("configure", SlavePhase.CONFIGURING, shared.now_s, str(slave.incarnation))
        commit = None if shared.recovery.donating else ledger.commit
        origin, origin_round = ledger.origin if commit and ledger.origin else (None, None)
        configure = Configure(
            ledger.layout,
            ledger.layout.layout_hash,
            shared.placement_spec(),
            shared.config.max_clusters,
            commit.version if commit else None,
            commit.round if commit else None,
            dict(commit.digest_of_slave)[slave.id] if commit else b"",
            commit.commit_hash if commit else b"",
            commit.record if commit else b"",
            shared.config.pinned_versions,
            origin,
            origin_round,
            shared.recovery.donating,
        )
        shared.command(slave, configure, str(slave.incarnation))

    def lose(self, slave: Slave, reason: str) -> None:
        """Handles the end of a slave's stream: all that was only in its memory is lost."""
        shared = self._shared
        slave.phase.move("lost", SlavePhase.ABSENT, shared.now_s, str(slave.incarnation), reason)
        slave.link = None
        # A live process dials again within this time and keeps its name.
        slave.held_until_s = shared.now_s + DIALS_AGAIN_BEATS * shared.config.settings.heartbeat_s
        shared.allowed.remove(KeyRole.SLAVE, slave.id)
        shared.record(tape.SlaveLost(str(slave.incarnation), slave=slave.id, reason=reason))
        shared.log(f"slave {slave.id}", reason, logging.WARNING)
        if shared.ledger.placement is None:
            del shared.slaves[slave.id]
        elif shared.holds_blocks(slave.id):
            self._rounds.slave_lost(slave, reason)

    def send_away(self, slave: Slave, reason: str) -> None:
        """Ends its stream, so that it attaches again and reports again what its disk holds."""
        if slave.link is not None:
            self._shared.close(slave.link, Refused(RefusalCode.FENCED, f"{reason}: attach again"))
            self.lose(slave, f"slave {slave.id} is to attach again: {reason}")

    def dismiss(self, slave: Slave, reason: str) -> None:
        """Tells a slave that the run no longer needs that it may end, and forgets it."""
        shared = self._shared
        shared.command(slave, StopSlave(reason), str(slave.incarnation))
        if slave.link is not None:
            slave.phase.move("lost", SlavePhase.ABSENT, shared.now_s, str(slave.incarnation), reason)
        slave.link = None
        shared.allowed.remove(KeyRole.SLAVE, slave.id)
        shared.record(tape.SlaveDismissed(str(slave.incarnation), slave=slave.id, reason=reason))
        shared.log(f"slave {slave.id}", reason)
        del shared.slaves[slave.id]
