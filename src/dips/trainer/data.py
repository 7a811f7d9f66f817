"""Turns the text of a run into chunks that the master leases, and leased ranges into batches.

A token is a byte, counted as an input position. (pass, chunk, begin, end) means the same bytes on every cluster:
the documents of a pass are shuffled and joined to one stream, the stream is cut into chunks of equal length, and
the chunks are numbered in a shuffled order, so that any leased part is a fair sample of the text. Must
never train on a token that is not in a range it was given, nor count one that it did not train on.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dips.core.errors import ConfigError, RemoteProtocolError
from dips.core.messages import DataMode, DataPlan, DataRange
from dips.trainer.corpus import SEPARATOR, Document, name_hash, take_rows
from dips.trainer.model import IGNORED_TARGET
from dips.worker.state.work import is_within, without

_RANGE_FIELDS = tuple(field.name for field in fields(DataRange))

MIN_CHUNKS = 64
"""Fewest chunks: fewer could not be shared fairly among a handful of clusters."""

_RULE = "dips byte chunks 1"
"""The name of the rule that makes chunks of documents; part of the digest, so that one run never has two rules."""

_KEPT_PASSES = 2
"""Streams held in memory: the current pass, and the one before, whose last ranges may still be leased."""


class ChunkedText:
    """The training text of a run. Two of them with equal plans give the same bytes for every range."""

    def __init__(self, documents: Sequence[Document], data_seed: int, chunk_tokens: int) -> None:
        """Raises ConfigError when the text gives fewer than MIN_CHUNKS chunks."""
        self._documents = tuple(documents)
        self._data_seed = data_seed
        self._chunk_tokens = chunk_tokens
        n_bytes = sum(len(d.text) for d in documents) + len(SEPARATOR) * max(0, len(documents) - 1)
        # The last token of the last chunk needs a byte after it as its target.
        self._n_chunks = max(0, n_bytes - 1) // chunk_tokens
        if self._n_chunks < MIN_CHUNKS:
            raise ConfigError(
                f"the training text of {n_bytes} bytes gives {self._n_chunks} chunks of {chunk_tokens} tokens, at "
                f"least {MIN_CHUNKS} are needed: give more text, or lower chunk_tokens"
            )
        self._pass = lru_cache(maxsize=_KEPT_PASSES)(self._make_pass)

    @property
    def plan(self) -> DataPlan:
        """The data plan for the master's leases; clusters of a run must have equal ones."""
        digest = hashlib.sha256(name_hash(_RULE, self._data_seed, self._chunk_tokens))
        for document in self._documents:
            digest.update(name_hash(document.key) + hashlib.sha256(document.text).digest())
        total = self._n_chunks * self._chunk_tokens
        return DataPlan(DataMode.LEASED, digest.digest(), total, self._chunk_tokens)

    def tokens_of(self, part: DataRange) -> NDArray[np.uint8]:
        """The bytes of a range and the one that follows: (part.tokens + 1,).

        Raises RemoteProtocolError for a range that the plan does not have.
        """
        fits = 0 <= part.begin_tokens < part.end_tokens <= self._chunk_tokens
        if not (fits and 0 <= part.chunk < self._n_chunks and part.pass_index >= 0):
            raise RemoteProtocolError(
                f"tokens {part.begin_tokens}-{part.end_tokens} of chunk {part.chunk}, pass {part.pass_index}, "
                f"were leased, but the plan has {self._n_chunks} chunks of {self._chunk_tokens} tokens"
            )
        stream, order = self._pass(part.pass_index)
        start = int(order[part.chunk]) * self._chunk_tokens
        return stream[start + part.begin_tokens : start + part.end_tokens + 1]

    def _make_pass(self, pass_index: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """The pass's stream, and for each chunk number its place in the stream."""

        def place(document: Document) -> bytes:
            return name_hash("document", self._data_seed, pass_index, document.key)

        text = SEPARATOR.join(document.text for document in sorted(self._documents, key=place))
        seed = name_hash("chunks", self._data_seed, pass_index)
        # A long hash as a column of numbers, sorted: a shuffle that no library's version can change.
        keys = np.frombuffer(hashlib.shake_256(seed).digest(8 * self._n_chunks), dtype="<u8")
        return np.frombuffer(text, dtype=np.uint8), np.argsort(keys, kind="stable")


@dataclass(frozen=True)
class Batch:
    """One batch."""

    # inputs, targets: (B, T) int64; a target that only pads a row is IGNORED_TARGET
    inputs: Tensor
    targets: Tensor
    ranges: tuple[DataRange, ...]  # exactly the tokens of the inputs; tokens is their sum

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.ranges)


class LeasedBatches:
    """Makes batches of leased ranges: every token of a range goes into exactly one batch."""

    def __init__(self, text: ChunkedText, batch_size: int, sequence_tokens: int) -> None:
        self._text = text
        self._batch_size = batch_size
        self._sequence_tokens = sequence_tokens
        self._held: list[DataRange] = []

    @property
    def held_tokens(self) -> int:
        """Number of tokens that were added and not yet put into a batch."""
        return sum(part.tokens for part in self._held)

    @property
    def held(self) -> tuple[DataRange, ...]:
        """Ranges that were added and not yet put into a batch, in the order in which they were added."""
        return tuple(self._held)

    def add(self, ranges: Iterable[DataRange]) -> None:
        self._held.extend(ranges)

    def keep_only(self, ranges: Sequence[DataRange]) -> None:
        """Keep only these ranges, since the rest is leased to other clusters. Their order does not change."""
        self._held = [part for part in self._held if is_within(part, ranges)]

    def resume(self, ranges: Sequence[DataRange]) -> None:
        """Hold exactly these ranges. Those of load_state_dict() keep their order, so that the same batches follow.

        Raises LocalProtocolError when that holds a token twice.
        """
        self.keep_only(ranges)
        self._held.extend(without(ranges, self._held))

    def state_dict(self) -> dict[str, object]:
        """The ranges in their order; after a new Join the master decides which of them are still leased."""
        return {"held": [tuple(getattr(part, name) for name in _RANGE_FIELDS) for part in self._held]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._held = [DataRange(*numbers) for numbers in state["held"]]

    def next(self) -> Batch:
        """The next batch, smaller when few tokens are held; raises ValueError when none is."""
        return make_batch(self._text, take_rows(self._held, self._batch_size, self._sequence_tokens))


def make_batch(text: ChunkedText, rows: Sequence[DataRange]) -> Batch:
    """One batch of these rows, the shorter ones padded; raises ValueError without rows."""
    if not rows:
        raise ValueError("a batch needs at least one row")
    width = max(row.tokens for row in rows)
    inputs = np.full((len(rows), width), SEPARATOR[0], dtype=np.int64)
    targets = np.full((len(rows), width), IGNORED_TARGET, dtype=np.int64)
    for index, row in enumerate(rows):
        tokens = text.tokens_of(row)
        inputs[index, : row.tokens] = tokens[:-1]
        targets[index, : row.tokens] = tokens[1:]
    return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), tuple(rows))
