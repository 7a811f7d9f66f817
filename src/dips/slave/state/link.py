"""The slave's link to the master: its promised epoch, its incarnation, and which commands it may obey.

A promise is durable before it is sent, and epochs below it are refused for ever (docs/protocol.md, fencing). This
module must never lower the promised epoch.
"""

from __future__ import annotations

from enum import Enum

from dips.core.ids import Incarnation
from dips.core.machine import MachineHistory, Phase, TransitionTable
from dips.core.messages import SlaveCommand, Welcome


class LinkPhase(Enum):
    DETACHED = "DETACHED"
    GREETING = "GREETING"
    PROMISING = "PROMISING"
    ATTACHED = "ATTACHED"


_P = LinkPhase

LINK_TABLE: TransitionTable[LinkPhase] = TransitionTable(
    "slave link",
    _P.DETACHED,
    {
        (_P.DETACHED, "linked"): {_P.GREETING},
        (_P.GREETING, "welcome"): {_P.PROMISING},
        (_P.ATTACHED, "welcome"): {_P.PROMISING},
        (_P.PROMISING, "welcome"): {_P.PROMISING},
        (_P.PROMISING, "promise_saved"): {_P.ATTACHED},
        (_P.DETACHED, "unlinked"): {_P.DETACHED},
        (_P.GREETING, "unlinked"): {_P.DETACHED},
        (_P.PROMISING, "unlinked"): {_P.DETACHED},
        (_P.ATTACHED, "unlinked"): {_P.DETACHED},
    },
)
"""Every Welcome passes through PROMISING, also for an epoch that is promised already: one way, one order."""


class LinkState:
    """State of the link. promised_epoch: as read from disk at start, 0 for a new directory."""

    def __init__(self, run_id: str, promised_epoch: int, story: MachineHistory) -> None:
        self.run_id = run_id
        self.promised_epoch = promised_epoch
        self.incarnation: Incarnation | None = None
        self.welcome: Welcome | None = None
        self.phase: Phase[LinkPhase] = Phase(LINK_TABLE, story)
        self._promising_epoch = 0

    @property
    def attached(self) -> bool:
        return self.phase.now is LinkPhase.ATTACHED

    @property
    def promising(self) -> bool:
        return self.phase.now is LinkPhase.PROMISING

    def opened(self, now_s: float) -> None:
        self.phase.move("linked", LinkPhase.GREETING, now_s)

    def closed(self, now_s: float, why: str) -> None:
        self.phase.move("unlinked", LinkPhase.DETACHED, now_s, why=why)

    def fenced(self) -> None:
        """This incarnation is over: the next hello asks for a new one."""
        self.incarnation = None

    def welcomed(self, command: SlaveCommand, welcome: Welcome, now_s: float) -> bool:
        """Take a Welcome whose epoch was accepted. Returns whether it began a new incarnation of this slave."""
        self.phase.move("welcome", LinkPhase.PROMISING, now_s, command.cause_id)
        renewed = command.incarnation != self.incarnation
        self.incarnation = command.incarnation
        self.welcome = welcome
        self._promising_epoch = command.epoch
        return renewed

    def promise_saved(self, epoch: int, now_s: float) -> bool:
        """Note a durable promise. Returns whether the link is attached by it; a later Welcome may have overtaken it."""
        self.promised_epoch = max(self.promised_epoch, epoch)
        if not self.promising or epoch != self._promising_epoch:
            return False
        self.phase.move("promise_saved", LinkPhase.ATTACHED, now_s)
        return True

    def why_not(self, command: SlaveCommand) -> str:
        """Why this command must not be obeyed; empty when it may (I8 of docs/architecture.md)."""
        if command.run_id != self.run_id:
            return f"it names run {command.run_id!r}, this slave serves {self.run_id!r}"
        floor = max(self.promised_epoch, self._promising_epoch if self.promising else 0)
        if command.epoch < floor:
            return f"its epoch {command.epoch} is older than {floor}, which this slave promised"
        if isinstance(command.body, Welcome):
            return "" if command.incarnation is not None else "its Welcome names no incarnation"
        if self.phase.now in (LinkPhase.GREETING, LinkPhase.DETACHED):
            return "no Welcome came before it"
        if command.incarnation != self.incarnation:
            return f"it is for incarnation {command.incarnation}, this slave is {self.incarnation}"
        if command.epoch != floor:
            return f"its epoch {command.epoch} was never promised"
        return ""
