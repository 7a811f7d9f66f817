"""What the data port answers to one message. It knows memory and tables, but no socket and no thread.

A message of a peer can never raise here: whatever is wrong with it becomes a REFUSED answer and a count. No
byte of a payload reaches staging before the header was admitted and the checksum verified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dips.core.chunks import checksum
from dips.core.data_header import REQUESTS, WITH_PAYLOAD, Codec, DataHeader, DataOp
from dips.core.errors import RefusalCode, Refused
from dips.core.ids import PushId, Version
from dips.core.messages import Refusal, SlaveBeat
from dips.slave.memory import F32, Buffer, bytes_of
from dips.slave.state.events import PushStaged
from dips.slave.state.staging import ShardMap, Staging, StagingTable, find_version

NOT_READY_RETRY_S = 0.5


@dataclass(frozen=True)
class Answer:
    """One answer; the payload, where the op has one, is the version's own memory: copy it before the next message."""

    header: DataHeader
    payload: memoryview | None = None


class DataPort:
    """The tables and counters of the data thread. staged: called once for each push that becomes complete."""

    def __init__(self, run_id: str, staged: Callable[[PushStaged], None]) -> None:
        self._run_id = run_id
        self._staged = staged
        self._epoch = 0
        self._map: ShardMap | None = None
        self._table: StagingTable | None = None
        self._rows: list[memoryview] = []
        self._readable: Mapping[Version, Buffer] = {}
        self._staging_bytes = 0
        self.served_bytes = 0
        self.refused_chunks = 0
        self.last_refusal = ""

    # ---- told by the control side ----

    def set_epoch(self, epoch: int) -> None:
        """Chunks of older epochs are refused from now on."""
        self._epoch = epoch

    def set_memory(self, shard: ShardMap | None, staging: F32 | None) -> None:
        """Serve another shard, or none; every open staging and readable version is forgotten."""
        self._readable = {}
        self._map = shard
        self._rows = [bytes_of(row) for row in staging] if staging is not None else []
        self._table = StagingTable(shard, len(self._rows)) if shard is not None else None

    def set_readable(self, versions: Mapping[Version, Buffer]) -> None:
        self._readable = versions

    def open(self, push: PushId, attempt: int, slot: int, opening: int = 0) -> None:
        """Open or adopt a staging; says at once that it is complete when nothing is missing."""
        if self._table is not None:
            staging = self._table.open(push, attempt, slot, opening)
            if staging.complete:
                self._say_staged(staging)

    def close(self, push: PushId) -> None:
        if self._table is not None:
            self._table.close(push)

    def close_all(self) -> None:
        if self._table is not None:
            self._table.close_all()

    # ---- asked by peers ----

    def answer(self, frames: Sequence[memoryview]) -> Answer:
        """The answer to one message: frames are the header and, for PUT_CHUNK, the payload."""
        request = 0
        try:
            if not frames:
                raise Refused(RefusalCode.MALFORMED, "a data message has no header frame")
            header = DataHeader.decode(frames[0])
            request = header.request
            header.check_common(self._run_id)
            _check_frames(header, len(frames))
            return self._serve(header, frames)
        except Refused as refused:
            self.refused_chunks += 1
            if refused.retry_after_s == 0:  # else it is early, not wrong: no news for people
                self.last_refusal = refused.sentence
            refusal = Refusal(refused.code, refused.sentence, refused.retry_after_s)
            return Answer(DataHeader(self._run_id, self._epoch, DataOp.REFUSED, request, refusal=refusal))

    def beat(self) -> SlaveBeat:
        """Counters since start and the open stagings; resident_bytes is for the control side to fill in."""
        progress = self._table.progress() if self._table is not None else ()
        return SlaveBeat(self._staging_bytes, self.served_bytes, self.refused_chunks, 0, len(progress), progress)

    def _serve(self, header: DataHeader, frames: Sequence[memoryview]) -> Answer:
        if self._map is None or self._table is None:
            raise Refused(RefusalCode.BUSY, "this slave has no memory yet: it is starting", NOT_READY_RETRY_S)
        if header.op is DataOp.GET_CHUNK:
            return self._get(header, self._map)
        if header.epoch < self._epoch:
            raise Refused(
                RefusalCode.STALE_EPOCH,
                f"the chunk is of epoch {header.epoch}, the master is in {self._epoch}: join again",
            )
        if header.op is DataOp.PUT_CHUNK:
            return self._put(header, frames[1], self._table)
        staging = self._table.find(header.push, header.attempt)
        return Answer(self._reply(header, DataOp.MISSING, staging))

    def _put(self, header: DataHeader, payload: memoryview, table: StagingTable) -> Answer:
        staging, landing, landed = table.admit(header, len(payload))
        if not landed:
            found = checksum(payload)
            if found != header.checksum:
                raise Refused(
                    RefusalCode.CHUNK,
                    f"block {header.block}, offset {header.offset_bytes} of push {header.push}: the payload's checksum "
                    f"is {found:016x}, its header says {header.checksum:016x}; send it again",
                )
            start = landing.start_byte
            self._rows[staging.slot][start : start + landing.length_bytes] = payload
            self._staging_bytes += landing.length_bytes
            if table.land(staging, landing, header.checksum):
                self._say_staged(staging)
        return Answer(self._reply(header, DataOp.ACK, staging))

    def _get(self, header: DataHeader, shard: ShardMap) -> Answer:
        landing = find_version(shard, header, frozenset(self._readable))
        assert header.version is not None
        buffer = self._readable[header.version]
        start = landing.start_byte
        payload = bytes_of(buffer.theta)[start : start + landing.length_bytes]
        self.served_bytes += landing.length_bytes
        return Answer(
            DataHeader(
                self._run_id,
                self._epoch,
                DataOp.CHUNK,
                header.request,
                version=header.version,
                block=header.block,
                offset_bytes=header.offset_bytes,
                length_bytes=landing.length_bytes,
                codec=Codec.F32,
                checksum=buffer.checksums[landing.index],
                cause_id=header.cause_id,
            ),
            payload,
        )

    def _reply(self, header: DataHeader, op: DataOp, staging: Staging) -> DataHeader:
        assert self._table is not None
        missing = self._table.missing(staging) if op is DataOp.MISSING else ()
        return DataHeader(
            self._run_id,
            self._epoch,
            op,
            header.request,
            push=staging.push,
            attempt=staging.attempt,
            block=header.block,
            offset_bytes=header.offset_bytes,
            missing=missing,
            complete=staging.complete,
            cause_id=header.cause_id,
        )

    def _say_staged(self, staging: Staging) -> None:
        self._staged(PushStaged(staging.push, staging.attempt, staging.opening, staging.digest()))


def _check_frames(header: DataHeader, n_frames: int) -> None:
    if header.op not in REQUESTS:
        raise Refused(RefusalCode.MALFORMED, f"{header.op.name} is an answer: only slaves send it")
    expected = 2 if header.op in WITH_PAYLOAD else 1
    if n_frames != expected:
        raise Refused(RefusalCode.MALFORMED, f"{header.op.name} has {n_frames} frames, it takes {expected}")
