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
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dips.core.clock import Clock
from dips.core.errors import ConfigError
from dips.core.observe.tape import Tape
from dips.core.units import format_bytes
from dips.worker.checkpoint_files import Checkpoint, CheckpointError, CheckpointStore, Manifest, RawTensor
from dips.worker.config import ClientConfig
from dips.worker.parameters import ParameterStore
from dips.worker.state.cluster import ClusterMachine
from dips.worker.state.effects import Delayed, Done, Event, Failed, InstallMode, PushRecord
from dips.worker.state.saved import SavedSession, SavedStateError
from dips.worker.vectors import Vectors

if TYPE_CHECKING:  # these need torch
    from dips.worker.parallel.rank_checkpoints import CheckpointOfRanks
    from dips.worker.parallel.shard_files import SavedShards

_logger = logging.getLogger("dips.worker.checkpoint")

FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 10.0
"""Pause between two tries to write a push's record."""

NEEDS_A_PERSON = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS}
"""No such folder, no permission, read-only: waiting heals none of these, as it does a full disk."""

GIVE_UP_RECORD_S = 900.0
"""Pauses in a row after one of these, until the cluster ends: a file system may be mounted again."""

INNER = "state."
"""Prefix of the names of the inner state's tensors; the flat vectors have none."""

F32 = NDArray[np.float32]


class InnerState(Protocol):
    """The state of a training process besides the flat parameters; worker/torch_state.py is torch's.

    Both methods are called on the training thread, between two steps.
    """

    def capture(self) -> tuple[Any, Mapping[str, RawTensor]]:
        """Copy the state: JSON and tensors, valid until the next capture()."""
        ...

    def restore(self, skeleton: Any, tensors: Mapping[str, RawTensor]) -> None: ...

    def restore_by_names(self, state: Mapping[str, Any], saved: SavedShards) -> None:
        """Likewise, from what is kept by names of the full model (parallel/rank_state.py)."""
        ...


class Checkpoints(Protocol):
    """What the shell of a cluster uses: the checkpoints of its one process, or those of all ranks.

    written_s: when the last one was complete; before the first, since when one could have been; NaN before training.
    on_written: called with the seconds that each took to be written, on any thread; for metrics.
    """

    written_s: float
    on_written: Callable[[float], None] | None

    def resume(self, session: ClusterMachine, label: str | None = None) -> bool: ...

    def take_if_due(self, session: ClusterMachine, cause: str) -> None: ...

    def take_now(self, session: ClusterMachine, cause: str, label: str) -> bool: ...

    def record_push(self, job: int, record: PushRecord) -> None: ...

    def close(self) -> None: ...


class Checkpointing:
    """Handles the directory of checkpoints of a cluster of one process, from start to close."""

    def __init__(
        self,
        directory: Path,
        config: ClientConfig,
        parameters: ParameterStore,
        vectors: Vectors,
        inner: InnerState | None,
        deliver: Callable[[Event], None],
        tape: Tape,
        clock: Clock,
    ) -> None:
        """deliver is called on the recording thread. Raises ConfigError when the directory cannot be used."""
        self._config = config
        self._parameters = parameters
        self._vectors = vectors
        self._inner = inner
        self._tape = tape
        self._clock = clock
        self._store = CheckpointStore(directory, config.checkpoints_kept)
        self._copies = VectorCopies(vectors)
        self._writer = ThreadPoolExecutor(1, "dips-checkpoint")
        self._recorder = PushRecorder(self._store, deliver)
        self._writing: Future[bool] | None = None
        self.written_s = math.nan
        self.on_written: Callable[[float], None] | None = None
        self._due_s = clock.monotonic_s() + config.checkpoint_every_s

    def close(self) -> None:
        """Wait for the write under way, end both threads and unlock the directory."""
        self._recorder.close()
        self._writer.shutdown(wait=True)
        self._store.close()

    # ---- a new process ----

    def resume(self, session: ClusterMachine, label: str | None = None) -> bool:
        """Restore session, parameters and inner state from the newest complete checkpoint. Returns whether there was
        one.

        label: the newest of those that take_now() took under this label. Raises ConfigError when there is none though
        one is required, or when it does not fit.
        """
        checkpoint = self._newest(label)
        where = self._store.directory
        if checkpoint is None:
            if self._config.resume_required:
                raise ConfigError(
                    f"no checkpoint in {where} can be used, and one is required: give the right --checkpoint-dir, or "
                    "--resume in place of --resume-required to start without one"
                )
            _logger.info("no checkpoint in %s%s: starting without one", where, f" for {label}" if label else "")
            return False
        newest, sentence = self._store.newest_push()
        if sentence:
            _logger.warning("%s; the checkpoint alone is used", sentence)
        saved = saved_in(checkpoint, where)
        session.resume(saved, newest)
        if isinstance(checkpoint, Checkpoint):
            put_back(checkpoint, self._parameters, self._vectors, with_residual=session.shared.residual)
            if self._inner is not None:
                tensors = checkpoint.tensors.items()
                named = {name.removeprefix(INNER): tensor for name, tensor in tensors if name.startswith(INNER)}
                self._inner.restore(checkpoint.content.get("state"), named)
        else:
            checkpoint.put_back(self._parameters, self._vectors, self._inner, with_residual=session.shared.residual)
        self._tape.write(
            "resumed", f"{saved.cluster_id}/join", number=checkpoint.number, seq=saved.seq, base=str(saved.base),
            fence=saved.base_fence, incarnation=str(saved.incarnation), pending_tokens=saved.pending.tokens,
            push=str(saved.push.id) if saved.push is not None else None,
        )  # fmt: skip
        _logger.info(
            "resumed from checkpoint %d in %s: version %s and %d steps since", checkpoint.number, where, saved.base,
            saved.pending.steps,
        )  # fmt: skip
        return True

    def _newest(self, label: str | None) -> Checkpoint | CheckpointOfRanks | None:
        """The newest that can be used; a warning about each newer one."""
        for manifest in self._store.manifests(label):
            sentence = manifest
            if isinstance(manifest, Manifest):
                try:
                    if not manifest.is_by_names:
                        return self._store.read(manifest)
                    # Not before it is needed, and not in a process without torch.
                    from dips.worker.parallel.rank_checkpoints import CheckpointOfRanks

                    return CheckpointOfRanks(self._store.directory, manifest)
                except (CheckpointError, MemoryError) as error:
                    sentence = self._store.cannot_be_used(manifest.number, error)
            _logger.warning("%s; trying the one before it", sentence)
        return None

    # ---- between two steps ----

    def take_if_due(self, session: ClusterMachine, cause: str) -> None:
        """Copy everything and give it to the writer, if it is time and the last one is written."""
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
        """Take a checkpoint under a label, and wait until it is durable. Returns whether it is."""
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
        pause_s = self._clock.monotonic_s() - now_s
        return self._writer.submit(self._write, content, tensors, saved, cause, pause_s)

    def _write(
        self, content: Mapping[str, Any], tensors: Mapping[str, RawTensor], saved: SavedSession, cause: str,
        pause_s: float,
    ) -> bool:  # fmt: skip
        began_s = self._clock.monotonic_s()
        try:
            written = self._store.write(content, tensors)
        except OSError as error:
            _logger.warning(
                "no checkpoint could be written to %s: %s; training goes on, and the next one is tried in %g s",
                self._store.directory, error.strerror or error, self._config.checkpoint_every_s,
            )  # fmt: skip
            return False
        except Exception:
            _logger.exception("a checkpoint could not be written")
            return False
        self.written_s = self._clock.monotonic_s()
        write_s = self.written_s - began_s
        if self.on_written is not None:
            self.on_written(write_s)
        self._tape.write(
            "checkpoint", cause, number=written.number, seq=saved.seq, base=str(saved.base), fence=saved.base_fence,
            bytes=written.n_bytes, pause_s=pause_s, write_s=write_s,
        )  # fmt: skip
        _logger.debug("checkpoint %d: %s in %.2f s", written.number, format_bytes(written.n_bytes), write_s)
        return True

    def record_push(self, job: int, record: PushRecord) -> None:
        """As PushRecorder.record()."""
        self._recorder.record(job, record)


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


def put_back(checkpoint: Checkpoint, parameters: ParameterStore, vectors: Vectors, *, with_residual: bool) -> None:
    """Make a checkpoint's vectors those of this process, and its theta live. Raises ConfigError where they are of
    another length."""
    tensors, n_elems = checkpoint.tensors, vectors.n_elems
    at_push = _vector(checkpoint, "theta_at_push", n_elems) if "theta_at_push" in tensors else None
    residual = _vector(checkpoint, "residual", n_elems) if with_residual else None
    installed = _vector(checkpoint, "theta_installed", n_elems) if "theta_installed" in tensors else None
    parameters.install(_vector(checkpoint, "theta", n_elems))
    vectors.restore(_vector(checkpoint, "theta_base", n_elems), at_push, residual, installed)


def _raw(vector: F32) -> RawTensor:
    return RawTensor("F32", vector.shape, vector.view(np.uint8))


def _vector(checkpoint: Checkpoint, name: str, n_elems: int) -> F32:
    """Read one of the flat vectors. Raises ConfigError when it is not of this model."""
    raw = checkpoint.tensors.get(name)
    if raw is None or raw.dtype != "F32" or raw.shape != (n_elems,):
        raise ConfigError(f"checkpoint {checkpoint.number} holds no {name} of {n_elems} elements: remove it")
    return raw.data.view(np.float32)


def saved_in(checkpoint: Checkpoint | CheckpointOfRanks | Manifest, where: Path) -> SavedSession:
    """The session in it. Raises ConfigError for one of another release."""
    try:
        return SavedSession.from_json(checkpoint.content.get("session"))
    except SavedStateError as error:
        raise ConfigError(
            f"checkpoint {checkpoint.number} in {where} is whole, but this release cannot read it ({error}): use the "
            "release that wrote it, or remove it"
        ) from error
