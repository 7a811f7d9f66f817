"""Actions on slaves that several machines need: configuring, losing, disconnecting and dismissing one."""

from __future__ import annotations

import logging

from dips.core.errors import RefusalCode, Refused
from dips.core.messages import Configure, KeyRole, StopSlave
from dips.master.state.name_claims import DIALS_AGAIN_BEATS
from dips.master.state.records import Slave
from dips.master.state.rounds import Rounds
from dips.master.state.shared import SharedState
from dips.master.state.tables import SlavePhase


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
        shared.record("slave_lost", str(slave.incarnation), slave=slave.id, reason=reason)
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
        shared.record("slave_dismissed", str(slave.incarnation), slave=slave.id, reason=reason)
        shared.log(f"slave {slave.id}", reason)
        del shared.slaves[slave.id]
