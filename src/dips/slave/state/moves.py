"""How a slave takes blocks from other slaves for a RESHARD (docs/decisions/0019-reshard.md), and with which refusal a
move ends. core/net/transfer.py decides what is requested. Pure."""

from __future__ import annotations

from dips.core.errors import RefusalCode, Refused
from dips.core.messages import MoveBlocks
from dips.core.net.transfer import PullTransfer, TransferSettings

WINDOW_CHUNKS = 16
"""16 MiB on their way with chunks of 1 MiB: 10 Gbit/s at a round trip of 13 ms."""

SILENCE_S = 3.0

STALL_S = 30.0
"""Without a chunk for so long the move is given up; the master begins it again when it can."""


def settings_of_moves(chunk_bytes: int) -> TransferSettings:
    """The settings of each transfer of a move."""
    return TransferSettings(chunk_bytes, WINDOW_CHUNKS, SILENCE_S, STALL_S)


def given_up(transfer: PullTransfer) -> Refused:
    """The refusal with which a move ends whose transfer failed. Only what will not come back is not BUSY."""
    if transfer.refusal in (RefusalCode.VERSION_GONE, RefusalCode.RUN_ID):
        return Refused(transfer.refusal, transfer.failure)
    return Refused(RefusalCode.BUSY, transfer.failure, 1.0)


def cancelled(move: MoveBlocks) -> Refused:
    """The refusal with which a move ends that is no longer needed."""
    return Refused(RefusalCode.BUSY, f"round {move.round} was given up", 1.0)
