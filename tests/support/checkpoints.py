"""What a directory of checkpoints holds, read as a resuming process reads it."""

from __future__ import annotations

from dips.worker.checkpoint_files import Checkpoint, CheckpointError, CheckpointStore


def newest_of(store: CheckpointStore) -> tuple[Checkpoint | None, list[str]]:
    """The newest complete checkpoint of one process, and a sentence about each newer one that cannot be used."""
    sentences: list[str] = []
    for manifest in store.manifests():
        if isinstance(manifest, str):
            sentences.append(manifest)
            continue
        try:
            return store.read(manifest), sentences
        except CheckpointError as error:
            sentences.append(store.cannot_be_used(manifest.number, error))
    return None, sentences
