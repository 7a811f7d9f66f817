"""Keys of the data flow in a simulated run: what CURVE and ZAP do at a slave's port, without the arithmetic.

A key is a name for one life of one process. Who turns whom away is the real list's affair (slave/state/admission.py).
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
"""Told why no connection was made."""


def key_of(process: SimulatedProcess) -> bytes:
    """Another one in each life."""
    return hashlib.sha256(f"{process.name} {process.generation}".encode()).digest()


def may_ask(
    admission: Admission, key: bytes, header: DataHeader, answer: Callable[[DataHeader, None], None], away: Away
) -> bool:
    """Whether the owner of the key may ask this; if not, it was answered, or turned away."""
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
    """For who asks by a connection that it does not watch."""
