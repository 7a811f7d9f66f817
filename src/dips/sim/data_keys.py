"""Simulates the keys of the data flow: what CURVE and ZAP do at a slave's port, without cryptography.

A key is a name for one incarnation of one process. The real list (slave/state/admission.py) decides about admission.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from dips.core.errors import Refused
from dips.core.messages import Refusal
from dips.core.net.data_header import DataHeader, DataOp
from dips.sim.kernel import SimulatedProcess
from dips.slave.state.admission import Admission

Away = Callable[[str], None]
"""Called with the reason why no connection was made."""


def key_of(process: SimulatedProcess) -> bytes:
    """The key of a process, another one in each incarnation."""
    return hashlib.sha256(f"{process.name} {process.generation}".encode()).digest()


def may_ask(
    admission: Admission, key: bytes, header: DataHeader, answer: Callable[[DataHeader, None], None], away: Away
) -> bool:
    """Whether the owner of the key may ask this; if not, it was answered, or not admitted."""
    if not admission.listed(key.hex()):
        away("the key is not on the master's list")
        return False
    try:
        admission.check(key.hex(), header)
    except Refused as refused:
        refusal = Refusal(refused.code, refused.sentence, refused.retry_after_s)
        answer(DataHeader(header.run_id, header.epoch, DataOp.REFUSED, header.request, refusal=refusal), None)
        return False
    return True


def nobody_hears(why: str) -> None:
    """A callback for a peer that does not watch its connection."""
