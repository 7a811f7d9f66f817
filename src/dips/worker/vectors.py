"""Keeps a cluster's flat copies of the model, in addition to its live parameters, and computes with them.

Shapes: every vector is float32 of n_elems (the layout's). Memory, in vectors: two while training waits for its push and
pull (theta_base, and the landing place of the pull, which is theta_at_push before if that is sent from a copy), a third
when steps were made meanwhile, one more for the residual of a difference codec (core/net/payloads.py).

Parameters in bfloat16 or float16 hold the installed values only rounded, and that rounding is as large as a
pseudo-gradient. theta_now of such a model is theta_installed + (its parameters - theta_installed rounded): only the
change by steps. theta_installed is theta_base, except after a rebase, where it is a separate vector (one more).

The push vector is read by the data thread while a push is sent, the pull vector written by it while a version is
fetched; everything else is the training thread's alone, which calls every method here.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from dips.core.allocator import zeros
from dips.core.errors import LocalProtocolError
from dips.core.layout import Chunk, Layout, Share, chunks_of
from dips.core.net.payloads import Memory, Places, SharedLock, SnapshotReady, bytes_of, hashing_copy, kernels
from dips.core.observe.tape import Starting
from dips.core.wire import Codec
from dips.worker.checkpoint_files import RawTensor
from dips.worker.parameters import ChunkSums, ParameterStore, RoundingStore, StreamingStore
from dips.worker.state.effects import InstallMode
from dips.worker.state.saved import SavedSession

# ---- live ------------------------------------------------------------------------------------------------------------
#
# Sends a push from the model's own memory, as long as no training changes it.
#
# While the training loop waits for its push, a copy would equal the parameters. freeze() replaces them by a copy before
# training goes on. Frames that the socket has not sent by then may be overwritten: their checksums were taken before,
# so a slave refuses such a chunk and it is sent again, from the copy.


F32 = NDArray[np.float32]


class Live:
    """The parameters, one flat array after the other in layout order. A reader holds `lock`."""

    def __init__(self, parts: Sequence[F32]) -> None:
        self._parts = [bytes_of(part) for part in parts]
        self._starts = list(accumulate((part.nbytes for part in self._parts), initial=0))
        self._memory = Memory(tuple(self._parts))
        self._copy: memoryview | None = None
        self._ended = False
        self.lock = SharedLock()

    def freeze(self, copy: F32) -> None:
        """Read from this equal vector from now on. The parameters may change as soon as this returns."""
        with self.lock.now():
            self._copy, self._memory = bytes_of(copy).data, Memory((bytes_of(copy),))

    def end(self) -> None:
        """Forbid further reads, so that a transfer that was given up sends no half changed bytes."""
        with self.lock.now():
            self._ended = True

    def memory(self) -> Memory:
        """Where the flat vector is now; the caller holds the lock. Raises LocalProtocolError after end()."""
        self._check_not_ended()
        return self._memory

    def bytes_at(self, here: slice) -> memoryview:
        """These bytes of the flat vector; the caller holds the lock. A copy where they span several parts.

        Raises LocalProtocolError after end().
        """
        self._check_not_ended()
        if self._copy is not None:
            return self._copy[here]
        first = bisect_right(self._starts, here.start) - 1
        begin = here.start - self._starts[first]
        if here.stop <= self._starts[first + 1]:
            return self._parts[first].data[begin : begin + here.stop - here.start]
        whole, filled = np.empty(here.stop - here.start, np.uint8), 0
        while filled < whole.size:
            piece = self._parts[first][begin : begin + whole.size - filled]
            whole[filled : filled + piece.size] = piece
            first, begin, filled = first + 1, 0, filled + piece.size
        return whole.data

    def _check_not_ended(self) -> None:
        if self._ended:
            raise LocalProtocolError("the push was given up while it was sent")


# ---- vectors ---------------------------------------------------------------------------------------------------------


PIECE_ELEMS = 1 << 18
"""Size of the pieces of the arithmetic, which stay in the cache between its two operations."""


WORTH_A_LINE_BYTES = 1 << 30


@dataclass
class Copied:
    """theta_at_push in a vector of its own."""

    vector: F32
    ready: SnapshotReady | None = None  # progress of the snapshot that writes it; None: complete
    sums: ChunkSums | None = None  # of its chunks, taken while they were copied

    def whole(self) -> F32:
        """The vector, once all of it is written."""
        if self.ready is not None:
            self.ready.wait(0, self.vector.size)
            self.ready = None
        return self.vector


@dataclass(frozen=True)
class InParameters:
    """theta_at_push in the live parameters alone: keep_push() comes before they change."""

    reader: Live | None = None  # what sends it from there


@dataclass(frozen=True)
class InBase:
    """theta_at_push is theta_base, to the bit."""


class Vectors:
    """theta_base, theta_at_push, the pulled theta, and the residual."""

    def __init__(
        self,
        n_elems: int,
        store: ParameterStore | None = None,
        starting: Callable[[], Starting] | None = None,
        *,
        n_trained: int | None = None,
    ) -> None:
        """store: provides the memory, if it can (StreamingStore), and its rounding is kept out of pushes. starting:
        reports the allocation of a vector of a GiB or more, which takes a while. n_trained: elements before the
        averaged ones; None: there are none of those.
        """
        self._n_elems = n_elems
        self._n_trained = n_elems if n_trained is None else n_trained
        self._starting = starting if 4 * n_elems >= WORTH_A_LINE_BYTES else None
        self._store = store if isinstance(store, StreamingStore) else None
        self._rounding = store if isinstance(store, RoundingStore) and store.rounds else None
        self._installed: F32 | None = None
        self.installs = 0
        """How often theta_installed changed, so that the owner of a copy knows whether it is the newest."""
        self._base: F32 | None = None
        self._at_push: Copied | InParameters | InBase | None = None
        self._pull: F32 | None = None
        self._free: list[F32] = []
        self.residual: F32 | None = None
        """The rounding error of earlier pushes; None: zero."""
        self._residual_room: F32 | None = None
        self.residual_changes = 0
        """How often the residual changed, so that the owner of a copy knows whether it is the newest."""

    # ---- vectors that may be read ----

    @property
    def n_elems(self) -> int:
        """Of each vector."""
        return self._n_elems

    @property
    def base(self) -> F32:
        """theta_base; of any content before the first install() or restore()."""
        if self._base is None:
            self._base = self._take()
        return self._base

    @property
    def push(self) -> F32:
        """theta_at_push, whole, while it is not in the live parameters alone."""
        if isinstance(self._at_push, InBase):
            return self.base
        assert isinstance(self._at_push, Copied), "theta_at_push is asked for while there is one"
        return self._at_push.whole()

    @property
    def pull(self) -> F32:
        """The vector in which the pulled version lands, or has landed."""
        return self.landing()

    @property
    def push_is_live(self) -> bool:
        """Whether theta_at_push is in the live parameters alone, so that keep_push() comes before they change."""
        return isinstance(self._at_push, InParameters)

    @property
    def installed(self) -> F32 | None:
        """theta_installed, where it is a separate vector."""
        return None if self._installed is self._base else self._installed

    def empty(self) -> F32:
        """A further vector in memory of the same kind."""
        starting = self._starting() if self._starting is not None else None
        if starting is not None:
            starting.touched(0, 4 * self._n_elems)
        vector = self._store.empty(self._n_elems) if self._store is not None else zeros(self._n_elems)
        if starting is not None:
            starting.end()
        return vector

    # ---- the push ----

    def snapshot(
        self, parameters: ParameterStore, *, may_stay_live: bool = False, chunk_bytes: int | None = None
    ) -> None:
        """theta_at_push = theta_now. No transfer may be under way: it could still write to the vector used here.

        may_stay_live: training will wait, so no copy is made if the push can be sent from the parameters; whoever sends
        them takes the checksums, as reading memory twice costs less than writing it. chunk_bytes: take the checksums of
        chunks of this size while copying; None: of none, as differences will be sent.
        """
        self._end_push()
        if self._pull is not None:  # a pull that was given up
            self._free.append(self._pull)
            self._pull = None
        parts = parameters.live() if may_stay_live and isinstance(parameters, StreamingStore) else None
        self._at_push = self._copied(parameters, chunk_bytes) if parts is None else InParameters(Live(parts))

    def copy_base(self) -> None:
        """theta_at_push = theta_base, to the bit, which nothing overwrites before a pull is installed."""
        self._end_push()
        self._at_push = InBase()

    def sending(self) -> tuple[F32 | Live, SnapshotReady | None]:
        """The source of a push, and the progress of its snapshot (None: complete)."""
        match self._at_push:
            case Copied(vector, ready):
                return vector, ready
            case InParameters(Live() as reader):
                return reader, None
        return self.push, None

    def push_is_zero(self) -> bool:
        """Whether every trained element of theta_at_push is 0; nearly always its first piece says no."""
        return self._push_equals(None)

    def push_is_base(self) -> bool:
        """Whether theta_at_push is theta_base in every trained element: no step has changed anything."""
        return self._base is not None and self._push_equals(self._base)

    def _push_equals(self, other: F32 | None) -> bool:
        """other: None: zeros. For the thread that changes the parameters."""
        source, ready = self.sending()
        for start in range(0, self._n_trained, PIECE_ELEMS):
            stop = min(start + PIECE_ELEMS, self._n_trained)
            if ready is not None:
                ready.wait(start, stop)
            if isinstance(source, Live):
                piece = np.frombuffer(source.bytes_at(slice(4 * start, 4 * stop)), np.float32)
            else:
                piece = source[start:stop]
            if piece.any() if other is None else not np.array_equal(piece, other[start:stop]):
                return False
        return True

    def checksums(self) -> dict[Chunk, int]:
        """Those of theta_at_push's chunks that were taken while it was copied, chunks of the size that was given."""
        sums = self._at_push.sums if isinstance(self._at_push, Copied) else None
        return {} if sums is None else sums.by_chunk()

    def keep_push(self, parameters: ParameterStore) -> None:
        """Training goes on: if theta_at_push is only in the live parameters, copy it to a vector now."""
        if isinstance(self._at_push, InParameters):
            reader, copied = self._at_push.reader, self._copied(parameters)
            if reader is not None:
                reader.freeze(copied.whole())
            self._at_push = copied

    def forget_push(self) -> None:
        """The parameters will change: forget theta_at_push if it is in them; nothing will be computed from it."""
        if isinstance(self._at_push, InParameters):
            self._end_push()

    def restore(self, base: F32, push: F32 | None, residual: F32 | None = None, installed: F32 | None = None) -> None:
        """Restore a checkpoint's vectors; push None: theta_at_push is not needed. installed None: it was theta_base."""
        np.copyto(self.base, base)
        if self._rounding is not None:
            self._installed = self.base
            if installed is not None:
                self._installed = self._take()
                np.copyto(self._installed, installed)
            self.installs += 1
        if push is not None:
            self._end_push()
            self._at_push = Copied(self._take())
            np.copyto(self._at_push.vector, push)
        if residual is not None:
            self.residual = self._room_of_residual()
            np.copyto(self.residual, residual)

    # ---- the pull ----

    def landing(self, *, push_is_live: bool = False, push_is_needed: bool = True) -> F32:
        """The vector in which the next version lands. A pull that is asked for again lands in the same one.

        push_is_live: the parameters still equal theta_at_push; then its vector need not be kept until training goes on,
        before which keep_push() must be called. push_is_needed: theta_at_push is still needed for a computation.
        """
        if self._pull is None:
            if isinstance(self._at_push, Copied) and (push_is_live or not push_is_needed):
                self._end_push()  # its vector is the next that is taken
            if self._at_push is None and push_is_live and push_is_needed:
                self._at_push = InParameters()
            self._pull = self._take()
        return self._pull

    def install(self, parameters: ParameterStore, mode: InstallMode, share: float = 1.0) -> None:
        """Make the pulled theta live (REPLACE: to the bit) and remember it as theta_base.

        share: how much of the steps' change a rebase keeps. Steps that began before the pulled version was known were
        made from other parameters, where their gradients do not quite fit (docs/convergence.md)."""
        self.forget_push()
        pulled, old_base, own = self.pull, self._base, self.installed
        installed = pulled
        if mode is InstallMode.REPLACE:
            parameters.install(pulled)
        else:
            if mode is InstallMode.REBASE_FROM_PUSH:
                then = self.push
                # theta_base is no longer needed, unless theta_now is computed from it.
                room = self.base if self._installed is not self.base else self._take()
            else:
                then = self.base
                self._end_push()
                room = self._take()
            self._rebase(parameters, pulled, then, room, np.float32(share))
            installed = room
        self._end_push()
        self._base, held = pulled, (old_base, own, installed)
        self._pull = None
        if self._rounding is not None:
            self._installed = installed
            self.installs += 1
        freed = {id(vector): vector for vector in held if vector is not None}
        for kept in (self._base, self._installed):
            freed.pop(id(kept), None)
        self._free += freed.values()
        if mode is InstallMode.REPLACE:
            del self._free[1:]  # no steps were made during this pull, so two vectors are enough

    # ---- the residual ----

    def keep_residual(self, wire: Codec, spans: Iterable[tuple[int, int]]) -> None:
        """residual = (push - base + residual) - the differences sent; `spans`: chunk_spans() of the push."""
        assert wire.is_difference, "float32 loses nothing"
        now, base, residual, keep = self.push, self.base, self._room_of_residual(), kernels().keep_residual
        if self.residual is None:
            residual.fill(0)
        for start, stop in spans:
            keep(wire, now[start:stop], base[start:stop], residual[start:stop])
        self.residual = residual
        self.residual_changes += 1

    def clear_residual(self) -> None:
        """Set the residual to zero: the steps that it comes from no longer count."""
        self.residual = None
        self.residual_changes += 1

    # ---- parts ----

    def _take(self) -> F32:
        if self._free:
            return self._free.pop()
        return self.empty()

    def _room_of_residual(self) -> F32:
        if self._residual_room is None:
            self._residual_room = self._take()
        return self._residual_room

    def _copied(self, parameters: ParameterStore, chunk_bytes: int | None = None) -> Copied:
        """Copy theta_now to a vector, or begin to."""
        copied = Copied(vector := self._take())
        if isinstance(parameters, StreamingStore):
            # Where rounding is removed from the copy later, its bytes are not yet those that are sent.
            if chunk_bytes is not None and self._rounding is None:
                copy = hashing_copy(vector.nbytes)
                if copy is not None:
                    copied.sums = ChunkSums(parameters.layout(), chunk_bytes, vector, copy)
            copied.ready = parameters.begin_snapshot(vector, copied.sums)
        else:
            parameters.snapshot(vector)
        if self._rounding is not None and self._installed is not None:
            copied.ready = _Exact(self._rounding, copied.ready, vector, self._installed)
        return copied

    def _end_push(self) -> None:
        """Nothing is sent or computed from theta_at_push any longer: its vector is free."""
        match self._at_push:
            case Copied() as copied:
                self._free.append(copied.whole())
            case InParameters(Live() as reader):
                reader.end()
        self._at_push = None

    def _rebase(self, parameters: ParameterStore, pulled: F32, then: F32, room: F32, share: np.float32) -> None:
        """theta_now = pulled + share (theta_now - then), computed in `room`.

        Averaged buffers become the pulled ones: a statistic moves towards its target, so that its past change must not
        be added to another value (a variance could become negative), and a few steps renew it.
        """
        parameters.snapshot(room)
        room[self._n_trained :] = pulled[self._n_trained :]
        for start in range(0, self._n_trained, PIECE_ELEMS):
            here = slice(start, min(start + PIECE_ELEMS, self._n_trained))
            if self._rounding is not None and self._installed is not None:
                self._rounding.add_rounded_off(room, self._installed, here.start, here.stop)
            np.subtract(room[here], then[here], out=room[here])
            if share != 1:
                np.multiply(room[here], share, out=room[here])
            np.add(pulled[here], room[here], out=room[here])
        parameters.install(room)


class _Exact:
    """Removes the rounding from a snapshot, each piece when it is first needed: by the data thread, which sends it
    while other pieces are still copied, or by a computation.
    """

    def __init__(self, store: RoundingStore, copied: SnapshotReady | None, flat: F32, installed: F32) -> None:
        """copied: progress of the snapshot in `flat`; None: complete. installed: must not change before the end."""
        self._store = store
        self._copied = copied
        self._flat = flat
        self._installed = installed
        self._is_exact = [False] * -(-flat.size // PIECE_ELEMS)
        self._lock = threading.Lock()

    def wait(self, start_elem: int, stop_elem: int) -> None:
        for piece in range(start_elem // PIECE_ELEMS, -(-stop_elem // PIECE_ELEMS)):
            start, stop = piece * PIECE_ELEMS, min((piece + 1) * PIECE_ELEMS, self._flat.size)
            with self._lock:
                if self._is_exact[piece]:
                    continue
                if self._copied is not None:
                    self._copied.wait(start, stop)
                self._store.add_rounded_off(self._flat, self._installed, start, stop)
                self._is_exact[piece] = True


class VectorCopies:
    """Copies of the flat vectors, made on the training thread for the writer, each only when it has changed.

    theta_base changes with the base, theta_at_push with the number of the push; both are in the saved session. The
    residual of a difference codec is part of a checkpoint while there is one, and so is theta_installed.
    """

    def __init__(self, vectors: Vectors) -> None:
        self._vectors = vectors
        self._copies: dict[str, tuple[object, F32]] = {}

    def take(self, parameters: ParameterStore, saved: SavedSession) -> dict[str, RawTensor]:
        theta = self._copy_of("theta")
        parameters.snapshot(theta)
        tensors = {"theta": _raw(theta), "theta_base": _raw(self._of("theta_base", self._vectors.base, saved.base))}
        rebases = saved.pull is not None and saved.pull.mode is InstallMode.REBASE_FROM_PUSH
        if saved.push is not None or rebases:
            tensors["theta_at_push"] = _raw(self._of("theta_at_push", self._vectors.push, saved.seq))
        installed = self._vectors.installed
        if installed is not None:
            tensors["theta_installed"] = _raw(self._of("theta_installed", installed, self._vectors.installs))
        residual = self._vectors.residual if saved.residual else None
        if residual is not None:
            tensors["residual"] = _raw(self._of("residual", residual, self._vectors.residual_changes))
        return tensors

    def _copy_of(self, name: str) -> F32:
        if name not in self._copies:
            self._copies[name] = (None, self._vectors.empty())
        return self._copies[name][1]

    def _of(self, name: str, vector: F32, content: object) -> F32:
        copy = self._copy_of(name)
        if self._copies[name][0] != content:
            np.copyto(copy, vector)
            self._copies[name] = (content, copy)
        return copy


def _raw(vector: F32) -> RawTensor:
    return RawTensor("F32", vector.shape, vector.view(np.uint8))


def chunk_spans(layout: Layout, chunk_bytes: int, share: Share | None = None) -> list[tuple[int, int]]:
    """First and last-plus-one element of every chunk in the flat vector, or in the share's own one."""
    places = Places(layout, share)
    chunks = chunks_of(layout.blocks, chunk_bytes) if share is None else share.chunks(layout, chunk_bytes)
    elems = map(places.elems_at, chunks)
    return [(here.start, here.stop) for here in elems]
