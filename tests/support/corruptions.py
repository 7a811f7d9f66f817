"""Everything that can go wrong with a recorded run's files, one named corruption each, and what must be said of it.

A run's directory is copied, one corruption is applied, and `dips verify --replay` must not say ok. Most are those of
somebody who knows the formats: every digest and checksum fits afterwards, so that only a comparison of records with
one another can find them (tests/support/forge.py). The directory is as tests/support/whole_run.py makes it.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file
from support.forge import Record, edit_journal, edit_tape, journal_sql

from dips.core.errors import DipsError
from dips.judge.replay import FOLDER as PUSHES
from dips.judge.verify import verify_run
from dips.master.archive import FILE_NAME, FOLDER
from dips.master.directory import TAPE_NAME
from dips.slave.disk import IDENTITY, LocalDisk, json_sum, write_small
from dips.slave.disk import NAME as PROMISE

Apply = Callable[[Path], object]


@dataclass(frozen=True)
class Corruption:
    """kind: which durable files it touches. finds: a piece of what must be said."""

    name: str
    kind: str
    apply: Apply
    finds: str


def judged(run: Path) -> tuple[int, str]:
    """The exit code of `dips verify --replay` and all that it says, in this process."""
    try:
        report = verify_run(run, replay=True)
    except DipsError as error:
        return error.exit_code, str(error)
    said = [*map(str, report.violations), *report.problems, *report.unproven, *report.notes]
    return report.exit_code, "\n".join([report.verdict, *said])


def commits(records: list[Record]) -> list[Record]:
    return [record for record in records if record["kind"] == "COMMIT" and record["judgement"]]


def in_commit(change: Callable[[Record], object], index: int = 0) -> Apply:
    """Change a judged COMMIT in the journal: by default an old one, of which no manifest is left."""
    return lambda run: edit_journal(run / "master", lambda records: change(commits(records)[index]))


def in_judgement(**numbers: str) -> Apply:
    return in_commit(lambda record: record["judgement"].update(numbers))


def in_step(**numbers: str) -> Apply:
    return in_commit(lambda record: record["judgement"]["outer_step"].update(numbers))


def in_participant(change: Callable[[Record], object], index: int = 0) -> Apply:
    return in_commit(lambda record: change(record["participants"][-1]), index)


def without_record(kind: str, index: int = -1, **options: bool) -> Apply:
    def drop(records: list[Record]) -> None:
        gone = [record for record in records if record["kind"] == kind][index]
        records[:] = [record for record in records if record is not gone]

    return lambda run: edit_journal(run / "master", drop, **options)


def sql(statement: str) -> Apply:
    def apply(run: Path) -> None:
        with journal_sql(run / "master") as cursor:
            cursor.execute(statement)
            assert cursor.rowcount != 0, f"nothing was changed by: {statement}"

    return apply


def tape_of(run: Path, name: str) -> Path:
    if name == "master":
        return run / "master" / TAPE_NAME
    return run / f"{name}.jsonl" if (run / f"{name}.jsonl").is_file() else run / name / "tape.jsonl"


def in_line(name: str, kind: str, index: int = -1, *, rechain: bool = True, **fields: object) -> Apply:
    def change(lines: list[Record]) -> None:
        [line for line in lines if line["kind"] == kind][index].update(fields)

    return lambda run: edit_tape(tape_of(run, name), change, rechain=rechain)


def without_lines(name: str, *kinds: str, rechain: bool = True, index: int | None = None) -> Apply:
    def change(lines: list[Record]) -> None:
        gone = [line for line in lines if line["kind"] in kinds]
        gone = gone if index is None else [gone[index]]
        lines[:] = [line for line in lines if not any(line is other for other in gone)]

    return lambda run: edit_tape(tape_of(run, name), change, rechain=rechain)


def cut_in_half(name: str) -> Apply:
    """At a line's end, so that every digest that is left fits."""

    def apply(run: Path) -> None:
        path = tape_of(run, name)
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[: len(lines) // 2]))

    return apply


def without_field(name: str, kind: str, field: str) -> Apply:
    def change(lines: list[Record]) -> None:
        for line in lines:
            if line["kind"] == kind:
                line.pop(field, None)

    return lambda run: edit_tape(tape_of(run, name), change)


def times_ten(lines: list[Record]) -> None:
    for line in lines:
        if line["kind"] in ("push_begun", "push_sent"):
            line["tokens"] *= 10


def remove(*patterns: str) -> Apply:
    def apply(run: Path) -> None:
        found = [path for pattern in patterns for path in run.glob(pattern)]
        assert found, f"nothing is called {patterns}"
        for path in found:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return apply


def swap(*names: str) -> Apply:
    def apply(run: Path) -> None:
        pairs = {path.relative_to(run / "s0") for name in names for path in (run / "s0").glob(name)}
        assert pairs, f"nothing is called {names}"
        for name in pairs:
            ours, theirs = (run / "s0" / name), (run / "s1" / name)
            first, second = ours.read_bytes(), theirs.read_bytes()
            ours.write_bytes(second)
            theirs.write_bytes(first)

    return apply


def newest_manifest(run: Path, slave: str = "s0") -> Path:
    found = {path: json.loads(path.read_bytes())["body"]["version"] for path in (run / slave).glob("manifest-*.json")}
    return max(found, key=lambda path: tuple(map(int, found[path].split(":"))))


def in_manifest(change: Callable[[Record], object], *, resum: bool = True) -> Apply:
    def apply(run: Path) -> None:
        path = newest_manifest(run)
        outer = json.loads(path.read_bytes())
        change(outer["body"])
        if resum:
            outer["xxh3_128"] = json_sum(outer["body"], compact=True)
        path.write_text(json.dumps(outer, indent=1))

    return apply


def in_record_of_manifest(**fields: object) -> Callable[[Record], object]:
    def change(body: Record) -> None:
        record = json.loads(body["commit_record"])
        record.update(fields)
        body["commit_record"] = json.dumps(record, sort_keys=True, separators=(",", ":"))
        body["commit_hash"] = hashlib.sha256(body["commit_record"].encode()).hexdigest()

    return change


def in_round(change: Callable[[Record], object], *, resum: bool = True) -> Apply:
    def apply(run: Path) -> None:
        path = rounds(run)[-1]
        told = json.loads(path.read_bytes())
        change(told)
        path.write_text(json.dumps(told | ({"xxh3_128": json_sum(told, compact=True)} if resum else {}), indent=1))

    return apply


def rounds(run: Path) -> list[Path]:
    found = (run / "s0" / PUSHES).glob("round-r*.json")
    return sorted(found, key=lambda path: [int(part) for part in path.stem.removeprefix("round-r").split(".")])


def in_push(*, resum: bool) -> Apply:
    """Add 1 to an element of a push of the newest recorded round of s0."""

    def apply(run: Path) -> None:
        path = rounds(run)[-1]
        told = json.loads(path.read_bytes())
        file = path.with_name(told["accepted"][0]["file"])
        push = load_file(file)["push"].copy()
        push[0] += 1.0
        save_file({"push": push}, file)
        if resum:
            told["accepted"][0]["xxh3_128"] = _sum(file)
            path.write_text(json.dumps(told | {"xxh3_128": json_sum(told, compact=True)}, indent=1))

    return apply


def _sum(path: Path) -> str:
    import xxhash

    return xxhash.xxh3_128_hexdigest(path.read_bytes())


def only_the_first_round(run: Path) -> None:
    for slave in ("s0", "s1"):
        folder = run / slave / PUSHES
        for path in folder.iterdir():
            if not path.name.startswith(("r1.1-", "round-r1.1.")):
                path.unlink()


def small(name: str, **fields: object) -> Apply:
    def apply(run: Path) -> None:
        body = json.loads((run / "s0" / name).read_bytes())
        body.pop("xxh3_128")
        write_small(LocalDisk(run / "s0"), name, body | fields)

    return apply


def in_archive(change: Callable[[list[str]], object], index: int = 0) -> Apply:
    """Of those that archived() names."""

    def apply(run: Path) -> None:
        path = archived(run)[index]
        lines = path.read_text().splitlines(keepends=True)
        change(lines)
        path.write_text("".join(lines))

    return apply


def remove_segment(index: int) -> Apply:
    """Of those that archived() names."""

    def apply(run: Path) -> None:
        archived(run)[index].unlink()

    return apply


def archived(run: Path) -> list[Path]:
    """The files of the archive whose records the journal itself has no more, oldest first: a master that is killed may
    leave a file that is being written, or one whose records stand in both places."""
    with journal_sql(run / "master") as cursor:
        first = int(cursor.execute("SELECT min(number) FROM records").fetchone()[0])
    files = sorted((run / "master" / FOLDER).glob("*.jsonl"))
    return [file for file in files if int(file.stem.partition("-")[2]) < first]


def other_tokens(lines: list[str]) -> None:
    lines[1] = lines[1].replace("incarnation", "incarnatiom", 1).replace("layout_hash", "layout_hasj", 1)


def swapped_lines(lines: list[Any]) -> None:
    lines[2], lines[3] = lines[3], lines[2]


CORRUPTIONS = (
    # The journal, by an attacker who computes every digest again, on the master's tape too.
    Corruption("kappa", "journal", in_judgement(kappa="0.125"), "kappa"),
    Corruption("momentum_decay", "journal", in_step(momentum_decay="0.5"), "momentum_decay"),
    Corruption("momentum_lookahead", "journal", in_step(momentum_lookahead="0.5"), "momentum_lookahead"),
    Corruption("gradient_weight", "journal", in_step(gradient_weight="0.5"), "gradient_weight"),
    Corruption("s_max", "journal", in_commit(lambda r: r.update(s_max=80)), "s_max = 80"),
    Corruption("base", "journal", in_participant(lambda p: p.update(base=[1, 1]), 2), "base"),
    Corruption("steps", "journal", in_participant(lambda p: p.update(steps=99)), "steps"),
    Corruption("fence", "journal", in_participant(lambda p: p.update(fence=p["fence"] + 5)), "fence"),
    Corruption("attempt", "journal", in_participant(lambda p: p.update(attempt=7)), "attempt"),
    Corruption("tokens of a push", "journal", in_participant(lambda p: p.update(tokens=p["tokens"] * 10)), "tokens"),
    Corruption("a push's verdict", "journal", in_participant(lambda p: p.update(verdict="EXCLUDED")), "I6"),
    Corruption("a push is left out", "journal", in_commit(lambda r: r["participants"].pop()), "I7"),
    Corruption(
        "digest of a shard", "journal", in_commit(lambda r: r["digests"].update(s0="ab" * 16)), "I5: the COMMIT of"
    ),
    Corruption("round", "journal", in_commit(lambda r: r.update(round=[1, 99]), -1), "r1.99"),
    Corruption("a COMMIT is gone", "journal", without_record("COMMIT", 2), "I7"),
    Corruption("the newest COMMIT is gone", "journal", without_record("COMMIT"), "no record in the journal made it"),
    Corruption("wall clock of the newest", "journal", in_commit(lambda r: r.update(wall_s=1.0), -1), "says wall_s"),
    # The same without the master's tape, or without any digest.
    Corruption("the end is gone", "journal", without_record("LEAVE", retell=False), "end is lost"),
    Corruption("a record was edited", "journal", sql(
        # Any record: the last COMMIT may be in the archive.
        "UPDATE records SET record_json = record_json || ' ' WHERE number = (SELECT MAX(number) - 3 FROM records)"
    ), "its digest differs"),
    Corruption("kind", "journal", sql(
        "UPDATE records SET kind = CASE kind WHEN 'LEASE' THEN 'VOID' ELSE 'LEASE' END "
        "WHERE number = (SELECT MAX(number) - 3 FROM records)"
    ), "digest differs"),
    Corruption("entry_id", "journal", sql("UPDATE records SET entry_id = entry_id + 900"), "its digest differs"),
    Corruption("a row is gone", "journal", sql(
        "DELETE FROM records WHERE number = (SELECT MAX(number) - 9 FROM records)"), "its digest differs"),
    Corruption("epoch", "journal", sql("UPDATE meta SET value = '9' WHERE key = 'epoch'"), "meta"),
    Corruption("run id", "journal", sql("UPDATE meta SET value = 'tess' WHERE key = 'run_id'"), "meta"),
    Corruption("pruned", "journal", sql("INSERT INTO meta VALUES ('pruned', '60')"), "meta"),
    Corruption("ledger", "journal", sql(
        "UPDATE snapshot SET snapshot_json = replace(snapshot_json, '\"tokens\":', '\"tokens\":1')"
    ), "newest state is not what was written"),
    Corruption("no ledger", "journal", sql("DELETE FROM snapshot"), "newest state"),
    # Tapes, with fitting digests.
    Corruption("prepared is gone", "slave tape", without_lines("s0", "prepared"), "no record says that slave s0"),
    Corruption("one prepared is gone", "slave tape", without_lines("s1", "prepared", index=2), "that slave s1"),
    Corruption("finite is gone", "slave tape", without_field("s0", "prepared", "finite"), "I13"),
    Corruption("not finite", "slave tape", in_line("s0", "prepared", finite=False), "not finite"),
    Corruption("staged is gone", "slave tape", without_lines("s0", "staged", index=3), "recorded that it had all"),
    Corruption("staged otherwise", "slave tape", in_line("s0", "staged", digest="cd" * 16), "I9"),
    Corruption("prepared otherwise", "slave tape", in_line("s0", "prepared", digest="cd" * 16), "I5"),
    Corruption("committed otherwise", "slave tape", in_line("s0", "committed", commit_hash="cd" * 32), "I1"),
    Corruption("measured otherwise", "slave tape", in_line("s0", "measured", gram=["1.0"] * 3), "I18"),
    Corruption("its end is gone", "slave tape", cut_in_half("s0"), "I5"),
    Corruption("tokens times ten", "cluster tape", lambda run: edit_tape(tape_of(run, "a"), times_ten), "its cluster"),
    Corruption("steps", "cluster tape", in_line("a", "push_begun", 2, steps=5000), "its cluster began it with"),
    Corruption("base", "cluster tape", in_line("a", "push_sent", 2, base="1:0"), "its cluster sent"),
    Corruption("digests that were sent", "cluster tape", in_line(
        "a", "push_sent", 2, digest_of_slave={"s0": "ef" * 16, "s1": "ef" * 16}), "I9"),
    Corruption("pushes are gone", "cluster tape", without_lines("b", "push_begun", "push_sent"), "were taken out"),
    Corruption("a torn model", "cluster tape", in_line(
        "b", "installed", digest_of_slave={"s0": "ef" * 16, "s1": "ef" * 16}), "I3"),
    Corruption("another verdict", "cluster tape", in_line("b", "verdict", 2, verdict="EXCLUDED"), "I6"),
    Corruption("its end is gone", "cluster tape", cut_in_half("b"), "ends with push"),
    Corruption("kappa", "master tape", in_line("master", "judged", 1, kappa=0.125), "kappa"),
    Corruption("accepted", "master tape", in_line("master", "judged", 1, accepted=["z"]), "accepted"),
    Corruption("s_max", "master tape", in_line("master", "commit", 2, s_max=80), "s_max"),
    Corruption("published tokens", "master tape", in_line("master", "publish", 2, tokens=7), "I4"),
    Corruption("tickets are gone", "master tape", without_lines("master", "ticket", index=3), "tape has no ticket for"),
    Corruption("a ticket's tokens", "master tape", in_line("master", "ticket", 3, tokens=7), "its ticket says"),
    Corruption("journaled otherwise", "master tape", in_line("master", "journaled", digest="0" * 32), "digest for it"),
    Corruption("its end is gone", "master tape", cut_in_half("master"), "ends with record"),
    # Tapes, by an attacker who does not know the digests.
    Corruption("a line was edited", "slave tape", in_line("s0", "staged", rechain=False, attempt=9), "tape.jsonl"),
    Corruption("a line is gone", "cluster tape", without_lines("a", "verdict", rechain=False, index=1), "a.jsonl"),
    Corruption("lines were swapped", "master tape", lambda run: edit_tape(
        tape_of(run, "master"), swapped_lines, rechain=False), "master.tape.jsonl"),
    # What is not there.
    Corruption("no tape", "cluster tape", remove("a.jsonl"), "the tape of cluster a is missing"),
    Corruption("no tape", "slave tape", remove("s0/tape.jsonl"), "the tape of slave s0 is missing"),
    Corruption("no tape", "master tape", remove(f"master/{TAPE_NAME}"), "the tape of the master is missing"),
    Corruption("all manifests and snapshots are gone", "manifest", remove("s?/manifest-*", "s?/ring-*"), "no manifest"),
    Corruption("those of one slave are gone", "manifest", remove("s1/manifest-*", "s1/ring-*"), "disk of slave s1"),
    Corruption("the newest is gone", "manifest", lambda run: newest_manifest(run).unlink(), "disk of slave s0"),
    Corruption("the files are gone", "snapshot", remove("s0/ring-*"), "No such file"),
    Corruption("a slave's directory is gone", "snapshot", remove("s0"), "the tape of slave s0 is missing"),
    # Manifests and snapshots.
    Corruption("its record", "manifest", in_manifest(in_record_of_manifest(s_max=80)), "s_max = 8 in the journal"),
    Corruption("its digest", "manifest", in_manifest(lambda body: body.update(digest="ab" * 16)), "ring-"),
    Corruption("no checksum", "manifest", in_manifest(lambda body: body.update(round="r1.1"), resum=False), "altered"),
    Corruption("of the other slave", "manifest", swap("manifest-*"), "manifest names"),
    Corruption("of the other slave, with the files", "manifest", swap("manifest-*", "ring-*"), "holds files of slave"),
    Corruption("files of the other slave", "snapshot", swap("ring-*"), "manifest names"),
    Corruption("tapes of the other slave", "slave tape", swap("tape.jsonl"), "holds files of slave"),
    # A slave's small files.
    Corruption("an older promise", "promise", small(PROMISE, promised_epoch=0), "promised epoch"),
    Corruption("a promise of no epoch", "promise", small(PROMISE, promised_epoch=40), "which the journal never began"),
    Corruption("another slave", "identity", small(IDENTITY, slave_id="s1"), "is the directory of slave s1"),
    Corruption("another run", "identity", small(IDENTITY, run_id="other"), "belongs to run 'other'"),
    # Recorded pushes.
    Corruption("only the first round is left", "recorded push", only_the_first_round, "were not computed again"),
    Corruption("one push is gone", "recorded push", lambda run: rounds(run)[2].with_name("r1.3-0.safetensors").unlink(),
               "cannot be read"),
    Corruption("one round is gone", "recorded push", lambda run: rounds(run)[2].unlink(), "were not computed again"),
    Corruption("those of one slave are gone", "recorded push", remove("s1/pushes"), "slave s1 recorded no pushes"),
    Corruption("another push", "recorded push", in_push(resum=True), "is recorded as"),
    Corruption("another push, unsummed", "recorded push", in_push(resum=False), "its checksum differs"),
    Corruption("another weight", "recorded push", in_round(
        lambda told: told["accepted"][0].update(weight=0.125)), "weights"),
    Corruption("another outer_lr", "recorded push", in_round(lambda told: told.update(outer_lr=0.6)), "outer_lr 0.6"),
    Corruption("another scale, unsummed", "recorded push", in_round(
        lambda told: told.update(scale=0.123), resum=False), "its checksum differs"),
    Corruption("rounds of the other slave", "recorded push", swap("pushes/round-*"), "is not what was written"),
)  # fmt: skip
"""Of any run."""

OF_A_LONG_RUN: tuple[Corruption, ...] = (
    Corruption("ranges", "journal", in_participant(lambda p: p["ranges"][0].__setitem__(2, 99)), "ranges"),
    Corruption("a LEASE is gone", "journal", without_record("LEASE", 50, retell=False), "not the one that was written"),
    Corruption("a line was edited", "archive", in_archive(other_tokens), "its digest differs"),
    Corruption("a line is gone", "archive", in_archive(lambda lines: lines.pop(1)), "its digest differs"),
    Corruption("lines were swapped", "archive", in_archive(swapped_lines), "its digest differs"),
    Corruption("the newest file is gone", "archive", remove_segment(-1), "ends at record"),
    Corruption("the oldest file is gone", "archive", remove_segment(0), "digest differs"),
    Corruption("all of it is gone", "archive", remove("master/archive"), "are missing, and it does not say"),
    Corruption("only in memory", "slave tape", in_line("s0", "committed", 2, durable=False), "I4"),
)
"""Of one that has leases and an archive, and keeps few snapshots."""


@dataclass(frozen=True)
class Flips:
    """One kind of durable file. prepare: before a bit is flipped."""

    kind: str
    path: Callable[[Path], Path]
    prepare: Apply = lambda run: None


def _journal_content(path: Path) -> object:
    """What SQLite reads in the file and its -wal, by a copy of both: free space in pages is no content."""
    folder = path.parent / "copy"
    folder.mkdir(exist_ok=True)
    try:
        for name in (FILE_NAME, f"{FILE_NAME}-wal"):
            if path.with_name(name).is_file():
                shutil.copy(path.with_name(name), folder / name)
        with closing(sqlite3.connect(folder / FILE_NAME)) as connection:
            tables = ("records", "snapshot", "meta")
            return [connection.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall() for table in tables]
    except (sqlite3.Error, UnicodeDecodeError) as error:
        return str(error)
    finally:
        shutil.rmtree(folder)


def _json_content(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        return str(error)


def content(path: Path) -> object:
    if path.name.startswith(FILE_NAME):
        return _journal_content(path)
    return _json_content(path) if path.suffix == ".json" else path.read_bytes()


def live_bytes(path: Path) -> int:
    """How much of a file holds content. A -wal is written from its beginning again and again, and keeps its size: its
    frames are those that carry the salt of its header (https://www.sqlite.org/fileformat.html, section 4)."""
    data = path.read_bytes()
    if not path.name.endswith("-wal"):
        return len(data)
    frame_bytes, end = 24 + int.from_bytes(data[8:12]), 32
    while data[end + 8 : end + 16] == data[16:24]:
        end += frame_bytes
    return end


def flip(path: Path, rng: random.Random) -> tuple[int, int]:
    data = bytearray(path.read_bytes())
    at, bit = rng.randrange(live_bytes(path)), rng.randrange(8)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    return at, bit


FLIPS = (
    Flips("journal", lambda run: run / "master" / FILE_NAME, lambda run: sql("SELECT 1")(run)),
    Flips("journal's -wal", lambda run: run / "master" / f"{FILE_NAME}-wal"),
    Flips("archive", lambda run: min((run / "master" / FOLDER).iterdir())),
    Flips("master tape", lambda run: tape_of(run, "master")),
    Flips("slave tape", lambda run: tape_of(run, "s1")),
    Flips("cluster tape", lambda run: tape_of(run, "b")),
    Flips("manifest", newest_manifest),
    Flips("snapshot", lambda run: newest_manifest(run).with_name(
        json.loads(newest_manifest(run).read_bytes())["body"]["file"])),
    Flips("promise", lambda run: run / "s0" / PROMISE),
    Flips("identity", lambda run: run / "s0" / IDENTITY),
    Flips("recorded round", lambda run: rounds(run)[-1]),
    Flips("recorded push", lambda run: rounds(run)[-1].with_name(
        json.loads(rounds(run)[-1].read_bytes())["accepted"][0]["file"])),
)  # fmt: skip
