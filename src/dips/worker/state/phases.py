"""The phases of a cluster's session and the transitions between them; docs/protocol.md is generated from this."""

from __future__ import annotations

from enum import Enum

from dips.core.machine import TransitionTable


class SessionPhase(Enum):
    """The phases. JOINING again, after a fence, goes on in the background: the training loop runs in every phase but
    LEFT, unless ClusterMachine.must_wait is true.
    """

    JOINING = "JOINING"
    TRAINING = "TRAINING"
    BEGINNING_PUSH = "BEGINNING_PUSH"
    TRANSFERRING = "TRANSFERRING"
    FINISHING_PUSH = "FINISHING_PUSH"
    AWAITING = "AWAITING"
    PULLING = "PULLING"
    LEAVING = "LEAVING"
    LEFT = "LEFT"


_P = SessionPhase
_PRESENT = (_P.TRAINING, _P.BEGINNING_PUSH, _P.TRANSFERRING, _P.FINISHING_PUSH, _P.AWAITING, _P.PULLING)
_DONATING = (_P.BEGINNING_PUSH, _P.FINISHING_PUSH, _P.AWAITING)
# APPLIED, EXCLUDED and ROLLED_BACK ask for a pull; ABORTED for none; an ABORTED seed is pushed again.
_DECIDED = [_P.PULLING, _P.TRAINING, _P.BEGINNING_PUSH]

SESSION_TABLE: TransitionTable[SessionPhase] = TransitionTable(
    "session",
    _P.JOINING,
    {
        (_P.JOINING, "joined"): [_P.BEGINNING_PUSH, _P.AWAITING, _P.PULLING, _P.TRAINING],
        (_P.TRAINING, "push due"): [_P.BEGINNING_PUSH],
        (_P.TRAINING, "donate"): [_P.BEGINNING_PUSH],
        (_P.AWAITING, "donate"): [_P.BEGINNING_PUSH],
        (_P.PULLING, "donate"): [_P.BEGINNING_PUSH],
        # Back to the phase before: a donation that is not taken changes nothing.
        **{(phase, "not donated"): [_P.TRAINING, _P.AWAITING, _P.PULLING] for phase in _DONATING},
        (_P.TRAINING, "run stops"): [_P.PULLING],
        (_P.BEGINNING_PUSH, "ticket"): [_P.TRANSFERRING],
        (_P.BEGINNING_PUSH, "stale"): [_P.PULLING],
        (_P.BEGINNING_PUSH, "undecided"): [_P.AWAITING],
        (_P.BEGINNING_PUSH, "verdict"): _DECIDED,
        (_P.BEGINNING_PUSH, "push refused"): [_P.PULLING, _P.TRAINING],
        (_P.BEGINNING_PUSH, "run stops"): [_P.PULLING],
        (_P.TRANSFERRING, "sent"): [_P.FINISHING_PUSH],
        (_P.TRANSFERRING, "transfer failed"): [_P.BEGINNING_PUSH],
        (_P.TRANSFERRING, "run stops"): [_P.PULLING],
        (_P.FINISHING_PUSH, "admitted"): [_P.AWAITING],
        (_P.FINISHING_PUSH, "incomplete"): [_P.TRANSFERRING],
        (_P.FINISHING_PUSH, "verdict"): _DECIDED,
        (_P.FINISHING_PUSH, "push again"): [_P.BEGINNING_PUSH],
        (_P.FINISHING_PUSH, "push refused"): [_P.PULLING, _P.TRAINING],
        (_P.AWAITING, "verdict"): _DECIDED,
        (_P.PULLING, "installed"): [_P.TRAINING],
        (_P.LEAVING, "left"): [_P.LEFT],
        (_P.JOINING, "leave"): [_P.LEAVING, _P.LEFT],
        **{(phase, "fenced"): [_P.JOINING] for phase in _PRESENT},
        **{(phase, "leave"): [_P.LEAVING] for phase in _PRESENT},
    },
)
