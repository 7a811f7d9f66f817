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
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from dips.core.clock import Clock
from dips.core.errors import ConfigError
from dips.core.files import TEMPORARY, closed, sync_folder
from dips.core.layout import Share
from dips.worker.checkpoint import Begun, Checkpoints
from dips.worker.checkpoint_files import (
    CheckpointError,
    CheckpointStore,
    Manifest,
    folder_of_ranks,
    read_manifest,
)
from dips.worker.commands import BeginCheckpoint, CommitCheckpoint, FindCheckpoint, Order, PutBack, ShareOut
from dips.worker.config import ClientConfig
from dips.worker.model_part import ModelPart
from dips.worker.parallel.agreement import Gathering
from dips.worker.parallel.rank_state import RankState, merged
from dips.worker.parallel.shard_files import (
    FoundCheckpoint,
    Shard,
    ShardFile,
    boxes_of,
    write_metadata,
    write_shards,
)
from dips.worker.state.cluster import ClusterMachine
from dips.worker.state.saved import SavedSession
from dips.worker.vectors import VectorCopies

_logger = logging.getLogger("dips.worker.checkpoint")

F32 = NDArray[np.float32]

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
        self.found: FoundCheckpoint | None = None
        """What find() has found; None: nothing, or training has begun."""
        name, problem = f"{TEMPORARY}seen-{secrets.token_hex(8)}", ""
        if self._ranks.rank == 0:
            try:
                os.close(closed(self.directory / name, os.O_WRONLY | os.O_CREAT))
                sync_folder(self.directory, "worker")
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
        self.found = None
        try:
            manifest = read_manifest(self.directory, number)
            if not manifest.is_by_names:
                raise CheckpointError(
                    "one process has written it, with a release or an optimizer that keeps its state without names of "
                    "parameters: resume with one process"
                )
            self.found = FoundCheckpoint(self.directory, manifest, self._ranks.rank, self._ranks.n_ranks)
            digest = xxhash.xxh3_128_hexdigest(json.dumps([manifest.content, manifest.stored], sort_keys=True).encode())
        except (CheckpointError, MemoryError) as error:
            problem = str(error) or "it does not fit into memory"
        said = [json.loads(text) for text in self._ranks.gather(json.dumps([problem, digest]).encode())]
        return [
            theirs or ("" if their_digest in ("", said[0][1]) else f"rank {rank} has another one of this number")
            for rank, (theirs, their_digest) in enumerate(said)
        ]

    def put_back(
        self, part: ModelPart, share: Share, n_elems: int, *, with_residual: bool, again: bool = False
    ) -> None:
        """Make it this rank's state; on all ranks together. again: only its vectors, of another share, before training
        has begun. Raises ConfigError where it does not fit.
        """
        assert self.found is not None, "the ranks have agreed on it"
        parameters, restore = (None, None) if again else (part.parameters, self._state.restore)
        self.found.put_back(parameters, part.vectors, share, n_elems, restore, with_residual=with_residual)

    def close(self) -> None:
        """Wait for the write under way, and end the thread."""
        self._writer.shutdown(wait=True)


# ---- the leader ------------------------------------------------------------------------------------------------------


class AllRanks(Protocol):
    """What the leader has all ranks do with their checkpoints (rank_part.LeadingPart)."""

    @property
    def chunk_bytes(self) -> int:
        """By which the ranks have shared the model out."""
        ...

    @property
    def checkpoint_is_written(self) -> bool:
        """Whether all ranks had written theirs when they met last."""
        ...

    def do(self, command: Order) -> Any:
        """Have all ranks do it; what RankPart.do() returns here."""
        ...


class LeadingCheckpoints(Checkpoints):
    """The checkpoints of all ranks, as the leader's shell sees them."""

    def __init__(self, ranks: AllRanks, store: CheckpointStore, config: ClientConfig, clock: Clock) -> None:
        """store: of the same directory as the ranks' RankCheckpoints."""
        super().__init__(store, config, clock)
        self._ranks = ranks
        self._begun: Begun | None = None

    def _find(self, manifest: Manifest) -> str:
        return next(filter(None, self._ranks.do(FindCheckpoint(manifest.number))), "")

    def _put_back(self, found: Manifest, *, with_residual: bool) -> None:
        chunk_bytes = found.content.get("chunk_bytes", None if found.files_of_ranks else UNSHARED_CHUNK_BYTES)
        if not isinstance(chunk_bytes, int) or chunk_bytes < 1:
            raise ConfigError(
                f"checkpoint {found.number} in {self._store.directory} does not say how ranks shared the model: "
                "remove it"
            )
        self._ranks.do(ShareOut(chunk_bytes))  # until the master says otherwise
        self._ranks.do(PutBack(with_residual))

    # ---- between two steps ----

    @property
    def wants_boundary(self) -> bool:
        """Whether take_if_due() has something to do."""
        if self._begun is not None:
            return self._ranks.checkpoint_is_written
        return self._clock.monotonic_s() >= self._due_s

    def take_if_due(self, session: ClusterMachine, cause: str) -> None:
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
        self._ranks.do(BeginCheckpoint(number, json.dumps(saved.to_json())))
        now_s = self._clock.monotonic_s()
        self._begun = Begun(saved, cause, label, now_s, now_s - began_s, number)
        return True

    def finish(self) -> bool:
        """Wait until the checkpoint that is being written is complete, if one is. Returns whether it is."""
        begun, self._begun = self._begun, None
        if begun is None:
            return False
        stops_s = self._clock.monotonic_s()
        written: list[Written] = self._ranks.do(CommitCheckpoint())
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
        pause_s = begun.pause_s + self._clock.monotonic_s() - stops_s  # all ranks wait for the manifest, too
        n_bytes = sum(file["n_bytes"] for file in files if file is not None)
        self._note_written(begun, begun.number, n_bytes, pause_s)
        return True
