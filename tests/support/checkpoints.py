"""What a directory of checkpoints holds, read as a resuming process reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dips.worker.checkpoint_files import CheckpointError, CheckpointStore, RawTensor
from dips.worker.parallel.shard_files import FoundCheckpoint
from dips.worker.torch_state import raw_of

VECTORS = ("theta", "theta_base", "theta_at_push", "theta_installed", "residual")


@dataclass(frozen=True)
class Kept:
    number: int
    content: Mapping[str, Any]
    tensors: Mapping[str, RawTensor]  # the vectors by their names, and the further state's


def newest_of(store: CheckpointStore) -> tuple[Kept | None, list[str]]:
    """The newest complete checkpoint of one process, and a sentence about each newer one that cannot be used."""
    sentences: list[str] = []
    for manifest in store.manifests():
        if isinstance(manifest, str):
            sentences.append(manifest)
            continue
        try:
            saved = FoundCheckpoint(store.directory, manifest).saved
        except CheckpointError as error:
            sentences.append(store.cannot_be_used(manifest.number, error))
            continue
        vectors = {name: raw_of(saved.read_whole(f"vectors.{name}")) for name in VECTORS if f"vectors.{name}" in saved}
        return Kept(manifest.number, manifest.content, {**vectors, **saved.read_state()}), sentences
    return None, sentences
