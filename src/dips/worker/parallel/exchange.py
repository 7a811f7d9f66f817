"""Moves elements between those that hold them and those that own them, inside one cluster (gloo, host memory).

collect() brings every rank's share together from the pieces that the ranks hold, before a push; spread() brings the
shares back into all pieces, after a pull. What a rank both holds and owns is copied without messages. All ranks call
both together, in the same order.
The rest travels in rounds. In each round every rank packs what it sends to each of the others into one bucket, and
unpacks one that it received; while a bucket is on its way, the next one is packed and the one before unpacked.

Memory: four buckets of at most BUCKET_BYTES (and an element for each rank), two to send and two to receive. Elements
travel as float32: 16-bit parameters are widened by their holder, and rounded to nearest even by it.
Shapes: a flat vector is this rank's share, its runs one after the other.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from itertools import accumulate, pairwise

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray

from dips.core.allocator import zeros
from dips.core.errors import ConfigError, FatalError, LocalProtocolError
from dips.core.layout import FLOAT32_BYTES, Layout, Share
from dips.core.net.payloads import SnapshotReady
from dips.worker.parallel.agreement import Agreed
from dips.worker.parallel.ownership import Copies, Piece, copies_to_holders, copies_to_owners
from dips.worker.parameters import ChunkSums
from dips.worker.torch_model import DTYPES, add_rounded_off, narrow_runs

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
Memory = F32 | torch.Tensor
"""Float32 on the host is copied by numpy: torch would wake threads that spin while they wait."""

_logger = logging.getLogger("dips")

BUCKET_BYTES = 8 << 20

LOCAL_ELEMS = 1 << 20
"""Copies within a rank are cut to this size, and spread over the rounds."""

GROUP_ELEMS = 1 << 22
"""Elements of the copies from a device that are waited for together: 16 MiB take about a millisecond."""


class Exchange:
    """The copies of one rank's elements, in both directions.

    The group's methods are called directly: torch.distributed's functions no longer take a group once the user has
    destroyed all of them.
    """

    def __init__(
        self,
        layout: Layout,
        held: Sequence[Sequence[Piece]],
        shares: Sequence[Share],
        group: dist.ProcessGroup,
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """held, shares: of every rank of `group`, in its order; the same on each of them. group: of gloo, used for
        nothing else while a call is under way. Made on all ranks together, which compare what they will copy.

        Raises ValueError for a tensor of which no rank holds an element, ConfigError on every rank where one would copy
        other elements than rank 0, FatalError when another rank ends meanwhile.
        """
        self._group: dist.ProcessGroup | None = group
        rank = group.rank()
        self._pieces = held[rank]
        self._names = [layout.spans[piece.parameter].parameter.name for piece in self._pieces]
        self._n_elems = shares[rank].n_elems
        tables = copies_to_owners(layout, held, shares), copies_to_holders(layout, held, shares)
        _check_equal(tables, group, len(held))
        own = layout, self._pieces, shares[rank], rank, len(held), bucket_bytes // FLOAT32_BYTES
        self._to_owners, self._to_holders = (_Moves(table, *own) for table in tables)
        self._buckets: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None
        self._sides: dict[torch.device, torch.cuda.Stream] = {}

    def close(self) -> None:
        """Let go of the group: as long as it is referred to, its connections stay open, and other ranks wait."""
        self._group = None

    @property
    def bytes_sent(self) -> tuple[int, int]:
        """What this rank sends to others in a collect() and in a spread()."""
        return self._to_owners.bytes_sent, self._to_holders.bytes_sent

    def collect(self, tensors: Sequence[torch.Tensor], into: F32) -> None:
        """Fill this rank's share. tensors: the memory of each of its pieces now, of the piece's sizes.

        Raises FatalError when another rank ends meanwhile.
        """
        ready = self.begin_collect(tensors, into)
        if ready is not None:
            ready.wait(0, into.size)

    def begin_collect(self, tensors: Sequence[torch.Tensor], into: F32) -> SnapshotReady | None:
        """As collect(), but what this rank owns and holds on a CUDA device comes while its caller goes on: the next
        work of the current streams waits for it on the device, and the host does not. None: all is there.
        """
        memory, share = self._memory(tensors), self._share(into)
        late: list[_Rows] = []
        is_late = any(tensor.device.type == "cuda" for tensor in tensors)

        def pack(rows: _Rows, bucket: F32) -> None:
            _copy(rows.in_bucket(bucket), rows.in_tensors(memory))

        def unpack(rows: _Rows, bucket: F32) -> None:
            _copy(rows.in_share(share), rows.in_bucket(bucket))

        def keep(rows: _Rows) -> None:
            if is_late:
                late.extend(rows.groups())
            else:
                _copy(rows.in_share(share), rows.in_tensors(memory))

        self._run(self._to_owners, tensors, pack, unpack, keep)
        if not is_late:
            return None
        waits: list[list[Callable[[], None]]] = []
        with torch.no_grad(), self._beside(tensors):
            for rows in late:
                _copy(rows.in_share(share), rows.in_tensors(memory))
                waits.append([side.record_event().synchronize for side in self._sides.values()])
        for device, side in self._sides.items():
            torch.cuda.current_stream(device).wait_stream(side)
        return _Coming([rows.first_place for rows in late], waits)

    def spread(self, flat: F32, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite every piece with its owners' values, from this rank's share and the others'. tensors: as above.

        Raises FatalError when another rank ends meanwhile; the pieces are then of mixed content.
        """
        memory, share = self._memory(tensors), self._share(flat)

        def pack(rows: _Rows, bucket: F32) -> None:
            _copy(rows.in_bucket(bucket), rows.in_share(share))

        def unpack(rows: _Rows, bucket: F32) -> None:
            _copy(rows.in_tensors(memory), rows.in_bucket(bucket))

        def keep(rows: _Rows) -> None:
            _copy(rows.in_tensors(memory), rows.in_share(share))

        self._run(self._to_holders, tensors, pack, unpack, keep)

    def _run(
        self,
        moves: _Moves,
        tensors: Sequence[torch.Tensor],
        pack: Callable[[_Rows, F32], None],
        unpack: Callable[[_Rows, F32], None],
        keep: Callable[[_Rows], None],
    ) -> None:
        """One exchange. The work on the devices' side streams is waited for before a bucket is sent or written again,
        and at the end.
        """
        last = moves.n_rounds - 1
        with torch.no_grad(), self._beside(tensors) as settle:
            if moves.n_rounds:
                sent, received = self._both_buckets(pinned=bool(self._sides))
                pack(moves.sent[0], sent[0].numpy())
                settle()
                message = self._begin(moves, 0, sent[0], received[0])
            for number, kept in enumerate(moves.kept):
                now, other = number % 2, (number + 1) % 2
                if number < last:
                    pack(moves.sent[number + 1], sent[other].numpy())
                keep(kept)
                settle()
                if number <= last:
                    self._end(message)
                    if number < last:
                        message = self._begin(moves, number + 1, sent[other], received[other])
                    unpack(moves.received[number], received[now].numpy())
            settle()

    def _begin(self, moves: _Moves, number: int, sent: torch.Tensor, received: torch.Tensor) -> dist.Work:
        to_each, from_each = moves.elems_sent[number], moves.elems_received[number]
        if self._group is None:
            raise FatalError("this rank has closed its connections to the other ranks of its cluster")
        with _saying_who_failed():
            return self._group.alltoall_base(
                received[: sum(from_each)], sent[: sum(to_each)], from_each, to_each, dist.AllToAllOptions()
            )

    def _end(self, message: dist.Work) -> None:
        with _saying_who_failed():
            message.wait()

    def _memory(self, tensors: Sequence[torch.Tensor]) -> list[Memory]:
        """Each piece's memory, of one dimension at least."""
        memory: list[Memory] = []
        for name, piece, tensor in zip(self._names, self._pieces, tensors, strict=True):
            if tuple(tensor.shape) != piece.sizes:
                raise LocalProtocolError(
                    f"this rank's part of tensor {name!r} has shape {list(tensor.shape)}, and had {list(piece.sizes)} "
                    "when the loop was entered"
                )
            tensor = tensor.detach() if tensor.ndim else tensor.detach().view(1)
            is_plain = tensor.device.type == "cpu" and tensor.dtype is torch.float32
            memory.append(tensor.numpy() if is_plain else tensor)
        return memory

    def _share(self, flat: F32) -> F32:
        if flat.shape != (self._n_elems,) or flat.dtype != np.float32 or not flat.flags.c_contiguous:
            raise LocalProtocolError(f"a share's vector has {self._n_elems} float32 elements, this one {flat.size}")
        return flat

    @contextmanager
    def _beside(self, tensors: Sequence[torch.Tensor]) -> Iterator[Callable[[], None]]:
        """Copies to and from CUDA devices are on streams of their own within, after the work that was given to the
        current ones. Yields what waits for them.
        """
        sides: list[torch.cuda.Stream] = []
        with ExitStack() as stack:
            for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
                if device not in self._sides:
                    self._sides[device] = torch.cuda.Stream(device)
                sides.append(self._sides[device])
                sides[-1].wait_stream(torch.cuda.current_stream(device))
                stack.enter_context(torch.cuda.stream(sides[-1]))

            def settle() -> None:
                for side in sides:
                    side.synchronize()

            yield settle

    def _both_buckets(self, *, pinned: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Two buckets to send and two to receive, made when first needed. Their content is free between calls."""
        if self._buckets is None:
            both = self._to_owners, self._to_holders
            sizes = max(moves.most_sent for moves in both), max(moves.most_received for moves in both)
            sent, received = (
                [torch.empty(size, dtype=torch.float32, pin_memory=pinned) for _ in range(2)] for size in sizes
            )
            self._buckets = sent, received
        return self._buckets


class _Moves:
    """One rank's part in the exchange of one direction, cut into rounds."""

    def __init__(
        self,
        copies: Copies,
        layout: Layout,
        pieces: Sequence[Piece],
        share: Share,
        rank: int,
        n_ranks: int,
        bucket_elems: int,
    ) -> None:
        """copies: of all ranks, so that each knows how many rounds there are."""
        away = copies.sources != copies.targets
        volumes = np.zeros((n_ranks, n_ranks), np.int64)
        np.add.at(volumes, (copies.sources[away], copies.targets[away]), copies.n_elems[away])
        most = int(max(volumes.sum(axis=0).max(), volumes.sum(axis=1).max()))
        half = bucket_elems // 2  # the other half of a bucket is for the last copy to each rank, which stays whole
        limit = max(1, half // n_ranks)
        self.n_rounds = -(-most // half)
        self.bytes_sent = int(volumes[rank].sum()) * FLOAT32_BYTES
        quotas = -(-volumes // max(1, self.n_rounds))

        def rounds(table: Copies, others: I64, quota: I64) -> tuple[list[_Rows], list[list[int]]]:
            """The rows of each round, as they are in the bucket, and the elements from or for each rank."""
            by_rank = np.argsort(others, kind="stable")
            table, others = table.where(by_rank), others[by_rank]
            ends = np.cumsum(table.n_elems)
            begins = ends - table.n_elems
            first = _starts_of_groups(others)
            stream = begins - np.repeat(begins[first], np.diff(first, append=others.size))  # of the pair of ranks
            number = stream // quota[others]
            order = np.argsort(number, kind="stable")
            table, others, number = table.where(order), others[order], number[order]
            counts = np.zeros((self.n_rounds, n_ranks), np.int64)
            np.add.at(counts, (number, others), table.n_elems)
            rows = _Rows(table, layout, pieces, share)
            edges = np.searchsorted(number, np.arange(self.n_rounds + 1)).tolist()
            return [rows.part(a, b) for a, b in pairwise(edges)], counts.tolist()

        out = _cut(copies.where(away & (copies.sources == rank)), limit)
        self.sent, self.elems_sent = rounds(out, out.targets, quotas[rank])
        back = _cut(copies.where(away & (copies.targets == rank)), limit)
        self.received, self.elems_received = rounds(back, back.sources, quotas[:, rank])
        self.most_sent = max(map(sum, self.elems_sent), default=0)
        self.most_received = max(map(sum, self.elems_received), default=0)
        kept = _cut(copies.where(~away & (copies.sources == rank)), LOCAL_ELEMS)
        n_parts = max(1, self.n_rounds)
        edges = np.searchsorted(np.cumsum(kept.n_elems), np.arange(1, n_parts) * kept.n_elems.sum() // n_parts)
        rows = _Rows(kept, layout, pieces, share)
        cuts = [0, *edges.tolist(), len(kept)]
        self.kept = [rows.part(a, b) for a, b in pairwise(cuts)]


class _Rows:
    """Where copies are at both ends, and in a bucket, in which they follow each other."""

    def __init__(self, copies: Copies, layout: Layout, pieces: Sequence[Piece], share: Share) -> None:
        """pieces, share: of the rank that is at an end; the other end of these copies has no meaning."""
        n_dims = copies.sizes.shape[1]
        shapes = [span.parameter.shape or (1,) for span in layout.spans]
        # Of each tensor in logical order, in elements; 0 for dimensions that it lacks.
        of_shapes = [
            [math.prod(shape[d + 1 :]) for d in range(len(shape))] + [0] * (n_dims - len(shape)) for shape in shapes
        ]
        strides = np.array(of_shapes, np.int64)[copies.parameters]
        corners = np.array([(*piece.starts, *[0] * (n_dims - len(piece.starts))) for piece in pieces], np.int64)
        of_piece = np.minimum(copies.pieces, max(0, len(pieces) - 1))  # another rank's may have a greater number
        corner = corners[of_piece] if pieces else np.zeros_like(copies.starts)
        flat = np.array([span.start_elem for span in layout.spans], np.int64)[copies.parameters]
        flat = flat + (copies.starts * strides).sum(axis=1)
        run = np.searchsorted(share.starts, flat, "right") - 1
        places = flat + np.append(share.places - share.starts, 0)[run]
        at = np.cumsum(copies.n_elems) - copies.n_elems
        self._pieces = copies.pieces
        self._n_dims = np.array([len(shape) for shape in shapes], np.int64)[copies.parameters]
        self._starts, self._sizes = copies.starts - corner, copies.sizes  # starts: in the piece
        self._strides_bytes = strides * FLOAT32_BYTES
        self._places_bytes = places * FLOAT32_BYTES
        self._at_bytes = at * FLOAT32_BYTES

    def part(self, first: int, last: int) -> _Rows:
        """Rows [first, last), in a bucket of their own."""
        part = object.__new__(_Rows)
        for name, column in vars(self).items():
            setattr(part, name, column[first:last])
        part._at_bytes = part._at_bytes - part._at_bytes[:1]
        return part

    def groups(self) -> list[_Rows]:
        """These rows in their order, about GROUP_ELEMS elements each."""
        number = self._at_bytes // (FLOAT32_BYTES * GROUP_ELEMS)
        return [self.part(a, b) for a, b in pairwise([*_starts_of_groups(number).tolist(), number.size])]

    @property
    def first_place(self) -> int:
        """The first element of the share that they reach; there is at least one row."""
        return int(self._places_bytes.min()) // FLOAT32_BYTES

    def in_tensors(self, memory: Sequence[Memory]) -> Iterator[Memory]:
        """The boxes in the pieces' memory."""
        columns = self._pieces, self._n_dims, self._starts, self._sizes
        for piece, n_dims, starts, sizes in zip(*(column.tolist() for column in columns), strict=True):
            box = zip(starts[:n_dims], sizes[:n_dims], strict=True)
            yield memory[piece][tuple(slice(start, start + size) for start, size in box)]

    def in_share(self, flat: F32) -> Iterator[F32]:
        """The boxes in the share's vector, where their rows are as far apart as in the whole tensor."""
        columns = self._n_dims, self._sizes, self._places_bytes, self._strides_bytes
        for n_dims, sizes, place, strides in zip(*(column.tolist() for column in columns), strict=True):
            yield np.ndarray(sizes[:n_dims], np.float32, flat, place, strides[:n_dims])

    def in_bucket(self, bucket: F32) -> Iterator[F32]:
        """The boxes in the bucket, without gaps."""
        columns = self._n_dims, self._sizes, self._at_bytes
        for n_dims, sizes, at in zip(*(column.tolist() for column in columns), strict=True):
            yield np.ndarray(sizes[:n_dims], np.float32, bucket, at)


class _Coming:
    """The progress of copies from devices, made in groups that follow each other on the side streams."""

    def __init__(self, firsts: Sequence[int], waits: Sequence[Sequence[Callable[[], None]]]) -> None:
        """firsts: the first place of each group; about ascending. waits: for a group and those before it, on each
        stream.
        """
        # The first place of this group and of all after it: once that is past, none of them is waited for.
        self._firsts = list(accumulate(reversed(firsts), min))[::-1]
        self._waits = waits

    def wait(self, start_elem: int, stop_elem: int) -> None:
        last = bisect_left(self._firsts, stop_elem) - 1
        for wait in self._waits[last] if last >= 0 else ():
            wait()


def _copy(into: Iterable[Memory], source: Iterable[Memory]) -> None:
    """Copy each box; those on a CUDA device, or in 16 bits, by torch, on the current streams."""
    for one, other in zip(into, source, strict=True):
        if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
            np.copyto(one, other)
        else:
            # Torch copies a box with gaps on the host by way of memory of its own, which must outlive the copy.
            on_host = one if isinstance(one, np.ndarray) else other
            beside_host = isinstance(on_host, np.ndarray) and on_host.flags.c_contiguous
            torch.as_tensor(one).copy_(torch.as_tensor(other), non_blocking=beside_host)


def _check_equal(tables: Iterable[Copies], group: dist.ProcessGroup, n_ranks: int) -> None:
    """Raises ConfigError where a rank has other tables: it would own what another one owns, or wait for ever."""
    digest = xxhash.xxh3_128()
    for table in tables:
        for column in fields(table):
            digest.update(np.ascontiguousarray(getattr(table, column.name)).tobytes())
    mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    said = [torch.empty_like(mine) for _ in range(n_ranks)]
    with _saying_who_failed():
        group.allgather([said], [mine]).wait()
    for rank, theirs in enumerate(said):
        if not torch.equal(theirs, said[0]):
            raise ConfigError(
                f"rank {rank} of this cluster shares the model out among the ranks in another way than rank 0: run the "
                "same version of dips on all of them"
            )


def _cut(copies: Copies, limit: int) -> Copies:
    """The same copies, none of more than `limit` elements: a larger one is cut along its first dimensions."""
    for d in range(copies.sizes.shape[1]):
        sizes, n_elems = copies.sizes[:, d], copies.n_elems
        each = np.where(n_elems > limit, np.maximum(1, limit // (n_elems // sizes)), sizes)
        n_parts = -(-sizes // each)
        rows = np.repeat(np.arange(len(copies)), n_parts)
        offsets = (np.arange(rows.size) - np.repeat(np.cumsum(n_parts) - n_parts, n_parts)) * each[rows]
        copies = copies.where(rows)
        copies.starts[:, d] += offsets
        copies.sizes[:, d] = np.minimum(each[rows], copies.sizes[:, d] - offsets)
    return copies


def _starts_of_groups(ascending: I64) -> I64:
    """Where a new value begins."""
    return np.flatnonzero(np.diff(ascending, prepend=-1))


@contextmanager
def _saying_who_failed() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        _logger.info("gloo: %s", error)  # several lines, in words of its own
        raise FatalError(
            "this rank has lost another rank of its cluster, which ended or left its loop while parameters were "
            "exchanged: its own error says why"
        ) from error


class ShardParameters:
    """The live parameters of one rank among several, as the driver of its share sees them (worker/parameters.py): a
    StreamingStore and a RoundingStore for its share.

    snapshot() and install() are called on all ranks together: what a rank owns and another one holds moves in an
    exchange.
    """

    def __init__(
        self,
        agreed: Agreed,
        shares: Sequence[Share],
        group: dist.ProcessGroup,
        reset_inner_optimizers: Callable[[], None],
    ) -> None:
        """shares: of every rank. group: all ranks, over gloo, for exchanges alone."""
        self._agreed = agreed
        self._exchange = Exchange(agreed.layout, agreed.held, shares, group)
        self._narrow = narrow_runs(_dtypes(agreed.layout, shares[agreed.rank]))
        self._reset_inner_optimizers = reset_inner_optimizers
        self._pinned = any(tensor.device.type == "cuda" for tensor in agreed.tensors())

    def layout(self) -> Layout:
        """The layout of the whole model."""
        return self._agreed.layout

    def close(self) -> None:
        """No exchange follows; other ranks notice."""
        self._exchange.close()

    def empty(self, n_elems: int) -> F32:
        """A vector; for parts of a model on a CUDA device in pinned memory, as other memory is copied more slowly."""
        if not self._pinned:
            return zeros(n_elems)
        pinned: F32 = torch.empty(n_elems, dtype=torch.float32, pin_memory=True).numpy()
        return pinned

    def snapshot(self, into: F32) -> None:
        """Copy what this rank owns of the live parameters, from itself and from others."""
        self._exchange.collect(self._agreed.tensors(), into)

    def begin_snapshot(self, into: F32, sums: ChunkSums | None = None) -> SnapshotReady | None:
        """As snapshot(), but what a rank holds on a CUDA device and owns comes while its caller goes on: the next
        kernel that changes a parameter waits for it on the device. Checksums are left to the sender.
        """
        return self._exchange.begin_collect(self._agreed.tensors(), into)

    def install(self, flat: F32) -> None:
        """Overwrite what this rank holds, from its own share and from others'. Parameters with masters get these
        rounded.
        """
        tensors = self._agreed.tensors()
        self._exchange.spread(flat, tensors)
        with torch.no_grad():
            for master, working in zip(tensors, self._agreed.working_copies(), strict=True):
                if working is not None:
                    working.copy_(master)

    def reset_inner_optimizer(self) -> None:
        self._reset_inner_optimizers()

    def live(self) -> Sequence[F32] | None:
        """None: a share is no list of whole parameters."""
        return None

    @property
    def rounds(self) -> bool:
        return bool(self._narrow)

    def add_rounded_off(self, flat: F32, installed: F32, start_elem: int, stop_elem: int) -> None:
        """Elements [start_elem, stop_elem) of the share's vector."""
        add_rounded_off(self._narrow, flat, installed, start_elem, stop_elem)


def _dtypes(layout: Layout, share: Share) -> Iterator[tuple[torch.dtype, int, int]]:
    """(dtype, start, stop) of each trained tensor's parts of the share's vector, in its order."""
    for span in layout.spans:
        if span.parameter.averaged:
            return
        first = int(np.searchsorted(share.stops, span.start_elem, "right"))
        last = int(np.searchsorted(share.starts, span.stop_elem))
        for run in range(first, last):
            offset = int(share.places[run] - share.starts[run])
            start = max(int(share.starts[run]), span.start_elem)
            stop = min(int(share.stops[run]), span.stop_elem)
            yield DTYPES[span.parameter.dtype], start + offset, stop + offset
