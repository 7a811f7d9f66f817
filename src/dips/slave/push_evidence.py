"""Writes evidence of every round: the accepted pushes as they were in staging, so that a version can be recomputed.

Off by default, because it costs 4 bytes of disk for each parameter and push, for ever. For round r1.7 the directory
`pushes/` has one safetensors file for each accepted push (`r1.7-0.safetensors`: the tensor "push", float32, this
slave's blocks in block-id order) and, once all of them are durable, `round-r1.7.json` with every scalar of the outer
step, the checksum of each file, and one of itself (docs/storage.md). Rounds that were given up leave files, too: the
COMMIT records show which ones count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import xxhash

from dips.core.files import closed, make_folder
from dips.core.messages import Prepare, SnapshotInfo
from dips.core.observe.failpoints import failpoint
from dips.core.wire import Codec
from dips.slave.disk import LocalDisk, json_sum, replace_durably, write_all
from dips.slave.memory import F32, bytes_of
from dips.slave.state.checks import scalars_of

FORMAT = "dips-round-3"
DIRECTORY = "pushes"


class PushEvidence:
    """Writes the evidence files. directory: the slave's own; `pushes/` is made in it. Raises OSError."""

    def __init__(self, directory: Path, run_id: str, slave_id: str) -> None:
        self._directory = directory / DIRECTORY
        make_folder(self._directory)
        self._disk = LocalDisk(self._directory)
        self._owner = {"format": FORMAT, "run_id": run_id, "slave_id": slave_id}

    def write(
        self, body: Prepare, shadow: SnapshotInfo, pushes: list[F32], chunk_bytes: int, pull_wire: Codec = Codec.F32
    ) -> None:
        """Write a round's files. pushes: those of body.accepted in that order, each (n,) float32. pull_wire: what the
        version is rounded to. Durable when this returns.

        Raises OSError; files that no record names may then be left.
        """
        round_id = str(body.round)
        accepted = []
        for index, (staged, weight, push) in enumerate(zip(body.accepted, body.weights, pushes, strict=True)):
            name = f"{round_id}-{index}.safetensors"
            said = {"push": str(staged.push), "attempt": staged.attempt, "weight": weight}
            metadata = self._owner | {"round": round_id, **{key: str(value) for key, value in said.items()}}
            accepted.append(said | {"xxh3_128": _write_push(self._directory / name, push, metadata), "file": name})
        self._disk.sync_names()
        # The round's scalars. JSON keeps every bit of a float64: Python writes the shortest text that reads back equal.
        scalars = {
            "round": str(body.round),
            "from_version": str(body.from_version) if body.from_version is not None else None,
            "to_version": str(body.to_version),
            **scalars_of(body),
            "chunk_bytes": chunk_bytes,
            "layout_hash": shadow.layout_hash.hex(),
            "placement_hash": shadow.placement_hash.hex(),
            "digest": shadow.digest.hex(),
        }
        if pull_wire is not Codec.F32:
            scalars["pull_wire"] = pull_wire.name
        record = self._owner | scalars | {"accepted": accepted}
        text = json.dumps(record | {"xxh3_128": json_sum(record, compact=True)}, indent=1)
        replace_durably(self._disk, f"round-{round_id}.json", text.encode())


def _write_push(path: Path, push: F32, metadata: Mapping[str, str]) -> str:
    """Write and flush a safetensors file of one tensor, by hand, because the library makes two copies of the tensor.

    Returns xxh3-128 of all its bytes.
    """
    place = {"dtype": "F32", "shape": [push.size], "data_offsets": [0, push.nbytes]}
    text = json.dumps({"__metadata__": metadata, "push": place}, separators=(",", ":")).encode()
    text = text.ljust(-len(text) % 8 + len(text))
    head = len(text).to_bytes(8, "little") + text
    sum_of_bytes = xxhash.xxh3_128(head)
    sum_of_bytes.update(bytes_of(push))
    failpoint("slave.pushes.before_write")
    with open(path, "wb", buffering=0, opener=closed) as file:
        write_all(file.fileno(), 0, memoryview(head))
        write_all(file.fileno(), 8 + len(text), bytes_of(push))
        failpoint("slave.pushes.before_fsync")
        os.fsync(file.fileno())
        failpoint("slave.pushes.after_fsync")
    return sum_of_bytes.hexdigest()
