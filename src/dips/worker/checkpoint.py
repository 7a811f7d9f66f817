"""Takes a cluster's checkpoints, writes them in the background, and resumes from them (docs/storage.md).

A checkpoint is a cut at a step boundary: the training thread copies everything into memory that is reused, and goes on;
one background thread writes the copy while training and communication go on. Another one makes the record of each push
durable, so that it never waits for a large file. Touches live parameters only on the training thread, and never ends
training because a disk is full.
"""

from __future__ import annotations

import errno
import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dips.core.clock import Clock
from dips.core.errors import ConfigError, option
from dips.core.layout import Share
from dips.core.observe.tape import Tape
from dips.core.units import format_bytes
from dips.worker.checkpoint_files import INNER, CheckpointError, CheckpointStore, Manifest, RawTensor
from dips.worker.config import ClientConfig
from dips.worker.parameters import ParameterStore
from dips.worker.state.cluster import ClusterMachine
from dips.worker.state.effects import Delayed, Done, Event, Failed, PushRecord
from dips.worker.state.saved import SavedSession, SavedStateError
from dips.worker.vectors import VectorCopies, Vectors

if TYPE_CHECKING:  # these need torch
    from dips.worker.parallel.shard_files import FoundCheckpoint, SavedShards

_logger = logging.getLogger("dips.worker.checkpoint")

FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 10.0
"""Pause between two tries to write a push's record."""

NEEDS_A_PERSON = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS}
"""No such folder, no permission, read-only: waiting heals none of these, as it does a full disk."""

GIVE_UP_RECORD_S = 900.0
"""Pauses in a row after one of these, until the cluster ends: a file system may be mounted again."""

F32 = NDArray[np.float32]


class InnerState(Protocol):
    """The state of a training process besides the flat parameters; parallel/rank_state.TorchState is torch's.

    Both methods are called on the training thread, between two steps.
    """

    def capture(self) -> tuple[Any, Mapping[str, RawTensor]]:
        """Copy the state: JSON and tensors, valid until the next capture()."""
        ...

    def restore(self, state: Any, saved: SavedShards) -> None:
        """Take back what capture() has returned; saved: its tensors. Raises ConfigError where it does not fit."""
        ...


@dataclass(frozen=True)
class Begun:
    """A checkpoint of which everything is copied. pause_s: for which training stopped."""

    saved: SavedSession
    cause: str
    label: str | None
    began_s: float
    pause_s: float
    number: int = 0  # of several ranks, which write into a folder that has it


class Checkpoints(ABC):
    """A cluster's checkpoints: when one is due, which one to go on from, and the records of its pushes.

    Subclasses write and read them: one process its own, the leader of several ranks those of all.
    """

    def __init__(self, store: CheckpointStore, config: ClientConfig, clock: Clock) -> None:
        self._store = store
        self._config = config
        self._clock = clock
        self._recorder: PushRecorder | None = None
        self._tape: Tape | None = None
        self._due_s = clock.monotonic_s() + config.checkpoint_every_s
        self.written_s = math.nan
        """When the last one was complete; before the first, since when one could have been; NaN before training."""
        self.on_written: Callable[[float], None] | None = None
        """Called with the seconds that each took to be written, on any thread; for metrics."""

    def begin(self, deliver: Callable[[Event], None], tape: Tape) -> None:
        """Before anything else. deliver: called on the recording thread with the ends of records."""
        self._recorder, self._tape = PushRecorder(self._store, deliver), tape

    def close(self) -> None:
        """End the threads and unlock the directory."""
        if self._recorder is not None:
            self._recorder.close()
        self._store.close()

    def record_push(self, job: int, record: PushRecord) -> None:
        """As PushRecorder.record()."""
        assert self._recorder is not None, "begin() comes first"
        self._recorder.record(job, record)

    @abstractmethod
    def take_if_due(self, session: ClusterMachine, cause: str) -> None:
        """Between two steps: take a checkpoint if it is time and the last one is written, without waiting for a
        disk."""

    @abstractmethod
    def take_now(self, session: ClusterMachine, cause: str, label: str) -> bool:
        """Take a checkpoint under a label, and wait until it is durable. Returns whether it is."""

    def resume(self, session: ClusterMachine, label: str | None = None) -> bool:
        """Restore session, parameters and training state from the newest checkpoint that can be used. Returns whether
        there was one.

        label: the newest of those that take_now() took under this label. Raises ConfigError when there is none though
        one is required, or when it does not fit.
        """
        where, found = self._store.directory, self._newest(label)
        if found is None:
            if self._config.resume_required:
                raise ConfigError(
                    f"no checkpoint in {where} can be used, and one is required: give the right "
                    f"{option('checkpoint_dir')}, or {option('resume')} and not resume_required, to start without one"
                )
            _logger.info("no checkpoint in %s%s: starting without one", where, f" for {label}" if label else "")
            return False
        newest, sentence = self._store.newest_push()
        if sentence:
            _logger.warning("%s; the checkpoint alone is used", sentence)
        saved = _saved_in(found, where)
        session.resume(saved, newest)
        self._put_back(found, with_residual=session.shared.residual)
        self._write_tape(
            "resumed", f"{saved.cluster_id}/join", number=found.number, seq=saved.seq, base=str(saved.base),
            fence=saved.base_fence, incarnation=str(saved.incarnation), pending_tokens=saved.pending.tokens,
            push=str(saved.push.id) if saved.push is not None else None,
        )  # fmt: skip
        n_ranks = len(found.files_of_ranks or [1])
        _logger.info(
            "resumed from checkpoint %d in %s, which %s written: version %s and %d steps since", found.number, where,
            "one process has" if n_ranks == 1 else f"{n_ranks} ranks have", saved.base, saved.pending.steps,
        )  # fmt: skip
        return True

    def _newest(self, label: str | None) -> Manifest | None:
        """The newest that can be used; a warning about each newer one."""
        for manifest in self._store.manifests(label):
            sentence = manifest
            if isinstance(manifest, Manifest):
                problem = self._find(manifest)
                if not problem:
                    return manifest
                sentence = self._store.cannot_be_used(manifest.number, problem)
            _logger.warning("%s; trying the one before it", sentence)
        return None

    @abstractmethod
    def _find(self, manifest: Manifest) -> str:
        """Look whether a checkpoint can be used, and compare every byte of it. Returns what is wrong."""

    @abstractmethod
    def _put_back(self, found: Manifest, *, with_residual: bool) -> None:
        """Make what _find() has found the state of this cluster. Raises ConfigError where it does not fit."""

    def _note_written(self, begun: Begun, number: int, n_bytes: int, pause_s: float) -> None:
        self.written_s = self._clock.monotonic_s()
        write_s = self.written_s - begun.began_s
        if self.on_written is not None:
            self.on_written(write_s)
        saved = begun.saved
        self._write_tape(
            "checkpoint", begun.cause, number=number, seq=saved.seq, base=str(saved.base), fence=saved.base_fence,
            bytes=n_bytes, pause_s=pause_s, write_s=write_s,
        )  # fmt: skip
        _logger.debug("checkpoint %d: %s in %.2f s", number, format_bytes(n_bytes), write_s)

    def _warn(self, problem: str) -> None:
        _logger.warning(
            "no checkpoint could be written to %s: %s; training goes on, and the next one is tried in %g s",
            self._store.directory, problem, self._config.checkpoint_every_s,
        )  # fmt: skip

    def _write_tape(self, event: str, cause: str, **values: Any) -> None:
        assert self._tape is not None, "begin() comes first"
        self._tape.write(event, cause, **values)


class Checkpointing(Checkpoints):
    """The checkpoints of a cluster of one process."""

    def __init__(
        self, config: ClientConfig, store: CheckpointStore, parameters: ParameterStore, vectors: Vectors,
        inner: InnerState | None, clock: Clock,
    ) -> None:  # fmt: skip
        super().__init__(store, config, clock)
        self._parameters = parameters
        self._vectors = vectors
        self._inner = inner
        self._copies = VectorCopies(vectors)
        self._writer = ThreadPoolExecutor(1, "dips-checkpoint")
        self._writing: Future[bool] | None = None
        self._found: FoundCheckpoint | None = None

    def close(self) -> None:
        """Likewise; waits for the write under way."""
        self._writer.shutdown(wait=True)
        super().close()

    def _find(self, manifest: Manifest) -> str:
        from dips.worker.parallel.shard_files import FoundCheckpoint  # not before it is needed: it imports torch

        try:
            self._found = FoundCheckpoint(self._store.directory, manifest)
        except (CheckpointError, MemoryError) as error:
            return str(error) or "it does not fit into memory"
        return ""

    def _put_back(self, found: Manifest, *, with_residual: bool) -> None:
        checkpoint, self._found = self._found, None
        assert checkpoint is not None, "it was found"
        restore, n_elems = None if self._inner is None else self._inner.restore, self._vectors.n_elems
        all_of_it = Share.of_runs([(0, n_elems)])
        checkpoint.put_back(
            self._parameters, self._vectors, all_of_it, n_elems, restore, with_residual=with_residual
        )  # fmt: skip

    def take_if_due(self, session: ClusterMachine, cause: str) -> None:
        now_s = self._clock.monotonic_s()
        if math.isnan(self.written_s):
            self.written_s = now_s
        if now_s < self._due_s or (self._writing is not None and not self._writing.done()):
            return
        saved = session.saved()
        if saved is not None:
            self._due_s = now_s + self._config.checkpoint_every_s
            self._writing = self._take(saved, cause, None)

    def take_now(self, session: ClusterMachine, cause: str, label: str) -> bool:
        saved = session.saved()
        if saved is None:
            return False
        if self._writing is not None:
            self._writing.result()  # the writer reads the memory that is copied into here
        self._writing = self._take(saved, cause, label)
        return self._writing.result()

    def _take(self, saved: SavedSession, cause: str, label: str | None) -> Future[bool]:
        now_s = self._clock.monotonic_s()
        tensors = self._copies.take(self._parameters, saved)
        content: dict[str, Any] = {"session": saved.to_json(), "state": None, "label": label, "n_ranks": 1}
        if self._inner is not None:
            content["state"], inner = self._inner.capture()
            tensors.update({INNER + name: tensor for name, tensor in inner.items()})
        copied_s = self._clock.monotonic_s()
        return self._writer.submit(
            self._write, content, tensors, Begun(saved, cause, label, copied_s, copied_s - now_s)
        )

    def _write(self, content: Mapping[str, Any], tensors: Mapping[str, RawTensor], begun: Begun) -> bool:
        try:
            written = self._store.write(content, tensors)
        except OSError as error:
            self._warn(error.strerror or str(error))
            return False
        except Exception:
            _logger.exception("a checkpoint could not be written")
            return False
        self._note_written(begun, written.number, written.stamp.n_bytes, begun.pause_s)
        return True


class PushRecorder:
    """Makes the record of each push durable on a thread of its own, so that it never waits for a large file."""

    def __init__(self, store: CheckpointStore, deliver: Callable[[Event], None]) -> None:
        """deliver is called on the recording thread."""
        self._store = store
        self._deliver = deliver
        self._closed = threading.Event()
        self._wanted: PushRecord | None = None
        self._waiting: SimpleQueue[tuple[int, PushRecord] | None] = SimpleQueue()
        # A daemon: where a training loop fails and nothing calls close(), the interpreter would wait for an executor's
        # thread, and so for ever while the disk refuses.
        self._thread = threading.Thread(target=self._run, name="dips-push-record", daemon=True)
        self._thread.start()

    def record(self, job: int, record: PushRecord) -> None:
        """Make the record durable, then deliver Done; a newer record replaces one that waits. Failed is delivered where
        the directory is gone or refuses to be written for GIVE_UP_RECORD_S; a full or broken disk is never given up.
        """
        self._wanted = record
        if not self._closed.is_set():
            self._waiting.put((job, record))

    def close(self) -> None:
        self._closed.set()
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            self._record(*waiting)

    def _record(self, job: int, record: PushRecord) -> None:
        pause_s, refused_s = FIRST_PAUSE_S, 0.0
        while self._wanted == record and not self._closed.is_set():
            try:
                self._store.record_push(record)
            except OSError as error:
                sentence = f"{self._store.directory} cannot be written: {error.strerror or error}"
                refused_s = refused_s + pause_s if error.errno in NEEDS_A_PERSON else 0.0
                if refused_s > GIVE_UP_RECORD_S:
                    self._deliver(Failed(job, sentence))
                    return
                self._deliver(Delayed(job, sentence))
                self._closed.wait(pause_s)
                pause_s = min(MAX_PAUSE_S, 2 * pause_s)
            else:
                self._deliver(Done(job))
                return


def _saved_in(checkpoint: Manifest, where: Path) -> SavedSession:
    """The session in it. Raises ConfigError for one of another release."""
    try:
        return SavedSession.from_json(checkpoint.content.get("session"))
    except SavedStateError as error:
        raise ConfigError(
            f"checkpoint {checkpoint.number} in {where} is whole, but this release cannot read it ({error}): use the "
            "release that wrote it, or remove it"
        ) from error
