"""Reads text files, and decides which are trained on, which are held out, and in which order.

Clusters on different machines must find the same text, so nothing here depends on the path of a folder, on the
order of a directory, on the clock or on a library's random generator: every choice is a SHA-256 of a file's
relative name. A file is held out as a whole, so that no part of it is ever trained on.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dips.core.errors import ConfigError
from dips.core.messages import DataPlan, DataRange

# ---- rows ------------------------------------------------------------------------------------------------------------
#
# Chooses the tokens to train on next: rows of leased ranges, or of the whole text when there is no master.
#
# Does not import torch, so that a simulation takes the same rows.


def take_rows(held: list[DataRange], batch_size: int, sequence_tokens: int) -> tuple[DataRange, ...]:
    """Take one batch out of `held`, in place: at most batch_size rows of at most sequence_tokens; fewer at the end."""
    return tuple(_take_row(held, sequence_tokens) for _ in range(batch_size) if held)


def _take_row(held: list[DataRange], sequence_tokens: int) -> DataRange:
    """Cut a row from the beginning of the range with the most tokens left.

    So a batch mixes as many chunks as are held: at equal tokens that gains 0.2 nats per byte over consecutive rows of
    one chunk.
    """
    index = max(range(len(held)), key=lambda i: (held[i].tokens, -i))
    home = held[index]
    cut = min(home.begin_tokens + sequence_tokens, home.end_tokens)
    if cut < home.end_tokens:
        held[index] = replace(home, begin_tokens=cut)
    else:
        del held[index]
    return replace(home, end_tokens=cut)


def all_ranges(plan: DataPlan) -> Iterator[DataRange]:
    """Every chunk of every pass, for training without a master; never ends."""
    n_chunks = plan.total_tokens // plan.chunk_tokens
    pass_index = 0
    while True:
        for chunk in range(n_chunks):
            yield DataRange(0, pass_index, chunk, 0, plan.chunk_tokens)
        pass_index += 1


# ---- corpus ----------------------------------------------------------------------------------------------------------


SEPARATOR = b"\0"
"""The byte between two documents. No document contains it: a file with a NUL counts as binary."""

_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})
"""Left out of the standard library: packages that are installed in it, and tests, which many systems do not install."""


@dataclass(frozen=True)
class Document:
    """One file."""

    key: str  # the position of the path it was found under, and its name relative to that path
    text: bytes


@dataclass(frozen=True)
class Corpus:
    """training: whole documents, by key. heldout: slices of held-out documents, joined by SEPARATOR."""

    training: tuple[Document, ...]
    heldout: bytes


@dataclass(frozen=True)
class CorpusLimits:
    """Most text that is read, the share of files held out, and most bytes of these that are evaluated."""

    max_bytes: int
    heldout_fraction: float
    heldout_max_bytes: int


@dataclass(frozen=True)
class _Source:
    key: str
    path: Path


def standard_library() -> Path:
    """The folder of the running Python's source text: real text that is always there."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_corpus(paths: Sequence[Path], limits: CorpusLimits) -> Corpus:
    """Read text files and folders of them; no paths: the Python standard library's *.py files.

    Hidden files, binary files (a NUL, or not UTF-8) and files beyond max_bytes are left out; the hash of their names
    decides which files are within that limit. Raises ConfigError naming the path and the remedy.
    """
    documents = list(_readable(_sources_of(paths), limits.max_bytes))
    if not documents:
        places = ", ".join(str(path) for path in paths) or str(standard_library())
        raise ConfigError(f"no text was found in {places}: give files or folders that hold UTF-8 text")
    training, heldout = _split(documents, limits.heldout_fraction)
    return Corpus(
        tuple(sorted(training, key=lambda document: document.key)),
        _slices(heldout, limits.heldout_max_bytes),
    )


def check_paths(paths: Sequence[Path]) -> None:
    """Raise ConfigError for the first path where nothing is, or where this user may not look."""
    remedy = "give a text file or a folder of text files"
    for path in paths:
        try:
            exists = path.exists()
        except OSError as error:
            raise ConfigError(f"data path {path} cannot be read: {error.strerror}; {remedy}") from error
        if not exists:
            raise ConfigError(f"data path {path} does not exist: {remedy}")


def name_hash(*parts: object) -> bytes:
    """A hash of 32 bytes of these names, the same on every machine."""
    return hashlib.sha256("\0".join(str(part) for part in parts).encode("utf-8", "surrogateescape")).digest()


def _sources_of(paths: Sequence[Path]) -> list[_Source]:
    """The files at these paths; no paths: the Python standard library's."""
    if not paths:
        root = standard_library()
        if not root.is_dir():
            raise ConfigError(f"the Python standard library has no source files at {root}: give text with --data")
        found = _walk(root, skipped=_SKIPPED_FOLDERS)
        return [_source(0, root, path) for path in found if path.suffix == ".py"]
    check_paths(paths)
    sources: list[_Source] = []
    for position, path in enumerate(paths):
        if path.is_dir():
            sources += [_source(position, path, found) for found in _walk(path)]
        else:
            sources.append(_Source(f"{position}/{path.name}", path))
    return sources


def _source(position: int, root: Path, path: Path) -> _Source:
    return _Source(f"{position}/{path.relative_to(root).as_posix()}", path)


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """The regular files below root; links to folders are not followed, so that no loop is entered."""

    def fail(error: OSError) -> None:
        raise ConfigError(f"data folder {error.filename} cannot be read: {error.strerror}") from error

    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        for path in (Path(folder, name) for name in names if not name.startswith(".")):
            try:
                is_file = path.is_file()
            except OSError as error:
                raise ConfigError(f"data file {path} cannot be read: {error.strerror}") from error
            if is_file:
                yield path


def _readable(sources: Sequence[_Source], max_bytes: int) -> Iterator[Document]:
    """Documents in the order of their names' hashes until max_bytes are read; the last one may be cut."""
    rest_bytes = max_bytes
    for source in sorted(sources, key=lambda source: name_hash("order", source.key)):
        if rest_bytes <= 0:
            return
        try:
            with source.path.open("rb") as file:
                text = file.read(rest_bytes)
        except OSError as error:
            raise ConfigError(f"data file {source.path} cannot be read: {error.strerror}") from error
        if text and _is_text(text):
            rest_bytes -= len(text)
            yield Document(source.key, text)


def _is_text(text: bytes) -> bool:
    """Whether this is text, not binary. A character at the end that the limit cut in two is accepted."""
    if SEPARATOR in text:
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(text)
    except UnicodeDecodeError:
        return False
    return True


def _split(documents: list[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """(training, held out), at least `fraction` of the files and of the bytes held out.

    A file's side depends only on its own name as long as that holds. The size of the evaluation must not move a file.
    """
    if len(documents) == 1:
        return _split_file(documents[0], fraction)
    ordered = sorted(documents, key=_position)
    least_bytes = fraction * sum(len(document.text) for document in documents)
    n_heldout, heldout_bytes = 0, 0
    for document in ordered[:-1]:
        if _position(document) >= fraction and heldout_bytes >= least_bytes:
            break
        n_heldout, heldout_bytes = n_heldout + 1, heldout_bytes + len(document.text)
    return ordered[n_heldout:], ordered[:n_heldout]


def _position(document: Document) -> float:
    """The position of the file's name in [0, 1)."""
    return int.from_bytes(name_hash("heldout", document.key)[:6], "big") / 2**48


def _split_file(document: Document, fraction: float) -> tuple[list[Document], list[Document]]:
    """Split a single file, which has no other file to hold out: its end is held out."""
    cut = len(document.text) - max(1, int(len(document.text) * fraction))
    head, tail = document.text[:cut], document.text[cut:]
    return [Document(document.key, head)] if head else [], [Document(document.key, tail)]


def _slices(documents: Sequence[Document], max_bytes: int) -> bytes:
    """The middle of every held-out document, equal shares as far as their lengths allow, by key."""
    slices: dict[str, bytes] = {}
    rest_bytes = max_bytes
    for n_taken, document in enumerate(sorted(documents, key=lambda d: (len(d.text), d.key))):
        share = min(len(document.text), rest_bytes // (len(documents) - n_taken))
        start = (len(document.text) - share) // 2
        slices[document.key] = document.text[start : start + share]
        rest_bytes -= share
    return SEPARATOR.join(text for _, text in sorted(slices.items()) if text)
