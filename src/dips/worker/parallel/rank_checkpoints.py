"""Checkpoints of a cluster of several ranks: all of them write one, each its part, into a folder that all can see.

A cut at a step boundary, as in one process (worker/checkpoint.py): every rank copies its share of the flat vectors and
its part of the training state, and writes the copy on a thread of its own while training goes on. Once all have
written, which the leader hears when they meet, it writes the manifest: only that makes it a checkpoint. Flat vectors
are one global tensor each, of which a rank's share are boxes (parallel/shard_files.py), so that ranks of another
number, cut or chunk size go on from it, and so does one process; and ranks from what one process wrote by names.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from dips.core.clock import Clock
from dips.core.errors import ConfigError
from dips.core.observe.tape import Tape
from dips.core.share import Share
from dips.core.units import format_bytes
from dips.worker.checkpoint import INNER, InnerState, PushRecorder, VectorCopies, saved_in
from dips.worker.checkpoint_files import (
    CheckpointError,
    CheckpointStore,
    Manifest,
    file_of_one,
    folder_of_ranks,
    fsync_directory,
    read_manifest,
)
from dips.worker.config import ClientConfig
from dips.worker.model_part import ModelPart
from dips.worker.parallel.agreement import Gathering
from dips.worker.parallel.held import Box
from dips.worker.parallel.rank_state import RankState, merged
from dips.worker.parallel.shard_files import SavedShards, Shard, ShardFile, write_metadata, write_shards
from dips.worker.parameters import ParameterStore
from dips.worker.state.cluster import ClusterMachine
from dips.worker.state.effects import Event, PushRecord
from dips.worker.state.saved import SavedSession
from dips.worker.vectors import Vectors

_logger = logging.getLogger("dips.worker.checkpoint")

F32 = NDArray[np.float32]

_VECTOR = "vectors."
"""Prefix of the names of the flat vectors."""


UNSHARED_CHUNK_BYTES = 1 << 20
"""By which ranks share the model out until the master says otherwise, where one process had all of it."""


@dataclass(frozen=True)
class Written:
    """What one rank has written; error: why it has not, and whether a person must remove the reason."""

    file: dict[str, Any] | None = None
    state: dict[str, Any] | None = None
    error: str = ""
    is_final: bool = False

    def to_json(self) -> bytes:
        return json.dumps(vars(self)).encode()


# ---- the vectors -----------------------------------------------------------------------------------------------------


def boxes_of(name: str, vector: F32, share: Share, n_elems: int) -> list[Shard]:
    """A share's vector as boxes of the whole one, of n_elems elements."""
    whole = torch.from_numpy(vector)
    return [
        Shard(_VECTOR + name, (n_elems,), Box((start,), (stop - start,)), whole[place : place + stop - start])
        for (start, stop), place in zip(share.runs(), share.places.tolist(), strict=True)
    ]


def _read_vector(saved: SavedShards, name: str, share: Share, n_elems: int) -> F32 | None:
    """None: the checkpoint has no such vector. Raises CheckpointError where it is of another model."""
    if _VECTOR + name not in saved:
        return None
    vector = np.zeros(share.n_elems, np.float32)
    saved.read(boxes_of(name, vector, share, n_elems))
    return vector


def restore_vectors(vectors: Vectors, saved: SavedShards, share: Share, n_elems: int, *, with_residual: bool) -> None:
    """Make a checkpoint's vectors those of this process. Raises CheckpointError for what cannot be read."""
    base = _read_vector(saved, "theta_base", share, n_elems)
    if base is None:
        raise CheckpointError("it does not hold theta_base")
    residual = _read_vector(saved, "residual", share, n_elems) if with_residual else None
    at_push, installed = _read_vector(saved, "theta_at_push", share, n_elems), None
    if _VECTOR + "theta_installed" in saved:
        # Ranks that own no parameter in fewer bits have not written theirs, and nothing reads those elements.
        installed = base.copy()
        saved.read(boxes_of("theta_installed", installed, share, n_elems), partly=True)
    vectors.restore(base, at_push, residual, installed)


def install_parameters(parameters: ParameterStore, saved: SavedShards, share: Share, n_elems: int) -> None:
    """Make a checkpoint's parameters live, on all ranks together. Raises CheckpointError for what cannot be read."""
    theta = _read_vector(saved, "theta", share, n_elems)
    if theta is None:
        raise CheckpointError("it does not hold theta")
    parameters.install(theta)


def shards_of(directory: Path, manifest: Manifest) -> SavedShards:
    """What ranks, or one process, have written by names of the full model. Raises CheckpointError for all else."""
    files, number = manifest.files_of_ranks, manifest.number
    if not manifest.is_by_names:
        raise CheckpointError(
            "one process has written it, with a release or an optimizer that keeps its state without names of "
            "parameters: resume with one process"
        )
    if files is None:
        file = ShardFile.of_one_process(file_of_one(directory, number), manifest.stamp, _name_of)
        return SavedShards(directory, [file])
    return SavedShards(folder_of_ranks(directory, manifest.number), [ShardFile.from_json(raw) for raw in files])


def _name_of(in_file: str) -> str:
    return in_file.removeprefix(INNER) if in_file.startswith(INNER) else _VECTOR + in_file


def _refusal(number: int, directory: Path, error: CheckpointError) -> ConfigError:
    return ConfigError(f"checkpoint {number} in {directory} does not fit this cluster ({error}): remove it")


class CheckpointOfRanks:
    """What is kept by names of the full model, as a cluster of one process goes on from it."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        """Reads every byte, and compares it with what was written. Raises CheckpointError."""
        self.number, self.content = manifest.number, manifest.content
        self._directory = directory
        self._saved = shards_of(directory, manifest)
        self._saved.check()

    def put_back(
        self, parameters: ParameterStore, vectors: Vectors, inner: InnerState | None, *, with_residual: bool
    ) -> None:
        """Make it this process's state. Raises ConfigError where it does not fit."""
        n_elems, state = vectors.n_elems, self.content.get("state")
        all_of_it = Share.of_runs([(0, n_elems)])
        try:
            install_parameters(parameters, self._saved, all_of_it, n_elems)
            restore_vectors(vectors, self._saved, all_of_it, n_elems, with_residual=with_residual)
            if inner is not None:
                inner.restore_by_names(_state_in(state), self._saved)
        except CheckpointError as error:
            raise _refusal(self.number, self._directory, error) from error


def _state_in(state: object) -> dict[str, Any]:
    if not isinstance(state, dict):
        raise CheckpointError("it has no state of the training loop")
    return state


# ---- one rank --------------------------------------------------------------------------------------------------------


class RankCheckpoints:
    """One rank's part of them. Every method but close() is called on all ranks, in the same order."""

    def __init__(self, directory: Path, ranks: Gathering, state: RankState) -> None:
        """directory: the cluster's, for all ranks; the leader has made it.

        Raises ConfigError on every rank where one of them does not see the leader's.
        """
        self.directory = directory
        self._ranks = ranks
        self._state = state
        self._copies: tuple[ModelPart, VectorCopies] | None = None
        self._writer = ThreadPoolExecutor(1, "dips-checkpoint")
        self._writing: Future[Written] | None = None
        self._found: tuple[Manifest, SavedShards] | None = None
        self._check_shared()

    def _check_shared(self) -> None:
        name, problem = f".tmp-seen-{secrets.token_hex(8)}", ""
        if self._ranks.rank == 0:
            try:
                (self.directory / name).touch()
                fsync_directory(self.directory)
            except OSError as error:
                problem = f"checkpoints cannot be kept in {self.directory}: {error.strerror}"
        said = json.loads(self._ranks.gather(json.dumps([name, problem]).encode())[0])
        seen = self._ranks.gather(b"1" if os.access(self.directory / said[0], os.F_OK) else b"")
        if self._ranks.rank == 0:
            with contextlib.suppress(OSError):
                (self.directory / name).unlink()
        if said[1]:
            raise ConfigError(f"{said[1]}; give another checkpoint_dir")
        blind = next((rank for rank, sees in enumerate(seen) if not sees), None)
        if blind is not None:
            raise ConfigError(
                f"rank {blind} of this cluster does not see rank 0's folder {self.directory}: give checkpoint_dir a "
                "folder on a file system that all ranks share"
            )

    # ---- writing ----

    @property
    def is_writing(self) -> bool:
        """Whether this rank's part is still on its way to the disk."""
        return self._writing is not None and not self._writing.done()

    def begin(self, part: ModelPart, share: Share, n_elems: int, number: int, session: str) -> None:
        """Copy this rank's part, and have it written. n_elems: of the whole model. session: SavedSession.to_json(), as
        text."""
        assert self._writing is None, "the one before is committed first"
        if self._copies is None or self._copies[0] is not part:
            self._copies = part, VectorCopies(part.vectors)
        # On all ranks together, as parameters are exchanged.
        vectors = self._copies[1].take(part.parameters, SavedSession.from_json(json.loads(session)))
        shards = [
            box for name, raw in vectors.items() for box in boxes_of(name, raw.data.view(np.float32), share, n_elems)
        ]
        try:
            state, own = self._state.capture()
        except ConfigError as error:
            self._writing = Future()
            self._writing.set_result(Written(error=str(error), is_final=True))
            return
        self._writing = self._writer.submit(self._write, number, [*shards, *own], state)

    def _write(self, number: int, shards: Sequence[Shard], state: dict[str, Any]) -> Written:
        try:
            file = write_shards(folder_of_ranks(self.directory, number), self._ranks.rank, shards)
        except OSError as error:
            return Written(error=error.strerror or str(error))
        except Exception as error:
            _logger.exception("a checkpoint could not be written")
            return Written(error=f"{type(error).__name__}: {error}")
        return Written(file.to_json(), state)

    def commit(self) -> list[Written]:
        """Wait until all ranks have written, and return what; on the leader only, as it is long with many ranks. Raises
        ConfigError, on every rank, where one holds what a checkpoint cannot.
        """
        assert self._writing is not None, "one was begun"
        mine = self._writing.result()
        self._writing = None
        final = self._ranks.gather(mine.error.encode() if mine.is_final else b"")
        for rank, error in enumerate(final):
            if error:
                raise ConfigError(f"rank {rank} of this cluster can keep no checkpoint: {error.decode()}")
        texts = self._ranks.gather(mine.to_json())
        return [Written(**json.loads(text)) for text in texts] if self._ranks.rank == 0 else []

    # ---- reading ----

    def find(self, number: int) -> list[str]:
        """Look whether the checkpoint can be read; each rank reads its part of all bytes. Returns each rank's sentence
        about what is wrong, on every rank; empty: nothing.
        """
        problem, digest = "", ""
        self._found = None
        try:
            manifest = read_manifest(self.directory, number)
            saved = shards_of(self.directory, manifest)
            saved.check(self._ranks.rank, self._ranks.n_ranks)
            digest = xxhash.xxh3_128_hexdigest(json.dumps([manifest.content, manifest.stored], sort_keys=True).encode())
            self._found = manifest, saved
        except (CheckpointError, MemoryError) as error:
            problem = str(error) or "it does not fit into memory"
        said = [json.loads(text) for text in self._ranks.gather(json.dumps([problem, digest]).encode())]
        return [
            theirs or ("" if their_digest in ("", said[0][1]) else f"rank {rank} has another one of this number")
            for rank, (theirs, their_digest) in enumerate(said)
        ]

    @property
    def has_found(self) -> bool:
        return self._found is not None

    @property
    def found(self) -> Manifest:
        return self._of_found()[0]

    def put_back(self, part: ModelPart, share: Share, n_elems: int, *, with_residual: bool) -> None:
        """Make it this rank's state; on all ranks together. Raises ConfigError where it does not fit."""
        manifest, saved = self._of_found()
        try:
            install_parameters(part.parameters, saved, share, n_elems)
            restore_vectors(part.vectors, saved, share, n_elems, with_residual=with_residual)
            self._state.restore(_state_in(manifest.content.get("state")), saved)
        except CheckpointError as error:
            raise _refusal(manifest.number, self.directory, error) from error

    def share_again(self, part: ModelPart, share: Share, n_elems: int, *, with_residual: bool) -> None:
        """Read the vectors of another share, before training has begun."""
        manifest, saved = self._of_found()
        try:
            restore_vectors(part.vectors, saved, share, n_elems, with_residual=with_residual)
        except CheckpointError as error:
            raise _refusal(manifest.number, self.directory, error) from error

    def forget_found(self) -> None:
        """Training begins."""
        self._found = None

    def close(self) -> None:
        """Wait for the write under way, and end the thread."""
        self._writer.shutdown(wait=True)

    def _of_found(self) -> tuple[Manifest, SavedShards]:
        assert self._found is not None, "the ranks have agreed on it"
        return self._found


# ---- the leader ------------------------------------------------------------------------------------------------------


class AllRanks(Protocol):
    """What the leader has all ranks do with their checkpoints (rank_part.LeadingPart)."""

    @property
    def chunk_bytes(self) -> int:
        """By which the ranks have shared the model out."""
        ...

    def begin_checkpoint(self, number: int, session: str) -> None:
        """Have all copy their parts, and write them."""
        ...

    def commit_checkpoint(self) -> list[Written]:
        """What each rank has written, once all have."""
        ...

    @property
    def checkpoint_is_written(self) -> bool:
        """Whether all ranks had written theirs when they met last."""
        ...

    def find_checkpoint(self, number: int) -> list[str]:
        """What is wrong with it, in the words of each rank; empty: nothing."""
        ...

    def put_back(self, chunk_bytes: int, *, with_residual: bool) -> None:
        """chunk_bytes: by which shares are cut until the master says otherwise."""
        ...


@dataclass(frozen=True)
class _Begun:
    """The checkpoint that is being written."""

    number: int
    saved: SavedSession
    cause: str
    label: str | None
    began_s: float
    pause_s: float


class LeadingCheckpoints:
    """The checkpoints of all ranks, as the leader's shell sees them (checkpoint.Checkpoints)."""

    def __init__(
        self, own: RankCheckpoints, ranks: AllRanks, store: CheckpointStore, config: ClientConfig, clock: Clock
    ) -> None:
        """own: the leader's part. store: of the same directory."""
        self._own = own
        self._ranks = ranks
        self._store = store
        self._config = config
        self._clock = clock
        self._recorder: PushRecorder | None = None
        self._tape: Tape | None = None
        self._begun: _Begun | None = None
        self._due_s = clock.monotonic_s() + config.checkpoint_every_s
        self.written_s = math.nan
        self.on_written: Callable[[float], None] | None = None

    def begin(self, deliver: Callable[[Event], None], tape: Tape) -> None:
        """Before anything else: where the ends of records go, and the event record."""
        self._recorder, self._tape = PushRecorder(self._store, deliver), tape

    # ---- a new process ----

    def resume(self, session: ClusterMachine, label: str | None = None) -> bool:
        """Restore the session and all ranks' state from the newest checkpoint of this label that all can read. Returns
        whether there was one.

        Raises ConfigError when there is none though one is required, or when it does not fit.
        """
        where = self._store.directory
        for manifest in self._store.manifests(label):
            sentence = manifest if isinstance(manifest, str) else self._problem_of(manifest)
            if not sentence:
                break
            _logger.warning("%s; trying the one before it", sentence)
        else:
            if self._config.resume_required:
                raise ConfigError(
                    f"no checkpoint in {where} can be used, and one is required: give the right checkpoint_dir, or "
                    "start without one"
                )
            _logger.info("no checkpoint in %s%s: starting without one", where, f" for {label}" if label else "")
            return False
        newest, sentence = self._store.newest_push()
        if sentence:
            _logger.warning("%s; the checkpoint alone is used", sentence)
        found = self._own.found
        saved = saved_in(found, where)
        session.resume(saved, newest)
        chunk_bytes = found.content.get("chunk_bytes", None if found.files_of_ranks else UNSHARED_CHUNK_BYTES)
        if not isinstance(chunk_bytes, int) or chunk_bytes < 1:
            raise ConfigError(
                f"checkpoint {found.number} in {where} does not say how ranks shared the model: remove it"
            )
        self._ranks.put_back(chunk_bytes, with_residual=session.shared.residual)
        self._write_tape(
            "resumed", f"{saved.cluster_id}/join", number=found.number, seq=saved.seq, base=str(saved.base),
            fence=saved.base_fence, incarnation=str(saved.incarnation), pending_tokens=saved.pending.tokens,
            push=str(saved.push.id) if saved.push is not None else None,
        )  # fmt: skip
        n_ranks = found.content.get("n_ranks")
        _logger.info(
            "resumed from checkpoint %d in %s, which %s written: version %s and %d steps since", found.number, where,
            "one process has" if n_ranks == 1 else f"{n_ranks} ranks have", saved.base, saved.pending.steps,
        )  # fmt: skip
        return True

    def _problem_of(self, manifest: Manifest) -> str:
        said = self._ranks.find_checkpoint(manifest.number)
        problem = next((each for each in said if each), "")
        return self._store.cannot_be_used(manifest.number, problem) if problem else ""

    # ---- between two steps ----

    @property
    def wants_boundary(self) -> bool:
        """Whether take_if_due() has something to do."""
        if self._begun is not None:
            return self._ranks.checkpoint_is_written
        return self._clock.monotonic_s() >= self._due_s

    def take_if_due(self, session: ClusterMachine, cause: str) -> None:
        """Complete the checkpoint that all ranks have written, or begin one, if it is time."""
        if math.isnan(self.written_s):
            self.written_s = self._clock.monotonic_s()
        if not self.wants_boundary:
            return
        if self._begun is not None:
            self.finish()
        else:
            self._due_s = self._clock.monotonic_s() + self._config.checkpoint_every_s
            self._begin(session, cause, None)

    def take_now(self, session: ClusterMachine, cause: str, label: str) -> bool:
        """Take a checkpoint under a label, and wait until it is durable. Returns whether it is."""
        self.finish()
        return self._begin(session, cause, label) and self.finish()

    def _begin(self, session: ClusterMachine, cause: str, label: str | None) -> bool:
        saved = session.saved()
        if saved is None:
            return False
        began_s = self._clock.monotonic_s()
        try:
            number = self._store.begin_folder()
        except OSError as error:
            self._warn(error.strerror or str(error))
            return False
        self._ranks.begin_checkpoint(number, json.dumps(saved.to_json()))
        now_s = self._clock.monotonic_s()
        self._begun = _Begun(number, saved, cause, label, now_s, now_s - began_s)
        return True

    def finish(self) -> bool:
        """Wait until the checkpoint that is being written is complete, if one is. Returns whether it is."""
        begun, self._begun = self._begun, None
        if begun is None:
            return False
        stops_s = self._clock.monotonic_s()
        written = self._ranks.commit_checkpoint()
        problem = next((f"rank {rank}: {each.error}" for rank, each in enumerate(written) if each.error), "")
        if problem:
            self._store.drop_folder(begun.number)
            self._warn(problem)
            return False
        files = [each.file for each in written]
        states = [each.state for each in written if each.state is not None]
        content = {
            "session": begun.saved.to_json(), "state": merged(states), "label": begun.label,
            "chunk_bytes": self._ranks.chunk_bytes, "n_ranks": len(written),
        }  # fmt: skip
        try:
            folder = folder_of_ranks(self._store.directory, begun.number)
            write_metadata(folder, [ShardFile.from_json(file) for file in files])
            self._store.commit_folder(begun.number, content, files)
        except OSError as error:
            self._store.drop_folder(begun.number)
            self._warn(error.strerror or str(error))
            return False
        self.written_s = self._clock.monotonic_s()
        write_s = self.written_s - begun.began_s
        pause_s = begun.pause_s + self.written_s - stops_s  # all ranks wait for the manifest, too
        if self.on_written is not None:
            self.on_written(write_s)
        n_bytes = sum(file["n_bytes"] for file in files if file is not None)
        self._write_tape(
            "checkpoint", begun.cause, number=begun.number, seq=begun.saved.seq, base=str(begun.saved.base),
            fence=begun.saved.base_fence, bytes=n_bytes, pause_s=pause_s, write_s=write_s,
        )  # fmt: skip
        _logger.debug("checkpoint %d of all ranks: %s in %.2f s", begun.number, format_bytes(n_bytes), write_s)
        return True

    def record_push(self, job: int, record: PushRecord) -> None:
        """As PushRecorder.record()."""
        assert self._recorder is not None, "begin() comes first"
        self._recorder.record(job, record)

    def close(self) -> None:
        """End the thread and unlock the directory. What is being written then is no checkpoint; see finish()."""
        if self._recorder is not None:
            self._recorder.close()
        self._store.close()

    def _warn(self, problem: str) -> None:
        _logger.warning(
            "no checkpoint could be written to %s: %s; training goes on, and the next one is tried in %g s",
            self._store.directory, problem, self._config.checkpoint_every_s,
        )  # fmt: skip

    def _write_tape(self, event: str, cause: str, **values: Any) -> None:
        assert self._tape is not None, "begin() comes first"
        self._tape.write(event, cause, **values)
