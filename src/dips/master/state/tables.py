"""The phases of pushes, slaves and rounds and their transitions; docs/protocol.md draws its diagrams from them."""

from __future__ import annotations

from enum import Enum

from dips.core.machine import TransitionTable


class PushPhase(Enum):
    TICKETED = "TICKETED"
    STAGED = "STAGED"
    ADMITTED = "ADMITTED"
    SEALED = "SEALED"
    DECIDED = "DECIDED"


PUSH_TABLE: TransitionTable[PushPhase] = TransitionTable(
    "push",
    PushPhase.TICKETED,
    {
        (PushPhase.TICKETED, "new attempt"): [PushPhase.TICKETED],
        (PushPhase.STAGED, "new attempt"): [PushPhase.TICKETED],
        (PushPhase.TICKETED, "all slaves staged it"): [PushPhase.STAGED],
        (PushPhase.STAGED, "finish push"): [PushPhase.ADMITTED],
        (PushPhase.ADMITTED, "window sealed"): [PushPhase.SEALED],
        (PushPhase.SEALED, "round aborted"): [PushPhase.ADMITTED],
        (PushPhase.TICKETED, "aborted"): [PushPhase.DECIDED],
        (PushPhase.STAGED, "aborted"): [PushPhase.DECIDED],
        (PushPhase.ADMITTED, "aborted"): [PushPhase.DECIDED],
        (PushPhase.SEALED, "aborted"): [PushPhase.DECIDED],
        (PushPhase.SEALED, "applied"): [PushPhase.DECIDED],
        (PushPhase.SEALED, "excluded"): [PushPhase.DECIDED],
        (PushPhase.SEALED, "rolled back"): [PushPhase.DECIDED],
    },
)


class SlavePhase(Enum):
    ABSENT = "ABSENT"
    ATTACHED = "ATTACHED"
    PROMISED = "PROMISED"
    CONFIGURING = "CONFIGURING"
    READY = "READY"


SLAVE_TABLE: TransitionTable[SlavePhase] = TransitionTable(
    "slave",
    SlavePhase.ABSENT,
    {
        (SlavePhase.ABSENT, "hello"): [SlavePhase.ATTACHED],
        (SlavePhase.ATTACHED, "promised"): [SlavePhase.PROMISED],
        (SlavePhase.PROMISED, "configure"): [SlavePhase.CONFIGURING],
        (SlavePhase.CONFIGURING, "ready"): [SlavePhase.READY],
        (SlavePhase.READY, "configure"): [SlavePhase.CONFIGURING],
        **{
            (phase, "lost"): [SlavePhase.ABSENT]
            for phase in (
                SlavePhase.ATTACHED,
                SlavePhase.PROMISED,
                SlavePhase.CONFIGURING,
                SlavePhase.READY,
            )
        },
    },
)


class RoundPhase(Enum):
    IDLE = "IDLE"
    WINDOW = "WINDOW"
    SEALED = "SEALED"
    MEASURE = "MEASURE"
    JUDGE = "JUDGE"
    PREPARE = "PREPARE"
    COMMIT = "COMMIT"
    PUBLISH = "PUBLISH"


ROUND_TABLE: TransitionTable[RoundPhase] = TransitionTable(
    "round",
    RoundPhase.IDLE,
    {
        (RoundPhase.IDLE, "push admitted"): [RoundPhase.WINDOW],
        (RoundPhase.WINDOW, "nobody left"): [RoundPhase.IDLE],
        (RoundPhase.WINDOW, "window closed"): [RoundPhase.SEALED],
        (RoundPhase.SEALED, "nobody left"): [RoundPhase.IDLE],
        (RoundPhase.SEALED, "checks passed"): [RoundPhase.MEASURE],
        (RoundPhase.SEALED, "it is the seed"): [RoundPhase.PREPARE],
        (RoundPhase.MEASURE, "all measured"): [RoundPhase.JUDGE],
        (RoundPhase.MEASURE, "abort"): [RoundPhase.IDLE],
        (RoundPhase.JUDGE, "accepted"): [RoundPhase.PREPARE],
        (RoundPhase.JUDGE, "void"): [RoundPhase.IDLE],
        (RoundPhase.PREPARE, "all prepared"): [RoundPhase.COMMIT],
        (RoundPhase.PREPARE, "void"): [RoundPhase.IDLE],
        (RoundPhase.PREPARE, "abort"): [RoundPhase.IDLE],
        (RoundPhase.COMMIT, "all flipped"): [RoundPhase.PUBLISH],
        (RoundPhase.PUBLISH, "verdicts told"): [RoundPhase.IDLE],
        (RoundPhase.SEALED, "it is a donation"): [RoundPhase.PREPARE],
        (RoundPhase.COMMIT, "recovery"): [RoundPhase.IDLE],
    },
)


class RecoveryPhase(Enum):
    NONE = "NONE"
    GATHERING = "GATHERING"
    ASKING = "ASKING"
    DONATING = "DONATING"


RECOVERY_TABLE: TransitionTable[RecoveryPhase] = TransitionTable(
    "recovery",
    RecoveryPhase.NONE,
    {
        (RecoveryPhase.NONE, "master started"): [RecoveryPhase.GATHERING],
        (RecoveryPhase.NONE, "slave cannot load"): [RecoveryPhase.GATHERING],
        (RecoveryPhase.GATHERING, "record needed"): [RecoveryPhase.ASKING],
        (RecoveryPhase.ASKING, "record came"): [RecoveryPhase.GATHERING],
        (RecoveryPhase.ASKING, "no record"): [RecoveryPhase.GATHERING],
        (RecoveryPhase.GATHERING, "all can load"): [RecoveryPhase.NONE],
        (RecoveryPhase.GATHERING, "adopted"): [RecoveryPhase.NONE],
        (RecoveryPhase.GATHERING, "rolled back"): [RecoveryPhase.NONE],
        (RecoveryPhase.GATHERING, "no common version"): [RecoveryPhase.DONATING],
        (RecoveryPhase.DONATING, "donation committed"): [RecoveryPhase.NONE],
        (RecoveryPhase.DONATING, "snapshot came back"): [RecoveryPhase.GATHERING],
        (RecoveryPhase.DONATING, "no donor is left"): [RecoveryPhase.GATHERING],
    },
)


class ReshardPhase(Enum):
    NONE = "NONE"
    WAITING = "WAITING"
    LISTING = "LISTING"
    MOVING = "MOVING"


RESHARD_TABLE: TransitionTable[ReshardPhase] = TransitionTable(
    "reshard",
    ReshardPhase.NONE,
    {
        (ReshardPhase.NONE, "asked"): [ReshardPhase.WAITING],
        (ReshardPhase.WAITING, "all are here"): [ReshardPhase.LISTING],
        (ReshardPhase.LISTING, "all listed"): [ReshardPhase.MOVING],
        (ReshardPhase.MOVING, "journaled"): [ReshardPhase.NONE],
        (ReshardPhase.LISTING, "given up"): [ReshardPhase.WAITING],
        (ReshardPhase.MOVING, "given up"): [ReshardPhase.WAITING],
        (ReshardPhase.WAITING, "no wish"): [ReshardPhase.NONE],
    },
)
