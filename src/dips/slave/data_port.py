"""Answers one message of the data port. It uses memory and tables, but no socket and no thread.

A peer's message can never raise here: whatever is wrong with it becomes a REFUSED answer and a count. No
byte of a payload reaches staging before the header was admitted, and none counts before its checksum was verified: it
is copied and hashed in one pass, so what a refused chunk leaves in its place is never read, and is overwritten.

A PUT has two steps: begin() decides, and returns the landing, which copies, decodes, checks and measures the chunk
while its bytes are in the cache, perhaps on another thread; end() notes its result. A landing touches bytes, never a
table, so that several of different chunks may run at once. Everything else here belongs to one thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import PushId, Version
from dips.core.layout import FLOAT32_BYTES, checksum
from dips.core.layout import Buffer as Bytes
from dips.core.messages import AllowedKey, SlaveBeat
from dips.core.net.data_header import REQUESTS, WITH_PAYLOAD, DataHeader, DataOp
from dips.core.observe.metrics import Recent
from dips.core.protocol import MAX_WINDOW_CHUNKS
from dips.core.wire import Codec, encoded_bytes, pays
from dips.slave.landing import NEVER, KnownReceipts, LandingJob, Receipts, note_products, note_sums
from dips.slave.memory import F32, ThetaBuffer, bytes_of
from dips.slave.state.admission import Admission, Credits
from dips.slave.state.effects import PushStaged
from dips.slave.state.shard import to_refusal
from dips.slave.state.staging import Landed, Landing, ShardMap, Slot, Staging, StagingTable, find_version

NOT_READY_RETRY_S = 0.5

MAX_REASON_CHARACTERS = 400
"""The most characters of the last refusal, which goes to log and tape: a sentence may quote what a peer sent."""

Reader = str | bytes
"""Whose pull it is: the owner of the connection's key, such as all ranks of a cluster; without keys the connection's
routing id."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. The payload, where the op has one, is the version's own memory.

    Bytes that are sent late, when the memory already holds another version, do not have the checksum of the header:
    the reader asks again and is refused, since the version is gone.
    """

    header: DataHeader
    payload: memoryview | None = None


@dataclass(frozen=True)
class Figures:
    """Counters of the data port since its start."""

    beat: SlaveBeat = field(default_factory=SlaveBeat)
    refused: Mapping[str, int] = field(default_factory=dict)  # messages by code
    staged_of: Mapping[str, int] = field(default_factory=dict)  # bytes by cluster


def rows_of_arrays(n_slots: int, n_chunks: int) -> Landed:
    """The columns of slots in which nothing has landed: s slots, c chunks, (s, c), (s, c) and (s, 2)."""
    shape = (n_slots, n_chunks)
    return Landed(np.zeros(shape, np.uint8), np.zeros(shape, np.uint64), np.zeros((n_slots, 2), np.int64))


class DataPort:
    """Tables and counters of the data thread. staged: called once for each push that becomes complete.

    checksum: benchmarks put another function in the place of xxh3-64 on both sides to measure its cost. admission:
    checks every message by the key of its connection; None: there are no keys. drop_peers: closes all connections,
    which may still refer to the memory of versions that are given up.
    """

    def __init__(
        self,
        run_id: str,
        staged: Callable[[PushStaged], object],
        checksum: Callable[[Bytes], int] = checksum,
        now_s: Callable[[], float] = time.monotonic,
        admission: Admission | None = None,
        drop_peers: Callable[[], None] = lambda: None,
    ) -> None:
        self._run_id = run_id
        self.admission = admission
        self._staged = staged
        self._checksum = checksum
        self._now_s = now_s
        self._drop_peers = drop_peers
        # What is decided with; the compiled loop makes its own tables of these. Without memory the next four are None.
        self.epoch = 0
        self.shard: ShardMap | None = None
        self.staging: F32 | None = None
        self.table: StagingTable | None = None
        self.receipts: Receipts | None = None
        self.readable: Mapping[Version, ThetaBuffer] = {}
        self.current: Version | None = None
        self._bytes: dict[Version, memoryview] = {}
        self._under_way: set[tuple[int, int]] = set()
        self._push_credits: Credits[PushId] = Credits(MAX_WINDOW_CHUNKS)
        self._pull_credits: Credits[Reader] = Credits(MAX_WINDOW_CHUNKS)
        self._staging_bytes = 0
        self.served_bytes = 0
        self._served_any = False  # whether a message may still refer to a version's memory
        self.traffic_bytes = 0
        """Most bytes that correct peers may have under way to here: a window of chunks for each staging slot, and one
        for each rank by which a listed cluster has more than those; twice, since a peer that connects again sends again
        what its old connection may still hold. The ranks of a cluster divide its window, and each has one chunk at
        least."""
        self.refused_chunks = 0
        self._refused: Counter[str] = Counter()
        self._staged_of: Recent[str] = Recent(1)
        self.last_refusal = ""
        self.refused_connections = 0
        self.last_refused_connection = ""

    # ---- called by the control side; never while a landing is under way ----

    def set_epoch(self, epoch: int) -> None:
        """Refuse chunks of older epochs from now on."""
        self.epoch = epoch

    def set_allowed(self, keys: Sequence[AllowedKey]) -> None:
        """Admit these keys and no others; for a port with keys only."""
        assert self.admission is not None, "the state machine refuses a list where no keys are used"
        self.admission.set_keys(keys)
        self._reckon_traffic()

    def set_memory(self, shard: ShardMap | None, staging: F32 | None) -> None:
        """Serve another shard, or none; forget every open staging and readable version."""
        self._push_credits = Credits(MAX_WINDOW_CHUNKS)
        self.set_readable({}, None)
        self.shard, self.staging = shard, staging
        self.table = self.receipts = None
        if shard is not None and staging is not None:
            self.table = StagingTable(shard, rows_of_arrays(len(staging), shard.n_chunks))
            self._staged_of.keep(len(staging))
            self.receipts = Receipts(shard, len(staging))
        self._reckon_traffic()
        if self._served_any:
            self._served_any = False
            self._drop_peers()

    def _reckon_traffic(self) -> None:
        self.traffic_bytes = 0
        if self.shard is not None and self.staging is not None:
            more = self.admission.n_keys_above(MAX_WINDOW_CHUNKS) if self.admission is not None else 0
            self.traffic_bytes = 2 * (len(self.staging) * MAX_WINDOW_CHUNKS + more) * self.shard.chunk_bytes

    def set_readable(self, versions: Mapping[Version, ThetaBuffer], current: Version | None) -> None:
        """Serve these versions and no others; pushes are measured with `current`, one of them, or not at all."""
        self.readable = versions
        self._bytes = {version: bytes_of(buffer.theta) for version, buffer in versions.items()}
        if current != self.current and self.receipts is not None:
            self.receipts.new_theta()
        self.current = current

    def hold(self, slots: Iterable[Slot]) -> None:
        """Hold these slots and no others; reports one at once as complete when nothing is missing."""
        if self.table is None or self.receipts is None or self.shard is None:
            return
        before = self.table.stagings()
        changed = self.table.hold(slots)
        still = {staging.slot.push for staging in self.table.stagings()}
        for staging in before:
            if staging.slot.push not in still:
                self._push_credits.note_closed(staging.slot.push, self._now_s())
        for staging in changed:
            slot = staging.slot
            if not staging.n_landed:
                self.receipts.clear(slot.number)
            if staging.complete:
                self._staged(PushStaged(slot, staging.digest()))
            else:
                left_elems = (self.shard.n_bytes - staging.landed_bytes) // FLOAT32_BYTES
                self._push_credits.note_open(slot.push, encoded_bytes(slot.wire, left_elems), self._now_s())

    def known(self, version: Version) -> KnownReceipts | None:
        """Sums that were taken on receipt, for MEASURE at this version; None if it is not the current one.

        From any thread, since slots of complete pushes and the current version do not change."""
        receipts = self.receipts
        return KnownReceipts(receipts, receipts.theta_number) if receipts and self.current == version else None

    # ---- messages of peers ----

    def answer(self, frames: Sequence[memoryview], peer: bytes = b"", user: str = "") -> Answer:
        """The answer to one message: frames are the header and, for PUT_CHUNK, the payload; user: as in begin()."""
        step = self.begin(frames, peer, user)
        if isinstance(step, Answer):
            return step
        assert step is not None, "with one landing at a time no other is under way"
        return self.end(step, step.run())

    def begin(self, frames: Sequence[memoryview], peer: bytes = b"", user: str = "") -> Answer | LandingJob | None:
        """The answer, or a landing to run first; None: the same chunk is landing, try again after a landing ended.

        user: the id that slave/state/admission.py gave the connection that the message came by.
        """
        request = 0
        try:
            if not frames:
                raise Refused(RefusalCode.MALFORMED, "a data message has no header frame")
            header = DataHeader.decode(frames[0])
            request = header.request
            header.check_common(self._run_id)
            n_frames = len(frames)
            if header.op not in REQUESTS:
                raise Refused(RefusalCode.MALFORMED, f"{header.op.name} is an answer: only slaves send it")
            expected = 2 if header.op in WITH_PAYLOAD else 1
            if n_frames != expected:
                raise Refused(RefusalCode.MALFORMED, f"{header.op.name} has {n_frames} frames, it takes {expected}")
            if self.admission is not None:
                self.admission.check(user, header)
            reader = peer if self.admission is None else self.admission.owner(user)
            if self.shard is None or self.table is None:
                raise Refused(RefusalCode.BUSY, "this slave has no memory yet: it is starting", NOT_READY_RETRY_S)
            if header.op is DataOp.GET_CHUNK:
                return self._get(header, self.shard, reader)
            if header.epoch < self.epoch:
                raise Refused(
                    RefusalCode.STALE_EPOCH,
                    f"the chunk is of epoch {header.epoch}, the master is in {self.epoch}: join again",
                )
            if header.op is DataOp.PUT_CHUNK:
                return self._put(header, frames[1], self.table)
            staging = self.table.find(header.push, header.attempt)
            return Answer(self._reply(header, DataOp.MISSING, staging))
        except Refused as refused:
            return self._refuse(request, refused)

    def end(self, job: LandingJob, refused: Refused | None) -> Answer:
        """Note the result of a landing, and answer its sender."""
        assert self.table is not None
        assert self.receipts is not None
        staging, landing, sums = job.staging, job.landing, self.receipts.sums
        slot = staging.slot.number
        self._under_way.discard((slot, landing.index))
        if refused is not None:
            note_sums(sums, slot, landing.index, 0, NEVER)
            return self._refuse(job.header.request, refused)
        note_sums(sums, slot, landing.index, job.bad, job.theta_number)
        for other, _, _ in job.companions:
            note_products(sums, slot, other, landing.index, job.theta_number)
        self.note_came(staging, landing.length_bytes, len(job.payload))
        if self.table.land(staging, landing, job.header.checksum):
            self.note_complete(staging)
        return Answer(self._reply(job.header, DataOp.ACK, staging))

    # ---- what was done, here or by the compiled loop ----

    def note_came(self, staging: Staging, length_bytes: int, payload_bytes: int) -> None:
        """Chunks of length_bytes of parameters landed, sent as payload_bytes."""
        push = staging.slot.push
        self._staging_bytes += length_bytes
        self._staged_of.add(push.cluster, length_bytes)
        self._push_credits.note_landed(push, payload_bytes, self._now_s())

    def note_complete(self, staging: Staging) -> None:
        """The last chunk of a push landed."""
        self._push_credits.note_closed(staging.slot.push, self._now_s())
        self._staged(PushStaged(staging.slot, staging.digest()))

    def note_served(self, reader: Reader, n_bytes: int) -> None:
        """So many bytes of a version go to this reader."""
        self.served_bytes += n_bytes
        self._served_any = True
        self._pull_credits.note_landed(reader, n_bytes, self._now_s())

    def push_credit(self, staging: Staging) -> int:
        """Requests that each sender of this push may have unanswered."""
        return self._push_credits.credit(staging.slot.push, self._now_s())

    def pull_credit(self, reader: Reader) -> int:
        """Likewise for each connection of a reader."""
        return self._pull_credits.credit(reader, self._now_s())

    # ---- figures ----

    def figures(self) -> Figures:
        """Counters since start and the open stagings; the control side fills in the beat's resident_bytes."""
        progress = self.table.progress() if self.table is not None else ()
        beat = SlaveBeat(
            self._staging_bytes,
            self.served_bytes,
            self.refused_chunks,
            0,
            len(progress),
            progress,
            refused_connections=self.refused_connections,
            refused_connection=self.last_refused_connection,
        )
        return Figures(beat, dict(self._refused), self._staged_of.counted())

    def refuse_connection(self, sentence: str, n: int = 1) -> None:
        """Count connections that were refused or closed, with the reason."""
        self.refused_connections += n
        self.last_refused_connection = sentence

    def _refuse(self, request: int, refused: Refused) -> Answer:
        self.refused_chunks += 1
        self._refused[refused.code.name] += 1
        if refused.retry_after_s == 0:  # else it is early, not wrong: not worth a log line
            self.last_refusal = refused.sentence[:MAX_REASON_CHARACTERS]
        return Answer(DataHeader(self._run_id, self.epoch, DataOp.REFUSED, request, refusal=to_refusal(refused)))

    def _put(self, header: DataHeader, payload: memoryview, table: StagingTable) -> Answer | LandingJob | None:
        staging, landing, has_landed = table.admit(header, len(payload))
        if has_landed:
            return Answer(self._reply(header, DataOp.ACK, staging))
        slot, elems = staging.slot, landing.elems
        if (slot.number, landing.index) in self._under_way:
            return None
        assert self.staging is not None
        job = LandingJob(header, staging, landing, payload, self._checksum, self.staging[slot.number, elems])
        if slot.wire is not Codec.F32:
            base = self.readable.get(slot.base) if slot.base is not None else None
            if base is None:
                raise Refused(
                    RefusalCode.BASE_GONE,
                    f"push {slot.push} holds differences to version {slot.base}, which is no longer kept here: "
                    "take a new ticket and send parameters",
                )
            job.base = base.theta[elems]
        if self.current is not None:
            self._to_measure(job, elems)
        self._under_way.add((slot.number, landing.index))
        return job

    def _to_measure(self, job: LandingJob, elems: slice) -> None:
        """Have the chunk's sums taken with the current theta, and products with the other pushes that have it."""
        assert self.staging is not None
        assert self.receipts is not None
        assert self.current is not None
        if not self.receipts.shard.whole_pieces:
            return
        slot, landing = job.staging.slot.number, job.landing
        job.theta = self.readable[self.current].theta[elems]
        job.theta_number = self.receipts.theta_number
        job.squared = self.receipts.sums.squared[slot, landing.pieces]
        job.companions = [
            (other, self.staging[other, elems], products) for other, products in self.receipts.companions(slot, landing)
        ]

    def _get(self, header: DataHeader, shard: ShardMap, reader: Reader) -> Answer:
        landing = find_version(shard, header, self.readable)
        version = header.version
        assert version is not None
        codec = Codec.F32
        if header.base is not None:
            codec, payload = header.codec, self._differences(header, landing)
            chunk_sum = self.readable[version].checksums[landing.index]
        else:
            payload, chunk_sum = self._chunk(version, landing, header.momentum)
        self.note_served(reader, len(payload))
        return Answer(
            DataHeader(
                self._run_id,
                self.epoch,
                DataOp.CHUNK,
                header.request,
                version=version,
                block=header.block,
                offset_bytes=header.offset_bytes,
                length_bytes=landing.length_bytes,
                codec=codec,
                checksum=chunk_sum,
                cause_id=header.cause_id,
                credit=self.pull_credit(reader),
                momentum=header.momentum,
                base=header.base,
            ),
            payload,
        )

    def _differences(self, header: DataHeader, landing: Landing) -> memoryview:
        """The payloads of a chunk's differences from header.base to header.version, oldest first. Raises
        Refused(BASE_GONE) where they are not here, or would be no fewer bytes than parameters, CHUNK for momentum.
        """
        assert header.version is not None
        if header.momentum:
            raise Refused(RefusalCode.CHUNK, "there are differences of parameters only, not of the momentum")
        parts: list[memoryview] = []
        version: Version | None = header.version
        while version != header.base:
            buffer = self.readable.get(version) if version is not None else None
            difference = buffer.difference if buffer is not None and buffer.base is not None else None
            if buffer is None or difference is None or difference.codec is not header.codec:
                break
            parts.append(difference.of(landing.index).data)
            version = buffer.base
        if version != header.base or not pays(header.codec, len(parts)):
            raise Refused(
                RefusalCode.BASE_GONE,
                f"differences of version {header.version} to {header.base} in {header.codec.name} are not kept here: "
                "begin the pull again, for parameters",
            )
        return parts[0] if len(parts) == 1 else memoryview(b"".join(reversed(parts)))

    def _chunk(self, version: Version, landing: Landing, momentum: bool) -> tuple[memoryview, int]:
        """A chunk's bytes and their checksum. Raises Refused(VERSION_GONE) for the momentum of an older version."""
        span = slice(landing.start_byte, landing.start_byte + landing.length_bytes)
        buffer = self.readable[version]
        if not momentum:
            return self._bytes[version][span], buffer.checksums[landing.index]
        array = buffer.momentum
        if array is None:
            sentence = f"the momentum of version {version} is not kept: it is not the newest"
            raise Refused(RefusalCode.VERSION_GONE, sentence)
        payload = bytes_of(array)[span]
        return payload, self._checksum(payload)

    def _reply(self, header: DataHeader, op: DataOp, staging: Staging) -> DataHeader:
        assert self.table is not None
        missing = self.table.missing(staging, header.block, header.offset_bytes) if op is DataOp.MISSING else ()
        return DataHeader(
            self._run_id,
            self.epoch,
            op,
            header.request,
            push=staging.slot.push,
            attempt=staging.slot.attempt,
            block=header.block,
            offset_bytes=header.offset_bytes,
            missing=missing,
            complete=staging.complete,
            cause_id=header.cause_id,
            credit=self.push_credit(staging),
        )
