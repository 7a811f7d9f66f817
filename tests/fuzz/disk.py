"""What stands on disks and may have been changed there: snapshots, journals, tapes, checkpoints."""

from __future__ import annotations

import atexit
import base64
import json
import shutil
import sqlite3
import zlib
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import xxhash
from hypothesis import strategies as st
from support.checkpoints import newest_of
from support.journals import records_of
from support.master_bench import Bench

from dips.core.errors import ConfigError, FatalError, RetryLater
from dips.core.ids import ClusterId, Incarnation, PushId, RoundId, Version
from dips.core.messages import DataRange, SnapshotInfo, TensorDigest, Verdict, VerdictKind
from dips.core.model_description import Lacking, ModelDescription, Untrained, description_from_json
from dips.core.observe.tape import Tape, read_tape
from dips.master.archive import FILE_NAME, FOLDER, JournalRecord, write_segment
from dips.master.journal import RECORDS, Journal, set_base
from dips.master.state.effects import WriteJournal
from dips.master.state.ledger import UNREADABLE, commit_from_record, ledger_from_journal, ledger_of
from dips.slave import snapshot_files as manifests
from dips.slave.ring import SnapshotStore
from dips.slave.snapshot_files import SnapshotError, SnapshotManifest, build_header
from dips.trainer.export import read_state, serialized
from dips.worker.checkpoint_files import CheckpointError, CheckpointStore, RawTensor
from dips.worker.state.effects import PushRecord
from dips.worker.state.saved import SavedSession, SavedStateError, push_from_json
from dips.worker.state.work import Work
from dips.worker.torch_state import StateTreeError, flatten, unflatten
from fuzz.mutate import NESTED, as_json, mutated, nearly
from fuzz.target import Broken, Target

N = 64
INFO = SnapshotInfo(
    Version(1, 3), RoundId(1, 4), b"l" * 32, b"p" * 32, b"d" * 16, committed=True, commit_hash=b"c" * 32
)


@lru_cache(maxsize=1)
def scratch() -> Path:
    """A folder for files of this process, in memory where there is such a place; gone when the process ends."""
    memory = Path("/dev/shm")
    folder = Path(mkdtemp(prefix="dips-fuzz-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def fresh(name: str) -> Path:
    folder = scratch() / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


THETA = np.arange(N, dtype=np.float32).tobytes()
"""And the momentum."""

HEADER, HEAD = build_header(INFO, N, (xxhash.xxh3_128_hexdigest(THETA),) * 2, "run", "s0")


def manifest_bytes() -> bytes:
    return manifests.encode(
        SnapshotManifest(INFO, "run", "s0", "ring-0.safetensors", HEAD.stamp, INFO.version, INFO.round, '{"a":1}')
    )


def with_checksum(outer: Any) -> bytes:
    """A record with the checksum that its changed body asks for."""
    if isinstance(outer, dict) and "body" in outer:
        try:
            text = json.dumps(outer["body"], sort_keys=True, separators=(",", ":"))
        except TypeError:  # keys that do not compare
            return as_json(outer)
        outer = outer | {"xxh3_128": xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))}
    return as_json(outer)


def resealed(data: bytes) -> bytes:
    try:
        return with_checksum(json.loads(data))
    except (ValueError, RecursionError):
        return data


def json_inputs(seed: Callable[[], bytes]) -> st.SearchStrategy[bytes]:
    """Changed bytes, changed values with a right checksum, and nests."""
    return st.one_of(
        mutated(lambda: [seed()]),
        st.deferred(lambda: nearly(json.loads(seed()))).map(with_checksum),
        st.sampled_from(NESTED),
    )


def changed(content: bytes) -> st.SearchStrategy[bytes]:
    """A file's content, changed as JSON if it is some."""
    return json_inputs(lambda: content) if content[:1] == b"{" else mutated(lambda: [content])


def numbered(parts: Iterable[st.SearchStrategy[bytes]]) -> st.SearchStrategy[bytes]:
    """Inputs of all the parts, each behind a byte with its part's number."""

    def marked(n: int, part: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
        return part.map(lambda data: bytes([n]) + data)

    return st.one_of(*(marked(n, part) for n, part in enumerate(parts)))


def one_of_files(
    name: str, files: Callable[[], dict[str, bytes]], feed: Callable[[Path], str], *refusals: type[Exception]
) -> Target:
    """A folder of which the first byte says which file has the rest as its content."""

    def feed_folder(data: bytes) -> str:
        folder, names = fresh(name), sorted(files())
        which = names[data[0] % len(names)] if data else names[0]
        for file, content in (files() | {which: data[1:]}).items():
            (folder / file).write_bytes(content)
            (folder / file).chmod(0o600)
        return feed(folder)

    inputs = st.deferred(lambda: numbered(changed(content) for _, content in sorted(files().items())))
    return Target(name, inputs, feed_folder, refusals)


def taking(read: Callable[[bytes], object]) -> Callable[[bytes], str]:
    """Feeds a reader whose result says nothing more."""

    def feed(data: bytes) -> str:
        read(data)
        return "taken"

    return feed


def taking_json(read: Callable[[object], object]) -> Callable[[bytes], str]:
    """The same of one that is given what a file holds; who reads the file refuses what is no JSON."""

    def feed(data: bytes) -> str:
        try:
            raw = json.loads(data)
        except (ValueError, RecursionError):
            return "no JSON"
        read(raw)
        return "taken"

    return feed


def manifest() -> Target:
    feed = taking(lambda data: manifests.decode(data, "the manifest"))
    return Target("manifest", json_inputs(manifest_bytes), feed, (SnapshotError,), finish=resealed)


def slave_directory() -> Target:
    def files() -> dict[str, bytes]:
        return {
            "ring-0.safetensors": HEADER + THETA + THETA,
            "manifest-0.json": manifest_bytes(),
            "promise.json": b'{"promised_epoch": 3}',
            "identity.json": b'{"run_id": "run", "slave_id": "s0"}',
        }

    def feed(folder: Path) -> str:
        store = SnapshotStore(folder, "run", "s0", 3)
        try:
            problems = store.scan()
            return f"{len(store.ring.infos())} snapshots, {len(problems)} sentences"
        finally:
            store.close()

    return one_of_files("slave directory", files, feed, ConfigError)


@lru_cache(maxsize=1)
def committed() -> tuple[str, bytes]:
    """A ledger after a few rounds, and the record of its last COMMIT."""
    bench = Bench().running("a", "b", "c")
    for name in ("a", "b", "c"):
        bench.push(name, 100)
    ledger = bench.state.shared.ledger
    assert ledger.commit is not None
    return ledger.to_json(), ledger.commit.record


def commit_record() -> Target:
    """What a slave's manifest brings to a master that lost its journal."""
    feed = taking(lambda data: ledger_of(commit_from_record(data)))
    return Target("commit record", json_inputs(lambda: committed()[1]), feed, UNREADABLE)


def ledger() -> Target:
    """The master's own, as its journal holds it."""
    feed = taking(lambda data: ledger_from_journal(data.decode("utf-8", "replace")))
    return Target("ledger", json_inputs(lambda: committed()[0].encode()), feed, (FatalError,))


def _journal(ledger: str) -> bytes:
    folder = fresh("seed-journal")
    journal = Journal.open(folder, "test")
    epoch = journal.begin_epoch()
    journal.append_all(epoch, [WriteJournal(n, "JOIN", '{"kind":"JOIN"}', ledger) for n in range(1, 30)])
    journal.close()
    with closing(sqlite3.connect(folder / FILE_NAME)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return (folder / FILE_NAME).read_bytes()


@lru_cache(maxsize=1)
def journal_bytes() -> bytes:
    return _journal(committed()[0])


def _journal_file(folder: Path) -> Path:
    (folder / FILE_NAME).write_bytes(journal_bytes())
    return folder / FILE_NAME


def journal() -> Target:
    """The file as a whole: opened, begun again, its newest ledger and its records read."""

    def feed(data: bytes) -> str:
        folder = fresh("journal")
        (folder / FILE_NAME).write_bytes(data)
        opened = Journal.open(folder, "test")
        try:
            opened.begin_epoch()
            opened.latest_snapshot()
        finally:
            opened.close()
        records_of(folder)
        return "taken"

    return Target("journal", mutated(lambda: [journal_bytes()]), feed, (ConfigError, FatalError, RetryLater))


def archive() -> Target:
    @lru_cache(maxsize=1)
    def seed() -> bytes:
        folder = fresh("seed-archive")
        with closing(sqlite3.connect(_journal_file(folder))) as connection:
            rows = connection.execute(f"{RECORDS} LIMIT 5", (0,)).fetchall()
        return write_segment(folder, [JournalRecord(*row) for row in rows]).path.read_bytes()

    def feed(data: bytes) -> str:
        folder = fresh("archive")
        (folder / FOLDER).mkdir()
        with closing(sqlite3.connect(_journal_file(folder))) as connection:
            (digest,) = connection.execute("SELECT digest FROM records WHERE number = 5").fetchone()
            connection.execute("DELETE FROM records WHERE number <= 5")
            set_base(connection.cursor(), 5, digest)
            connection.commit()
        (folder / FOLDER / "0000000001-0000000005.jsonl").write_bytes(data)
        records_of(folder)
        return "taken"

    return Target("archive", st.one_of(mutated(lambda: [seed()]), st.sampled_from(NESTED)), feed, (FatalError,))


def tape() -> Target:
    @lru_cache(maxsize=1)
    def seed() -> bytes:
        path = fresh("seed-tape") / "tape"
        with Tape(path, "slave", "s0") as written:
            for n in range(4):
                written.write("staged", "cause", push=PushId(ClusterId("a"), Incarnation(1, 1), n), digest=b"d" * 16)
        return path.read_bytes()

    def feed(data: bytes) -> str:
        path = fresh("tape") / "tape"
        path.write_bytes(data)
        return f"{min(9, sum(1 for _ in read_tape(path)))} events"

    inputs = st.one_of(mutated(lambda: [seed()]), st.sampled_from([nest + b"\n" for nest in NESTED]))
    return Target("tape", inputs, feed, (ConfigError,))


@lru_cache(maxsize=1)
def session_json() -> bytes:
    push = PushId(ClusterId("a"), Incarnation(1, 1), 4)
    work = Work((DataRange(1, 0, 3, 0, 100),), 100, 4, 1.5, 4)
    session = SavedSession(
        run_id="run", cluster_id="a", layout_hash=b"l" * 32, data_digest=b"d", incarnation=Incarnation(1, 1), seq=5,
        base=Version(1, 2), base_fence=3, local_steps=16, tokens=900, steps_since_snapshot=2, steps_towards_push=2,
        leases_asked=7, held=(DataRange(1, 0, 5, 0, 10),), pending=Work((), 0, 0, 0.0, 0),
        push=PushRecord(push, Version(1, 1), 2, work, Version(1, 1)),
        last_verdict=Verdict(push, VerdictKind.APPLIED, Version(1, 2), "", False, RoundId(1, 3)),
    )  # fmt: skip
    return as_json(session.to_json())


def saved_session() -> Target:
    return Target("saved session", json_inputs(session_json), taking_json(SavedSession.from_json), (SavedStateError,))


def checkpoint() -> Target:
    @lru_cache(maxsize=1)
    def files() -> dict[str, bytes]:
        folder = fresh("seed-checkpoint")
        with CheckpointStore(folder, 2) as store:
            data = np.arange(N, dtype=np.float32).view(np.uint8)
            store.write({"session": json.loads(session_json())}, {"theta": RawTensor("F32", (N,), data)})
            store.record_push(push_from_json(json.loads(session_json())["push"]))
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.stat().st_size}

    def feed(folder: Path) -> str:
        with CheckpointStore(folder, 2) as store:
            found, sentences = newest_of(store)
            push, why = store.newest_push()
        if (found is None) != bool(sentences) or (push is None) != bool(why):
            raise Broken("a file that cannot be used has no sentence")
        return f"checkpoint {'taken' if found else 'skipped'}, push {'taken' if push else 'skipped'}"

    return one_of_files("checkpoint", files, feed, ConfigError, CheckpointError)


def state_tree() -> Target:
    """The skeleton of an inner optimizer's state."""
    state = {"state": {0: {"step": 3, "exp_avg": 1.5}}, "groups": [(1, 2.5, None)], "name": "adam"}

    def seed() -> bytes:
        return as_json(flatten(state)[0])

    feed = taking_json(lambda raw: unflatten(raw, {}))
    return Target("state tree", json_inputs(seed), feed, (StateTreeError, RecursionError))


def untrained_list() -> Target:
    """What the ledger holds of frozen parameters and buffers. The first byte says whether the rest is packed first."""
    right = Untrained(tuple(TensorDigest(f"layers.{n}.weight", n) for n in range(40)))

    def feed(data: bytes) -> str:
        text = base64.b85encode(zlib.compress(data[1:])) if data[:1] == b"\x01" else data[1:]
        Untrained.from_text(text.decode("utf-8", "replace"))
        return "taken"

    inside = zlib.decompress(base64.b85decode(right.to_text()))
    inputs = [mutated(lambda: [right.to_text().encode()]), json_inputs(lambda: inside)]
    return Target("untrained list", numbered(inputs), feed, (ValueError,))


def fill_file() -> Target:
    """What a person gives `dips export --fill`, in safetensors."""
    tensors = {"w": np.arange(N, dtype=np.float32), "b": np.zeros((2, 3), np.float32)}
    state = b"".join(serialized(tensors, {"format": "pt"}))

    def feed(data: bytes) -> str:
        path = fresh("fill") / "state.safetensors"
        path.write_bytes(data)
        return f"{len(read_state(path))} tensors"

    return Target("fill file", mutated(lambda: [state]), feed, (ConfigError,))


def model_description() -> Target:
    """What a layout, or an export's metadata, says of the model beside its parameters."""
    lacks = (Lacking("base.w", (3, 4), "bfloat16", 7), Lacking("norm.mean", (4,), "float32"))
    right = ModelDescription({"model_type": "llama"}, "model.", ("base.w", "norm.mean"), 2, lacks)

    def feed(data: bytes) -> str:
        found = description_from_json(data.decode("utf-8", "replace"))
        return "empty" if found is None else "taken"

    return Target("model description", json_inputs(lambda: right.to_json().encode()), feed, (ConfigError,))


TARGETS: tuple[Callable[[], Target], ...] = (
    *(manifest, slave_directory, commit_record, ledger, journal, archive, tape, saved_session, checkpoint, state_tree),
    *(untrained_list, fill_file, model_description),
)
