"""Keeps a directory with the newest few complete checkpoints and the record of the newest push.

A checkpoint is NAME.safetensors and, written last, its manifest NAME.json; without the manifest it does not exist.
Loading falls back from a damaged one to the one before, and logs that. One process at a time locks the directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dips.core.errors import ConfigError
from dips.core.observe.failpoints import failpoint
from dips.worker.checkpoint_file import (
    CheckpointError,
    CheckpointStamp,
    RawTensor,
    read_record,
    read_tensors,
    write_record,
    write_tensors,
)
from dips.worker.state.push_record import PushRecord
from dips.worker.state.saved import SavedStateError, push_from_json, push_to_json

FORMAT = "dips-checkpoint-1"
_LOCK = "lock"
_PUSH = "push.json"
_NAME = re.compile(r"checkpoint-(\d{8,})\.(json|safetensors)\Z")


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint. content: the writer's JSON. n_bytes: of the tensors' file."""

    number: int
    content: Mapping[str, Any]
    tensors: Mapping[str, RawTensor]
    n_bytes: int = 0


class CheckpointStore:
    """The directory; made if it is not there. Only record_push() may be called by several threads."""

    def __init__(self, directory: Path, kept: int) -> None:
        """kept: checkpoints to keep. Raises ConfigError when another process uses the directory, or it is unusable."""
        self.directory = directory
        self._kept = kept
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock: int | None = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"checkpoints cannot be kept in {directory}: {error.strerror}; give another --checkpoint-dir"
            ) from error
        try:
            # A lock of the process: a forked data loader does not inherit it and so cannot keep it after our end.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"another process keeps its checkpoints in {directory}: end it first, or give each cluster a "
                "--checkpoint-dir of its own"
            ) from error
        self._clean()
        self._next = max([0, *self.numbers(), *self._named("safetensors")]) + 1

    def close(self) -> None:
        """Unlock the directory. May be called twice."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def numbers(self) -> list[int]:
        """The checkpoints that have a manifest, oldest first."""
        return self._named("json")

    # ---- writing ----

    def write(self, content: Mapping[str, Any], tensors: Mapping[str, RawTensor]) -> Checkpoint:
        """Make a checkpoint durable, and remove those beyond the kept ones. Raises OSError; older ones then stay."""
        number = self._next
        self._next += 1
        try:
            stamp = self._write(number, content, tensors)
        except OSError:
            self._remove(number)  # tensors alone would only take space, on a full disk
            raise
        failpoint("worker.checkpoint.before_prune")
        self._prune()
        return Checkpoint(number, content, tensors, stamp.n_bytes)

    def _write(self, number: int, content: Mapping[str, Any], tensors: Mapping[str, RawTensor]) -> CheckpointStamp:
        data = self._path(number, "safetensors")
        stamp = write_tensors(data, tensors)
        body = {
            "format": FORMAT,
            "number": number,
            "content": content,
            "tensors": {"file": data.name, "n_bytes": stamp.n_bytes, "xxh3_128": stamp.xxh3_128},
        }
        failpoint("worker.checkpoint.before_manifest")
        write_record(self._path(number, "json"), body)
        return stamp

    def record_push(self, record: PushRecord) -> None:
        """Make the newest push's record durable, replacing the one before. Raises OSError."""
        failpoint("worker.push_record.before_write")
        write_record(self.directory / _PUSH, {"format": FORMAT, "push": push_to_json(record)})
        failpoint("worker.push_record.after_write")

    # ---- reading ----

    def newest(self, label: str | None = None) -> tuple[Checkpoint | None, list[str]]:
        """The newest complete checkpoint, and a sentence about each newer one that cannot be used.

        label: only those whose content has this `label`; None: any.
        """
        sentences: list[str] = []
        for number in reversed(self.numbers()):
            try:
                body = self._manifest(number)
                if label is None or body["content"].get("label") == label:
                    return self._load(number, body), sentences
            except (CheckpointError, MemoryError) as error:
                sentences.append(f"checkpoint {number} in {self.directory} cannot be used: {error}")
        return None, sentences

    def newest_push(self) -> tuple[PushRecord | None, str]:
        """The push that was recorded last; None with a sentence when its record cannot be used."""
        path = self.directory / _PUSH
        if not path.exists():
            return None, ""
        try:
            return push_from_json(read_record(path).get("push")), ""
        except (CheckpointError, SavedStateError) as error:
            return None, f"the record of the last push in {self.directory} cannot be used: {error}"

    def _manifest(self, number: int) -> Mapping[str, Any]:
        body = read_record(self._path(number, "json"))
        if body.get("format") != FORMAT or not isinstance(body.get("content"), dict):
            raise CheckpointError(f"it is of the form {body.get('format')!r}, this release reads {FORMAT!r}")
        return body

    def _load(self, number: int, body: Mapping[str, Any]) -> Checkpoint:
        stored = body.get("tensors")
        if not isinstance(stored, dict) or not isinstance(stored.get("n_bytes"), int):
            raise CheckpointError("its manifest does not describe its tensors")
        stamp = CheckpointStamp(stored["n_bytes"], str(stored.get("xxh3_128")))
        tensors = read_tensors(self._path(number, "safetensors"), stamp)
        return Checkpoint(number, body["content"], tensors, stamp.n_bytes)

    # ---- removing files ----

    def _path(self, number: int, kind: str) -> Path:
        return self.directory / f"checkpoint-{number:08d}.{kind}"

    def _named(self, kind: str) -> list[int]:
        matches = (_NAME.match(path.name) for path in self.directory.iterdir())
        return sorted(int(match[1]) for match in matches if match and match[2] == kind)

    def _prune(self) -> None:
        for number in self.numbers()[: -self._kept]:
            self._remove(number)

    def _remove(self, number: int) -> None:
        """Remove a checkpoint, its manifest first, so that none is left without its tensors. Errors are ignored."""
        with contextlib.suppress(OSError):
            for kind in ("json", "safetensors"):
                self._path(number, kind).unlink(missing_ok=True)

    def _clean(self) -> None:
        """Remove what a crash left: temporary files, and tensors without a manifest."""
        whole = set(self.numbers())
        orphans = [self._path(n, "safetensors") for n in self._named("safetensors") if n not in whole]
        for path in [*self.directory.glob(".tmp-*"), *orphans]:
            with contextlib.suppress(OSError):
                path.unlink()
