"""Maps each refusal by the master to the cluster's remedy: one table instead of a test at every call."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from dips.core.errors import RefusalCode, Refused


class Remedy(Enum):
    JOIN_AGAIN = "join again as a new incarnation"
    WAIT = "the same call again, later"
    PULL = "another cluster seeded the run: pull its version"
    DROP = "the push cannot be counted: pull, and drop its steps"
    NEW_ATTEMPT = "begin the same push again"
    NEW_PUSH = "the same work under a new number"
    GIVE_UP = "a person must act"


_OF_CODE: Mapping[RefusalCode, Remedy] = {
    RefusalCode.FENCED: Remedy.JOIN_AGAIN,
    RefusalCode.STALE_EPOCH: Remedy.JOIN_AGAIN,
    RefusalCode.UNKNOWN_NAME: Remedy.JOIN_AGAIN,
    RefusalCode.BUSY: Remedy.WAIT,
    # A heartbeat reports when the last version is published; until then the cluster waits.
    RefusalCode.STOPPING: Remedy.WAIT,
    RefusalCode.VERSION_GONE: Remedy.WAIT,
    RefusalCode.SEED_EXISTS: Remedy.PULL,
    RefusalCode.RANGES: Remedy.DROP,
    RefusalCode.DIGEST: Remedy.NEW_ATTEMPT,
    RefusalCode.UNKNOWN_PUSH: Remedy.NEW_ATTEMPT,
    RefusalCode.SEQ: Remedy.NEW_PUSH,
}

_OF_A_PUSH = frozenset({Remedy.PULL, Remedy.DROP, Remedy.NEW_ATTEMPT, Remedy.NEW_PUSH})


def remedy_for(refused: Refused, *, joining: bool, pushing: bool) -> Remedy:
    """The remedy in this phase. Remedies for a push do not apply outside of one.

    FENCED as the answer to Join without a time to retry means that a newer process took over this cluster's name.
    """
    if refused.retry_after_s > 0:
        return Remedy.WAIT
    remedy = _OF_CODE.get(refused.code, Remedy.GIVE_UP)
    if joining and (remedy is Remedy.JOIN_AGAIN or refused.code is RefusalCode.STOPPING):
        return Remedy.GIVE_UP
    if remedy in _OF_A_PUSH and not pushing:
        return Remedy.GIVE_UP
    return remedy
