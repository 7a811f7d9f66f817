"""Checks that a run's records are complete, and that records of the same fact by different processes agree.

The invariants judge what a record says; this module judges whether it can be trusted. A digest shows that a file
changed; here the same fact is looked up in every other place that has it, so that one record that was changed together
with its digest contradicts the others. It must never judge a promise about state: that is the invariants' work.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from dips.core.errors import ConfigError
from dips.judge.coverage import COVERED, KILLED, Coverage
from dips.judge.facts import (
    DECISIONS,
    MERGES,
    Fact,
    Fields,
    History,
    Pair,
    PushKey,
    decision_of,
    pair,
    push_of,
    say_push,
    say_round,
    say_version,
)
from dips.judge.invariants import Violation
from dips.judge.records import RunRecords
from dips.master.archive import EPOCH
from dips.slave import disk as promise
from dips.slave.disk import IDENTITY, KEYS, LocalDisk, read_promise, read_small

NAME = "records"
PROMISE = "What the processes recorded is whole, and agrees."

SPEAKS = frozenset(
    {
        *(("master", kind) for kind in ("journaled", "publish", "judged", "ticket", "commit", "master-ended")),
        *(("worker", kind) for kind in ("push_begun", "push_sent", "left")),
        *(("slave", kind) for kind in ("promised", "persisted", "stopped")),
    }
)
"""Role and kind of the tape lines that are compared here."""

MASTER = ("master", "master")
"""Role and name of the master in gaps and in --without-tape; its tape has the run's name."""

MAX_SENTENCES = 20
"""How many sentences are kept of one kind of difference: the first ones explain the others."""


@dataclass
class Evidence:
    """The result."""

    judged: int = 0  # how many records were compared
    violations: list[Violation] = field(default_factory=list)

    def differs(self, sentence: str, where: str) -> None:
        """Report that two records do not agree."""
        if sum(violation.fact == where for violation in self.violations) < MAX_SENTENCES:
            self.violations.append(Violation(NAME, sentence, where))


def judge_evidence(records: RunRecords, history: History, without: Collection[str] = ()) -> Evidence:
    """Compare each record with all other records of the same fact; what is missing is added to records.unproven, or to
    records.notes if the caller knows of it.

    history: what the invariants collected from the records; gaps that are found here are added to it. without: names of
    processes (`master` is one) of which no other tape, or no more of it, was ever written, as the caller says.
    """
    found = Evidence()
    _missing_manifests(records, history, without, found)
    for compare in (
        _journal_against_tape, _newest_state, _records_of_manifests, _decisions_against_master, _pushes_against_tapes,
        _directories, _other_journals,
    ):  # fmt: skip
        try:
            compare(records, history, found)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            records.problems.append(f"a record lacks fields that others of its kind have ({error!r}): it was changed")
    _incomplete_tapes(records, history, without)
    return found


# ---- what is missing ----


def _incomplete_tapes(records: RunRecords, history: History, without: Collection[str]) -> None:
    """Report tapes of processes that the journal names which are missing, or do not cover the whole run: what only
    these could contradict is not proven."""
    commits = history.commits.values()
    named = {("slave", slave) for made in commits for slave in made.digests}
    named |= {("worker", item.push[0]) for made in commits for item in made.participants}
    missing = {who for who in named if who not in records.tapes}
    if not any(role == "master" for role, _ in records.tapes):
        missing.add(MASTER)
    for who in sorted({*missing, *history.gaps}):
        name = who[1]
        if who in missing:
            said, how = f"the tape of {_whose(who)} is missing", f"put it into the directory ({_WRITTEN_TO[who[0]]})"
        else:
            # What a tape does not cover, and what other records say that it should have lines about.
            gap = history.gaps[who]
            files = [
                str(path)
                for other, tape in records.tapes.items()
                for path in tape.files
                if other == who or (other[0] == "master" and who == MASTER)
            ]
            things = sorted(gap.things, key=lambda thing: (_DIGITS.sub("", thing), [*map(int, _DIGITS.findall(thing))]))
            lines = f"lines about {things[0]}" + (
                f" and {len(things) - 1} more, up to {things[-1]}" if things[1:] else ""
            )
            places = " and ".join(gap.places)
            said = f"the tape of {_whose(who)} ({', '.join(files)}) {places}, so that {lines} are missing"
            how = "put the file that has them into the directory"
        if name in without:
            records.notes.append(f"{said}; what only it could contradict is not judged (--without-tape {name})")
        else:
            records.unproven.append(f"{said}: {how}, or give --without-tape {name} if there is none")


def _whose(who: tuple[str, str]) -> str:
    role, name = who
    return "the master" if role == "master" else f"{'cluster' if role == 'worker' else role} {name}"


_WRITTEN_TO = {
    "master": "a master writes master.tape.jsonl in its own",
    "slave": "a slave writes NAME.tape.jsonl in its own, or the file that --tape names",
    "worker": "a cluster writes NAME.tape.jsonl in its checkpoint_dir, or the file that DIPS_WORKER_TAPE names",
}

_DIGITS = re.compile(r"\d+")


def _missing_manifests(records: RunRecords, history: History, without: Collection[str], found: Evidence) -> None:
    """Check that a version that was published and on disk is still there, or a newer one."""
    published = [pair(line.fields.get("version")) for line in records.lines["master"] if line.kind == "publish"]
    newest = next((version for version in reversed(published) if version in history.commits), None)
    if newest is None:
        return
    for slave in sorted(history.commits[newest].digests):
        if slave in without and ("slave", slave) not in records.tapes:
            continue
        wanted: Pair | None = newest
        if not history.is_sync:
            lines = (line for line in records.lines["slave"] if line.who == slave and line.kind == "persisted")
            wanted = max((version for line in lines if (version := pair(line.fields.get("version")))), default=None)
        here = [
            version for item in records.manifests if item.slave == slave and (version := pair(item.body["version"]))
        ]
        found.judged += 1
        if wanted is not None and max(here, default=(0, -1)) < wanted:
            have = f"the newest is {say_version(max(here))}" if here else "there is none"
            records.unproven.append(
                f"version {say_version(wanted)} was on the disk of slave {slave}, but no manifest of it, or of a newer "
                f"one, was found ({have}): the slave's directory was emptied or moved"
            )


# ---- the journal's newest state, and the records that manifests carry ----


def _newest_state(records: RunRecords, _: History, found: Evidence) -> None:
    """Check that the ledger of the last record belongs to the newest decision."""
    ledger, decisions = records.ledger, [record for record in records.journal if record["kind"] in MERGES]
    if not ledger or not decisions or not records.rows:
        return
    found.judged += 1
    newest, commit = decisions[-1], ledger.get("commit")
    where = "journal snapshot"
    if ledger.get("tokens") != newest.get("tokens"):
        found.differs(
            f"the journal's newest state has {ledger.get('tokens')} tokens, its newest version {newest.get('tokens')}",
            where,
        )
    if commit is None:
        return  # edited by hand: a master always keeps the record of its version
    if commit["version"] != newest["version"] or commit["digests"] != newest["digests"]:
        found.differs("the journal's newest state is of another version than its newest decision", where)
    if newest["kind"] != "ADOPT":
        _same_record(newest, str(commit["record"]), "the journal's newest state", where, found)
    commit_hash = hashlib.sha256(str(commit["record"]).encode()).hexdigest()
    same = say_version(pair(commit["version"])), say_round(pair(commit["round"]))
    for stored in records.manifests:
        said = stored.body
        if (said.get("version"), said.get("round")) == same:
            found.judged += 1
            if said.get("commit_hash") != commit_hash:
                found.differs(
                    f"version {said['version']} has another COMMIT record in the manifest of slave {stored.slave} than "
                    "in the journal's newest state",
                    f"manifest {stored.slave}",
                )


def _records_of_manifests(records: RunRecords, _: History, found: Evidence) -> None:
    """Compare the record in each manifest, which includes the ledger, with the journal's, which does not."""
    by_name: dict[tuple[str, Pair | None, Pair | None], Fields] = {
        (record["kind"], pair(record["version"]), pair(record["round"])): record
        for record in records.journal
        if record["kind"] in MERGES and record.get("version") is not None
    }
    for stored in records.manifests:
        text = str(stored.body.get("commit_record", ""))
        try:
            raw = json.loads(text)
            key = (str(raw["kind"]), pair(raw["version"]), pair(raw["round"]))
        except (ValueError, KeyError, TypeError):
            continue  # edited by hand; a slave refuses it at its start
        if key in by_name:
            where = f"the manifest of version {stored.body['version']} on slave {stored.slave}"
            _same_record(by_name[key], text, where, f"manifest {stored.slave}", found)


def _same_record(journaled: Fields, text: str, where: str, fact: str, found: Evidence) -> None:
    raw = json.loads(text)
    found.judged += 1
    for name in sorted({*journaled, *raw} - {"ledger"}):
        if journaled.get(name) != raw.get(name):
            found.differs(
                f"the {journaled['kind']} of version {say_version(pair(journaled['version']))} says {name} = "
                f"{_short(journaled.get(name))} in the journal, but {_short(raw.get(name))} in {where}",
                fact,
            )


def _short(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 200 else text[:200] + "..."


# ---- decisions and pushes, as the master's and the clusters' tapes saw them ----


def _decisions_against_master(records: RunRecords, history: History, found: Evidence) -> None:
    """Compare the journal's judgements and staleness bounds (s_max) with those on the master's tape."""
    coverage = _coverage(records, history)
    judged: dict[Pair | None, list[Fields]] = {}
    committed: dict[Pair | None, list[Fields]] = {}
    for line in records.all_lines("master"):
        kinds = {"judged": judged, "commit": committed}
        if line.kind in kinds:
            kinds[line.kind].setdefault(pair(line.fields.get("round")), []).append(line.fields)
    for number, record in zip(_numbers(records), records.journal, strict=True):
        if record["kind"] not in ("COMMIT", "VOID") or record.get("round") is None:
            continue
        about = f"the {record['kind']} of round {say_round(pair(record['round']))}"
        judgement, said = record.get("judgement"), judged.get(pair(record["round"]), [])
        if judgement and said:
            found.judged += 1
            differing = [_judgement_differs(judgement, fields) for fields in said]
            if all(differing):
                found.differs(f"{about} says {differing[-1]}", "master judged")
        said = committed.get(pair(record["round"]), [])
        if record["kind"] == "COMMIT" and said:
            found.judged += 1
            if all(fields.get("s_max") != record.get("s_max") for fields in said):
                bound = said[-1].get("s_max")
                found.differs(
                    f"{about} says s_max = {record.get('s_max')}, but the master's tape says {bound}", "master commit"
                )
        elif record["kind"] == "COMMIT":
            place = coverage.master.place(int(record["epoch"]), number)
            if place not in (COVERED, KILLED):
                history.lacks(*MASTER, place, f"version {say_version(pair(record['version']))}", "I4")
            elif place == COVERED and committed and not history.lossy and _since_commits_are_recorded(records, record):
                found.differs(f"the master's tape has no line about {about}", "master commit")


def _coverage(records: RunRecords, history: History) -> Coverage:
    return history.coverage if isinstance(history.coverage, Coverage) else Coverage(records)


def _numbers(records: RunRecords) -> list[int | None]:
    """The number of each record in the journal; None where the file itself was not read."""
    return [row.number for row in records.rows] if records.rows else [None] * len(records.journal)


def _since_commits_are_recorded(records: RunRecords, record: Fields) -> bool:
    """Whether the record is not older than the tape's first "commit" line: older releases did not write these lines."""
    first = next(line for line in records.all_lines("master") if line.kind == "commit")
    oldest, asked = pair(first.fields.get("round")), pair(record["round"])
    return oldest is not None and asked is not None and asked >= oldest


def _judgement_differs(judgement: Fields, said: Fields) -> str:
    """The first number of a judgement that differs on the tape; empty when none does."""
    norms = {str(cluster): norm for cluster, norm, *_ in judgement["norms"]}
    numbers = {name: (judgement[name], said.get(name)) for name in ("kappa", "rho", "merged_norm")}
    numbers |= {f"norm of {name}": (norm, (said.get("norms") or {}).get(name)) for name, norm in norms.items()}
    for name, (text, on_tape) in numbers.items():
        # JSON has neither NaN nor infinity: a tape has null for them.
        if (float(text) if math.isfinite(float(text)) else None) != on_tape:
            return f"{name} = {text}, but the master's tape says {on_tape}"
    if list(judgement["accepted"]) != list(said.get("accepted", ())):
        return f"that {judgement['accepted']} were accepted, but the master's tape says {said.get('accepted')}"
    return ""


def _pushes_against_tapes(records: RunRecords, history: History, found: Evidence) -> None:
    """Compare tokens, steps, base, fence and ranges of each decided push: cluster's tape, master's ticket, record."""
    begun, sent, tickets = (
        _by_push(records.all_lines("worker"), "push_begun"),
        _by_push(records.all_lines("worker"), "push_sent"),
        _by_push(records.all_lines("master"), "ticket"),
    )
    coverage = _coverage(records, history)
    for number, record in zip(_numbers(records), records.journal, strict=True):
        if record["kind"] not in ("COMMIT", "VOID"):
            continue
        for item in record.get("participants", ()):
            push = push_of(item["push"])
            recorded = {
                "tokens": item["tokens"], "base": pair(item["base"]), "fence": item["fence"],
                "attempt": item["attempt"], "steps": item.get("steps"), "ranges": item["ranges"],
            }  # fmt: skip
            about = f"push {say_push(push)} of the {record['kind']} of round {say_round(pair(record['round']))}"
            _one_push(about, recorded, sent.get(push), f"worker {push[0]}", "its cluster sent", found)
            _one_push(about, recorded, begun.get(push), f"worker {push[0]}", "its cluster began it with", found)
            _one_push(about, recorded, tickets.get(push), "master", "its ticket says", found)
            # The cluster writes its line before the first byte of the push, the master before its ticket.
            if push not in begun and push not in sent:
                place = coverage.of_push(push, pair(record.get("version")))
                whose = f"the tape of cluster {push[0]} has no line about"
                _unrecorded(history, ("worker", push[0]), place, f"{whose} {about}", push, found)
            if tickets and push not in tickets and not history.lossy:
                place = coverage.master.place(push[1], number)
                whose = "the master's tape has no ticket for"
                _unrecorded(history, MASTER, COVERED if place == KILLED else place, f"{whose} {about}", push, found)


def _unrecorded(
    history: History, who: tuple[str, str], place: str, sentence: str, push: PushKey, found: Evidence
) -> None:
    if place == COVERED:
        found.differs(f"{sentence}, although it has earlier and later ones: lines were taken out", " ".join(who))
    else:
        history.lacks(*who, place, f"push {say_push(push)}", NAME)


def _by_push(lines: Iterable[Fact], kind: str) -> dict[PushKey, list[Fields]]:
    by_push: dict[PushKey, list[Fields]] = {}
    for line in lines:
        if line.kind == kind:
            by_push.setdefault(push_of(line.fields["push"]), []).append(line.fields)
    return by_push


def _one_push(about: str, recorded: Fields, said: list[Fields] | None, fact: str, whose: str, found: Evidence) -> None:
    """Report when no line of the same attempt has the record's numbers."""
    same = [fields for fields in said or () if fields.get("attempt", recorded["attempt"]) == recorded["attempt"]]
    if said and not same and fact == "master":  # a cluster that was killed may not have recorded its last attempt
        found.differs(f"{about} has attempt = {recorded['attempt']}, for which no ticket was recorded", fact)
    if not same:
        return
    found.judged += 1
    differing = [_push_differs(recorded, fields, whose) for fields in same]
    if all(differing):
        found.differs(f"{about} has {differing[-1]}", fact)


def _push_differs(recorded: Fields, said: Fields, whose: str) -> str:
    """The first number of a push that differs from the record's; empty when none does."""
    theirs = {name: said[name] for name in ("tokens", "steps", "fence") if recorded[name] is not None and name in said}
    if "base" in said and pair(said["base"]) != recorded["base"]:
        theirs["base"] = said["base"]
    if "ranges" in said:
        names = ("lease_id", "pass_index", "chunk", "begin_tokens", "end_tokens")
        theirs["ranges"] = [[item[name] for name in names] for item in said["ranges"]]
    wrong = (name for name, value in theirs.items() if value != recorded[name])
    return next((f"{name} = {_short(recorded[name])}, but {whose} {_short(theirs[name])}" for name in wrong), "")


# ---- whose directory it is ----


def _directories(records: RunRecords, history: History, found: Evidence) -> None:
    """Check that a slave's directory holds only its own files, and that its promise is the one on its tape."""
    epochs = [int(record["epoch"]) for record in records.journal if "epoch" in record]
    epochs += [int(line.fields["epoch"]) for line in records.later if (line.source, line.kind) == ("master", "epoch")]
    for folder in sorted({path.parent for path in records.run_dir.rglob(IDENTITY)}):
        disk = LocalDisk(folder)
        try:
            owner = read_small(disk, IDENTITY, KEYS)
            promised = read_promise(disk) if promise.NAME in disk.names() else 0
        except (ConfigError, OSError) as error:
            records.problems.append(str(error))
            continue
        slave, fact = str(owner.get("slave_id")), f"directory {folder.name}"
        found.judged += 1
        if str(owner.get("run_id")) != records.run_id:
            found.differs(f"{folder} belongs to run {owner.get('run_id')!r}, the journal to {records.run_id!r}", fact)
        others = {item.slave for item in records.manifests if item.path.parent == folder} - {slave}
        others |= {n for (_, n), tape in records.tapes.items() if folder in {p.parent for p in tape.files}} - {slave}
        for other in sorted(others):
            found.differs(f"{folder} is the directory of slave {slave}, but holds files of slave {other}", fact)
        said = [line for line in records.lines["slave"] if line.who == slave and line.kind == "promised"]
        newest = max((int(line.fields["epoch"]) for line in said), default=0)
        if promised < newest:
            found.differs(
                f"slave {slave} promised epoch {newest}, as its tape says, but {folder / promise.NAME} says {promised}",
                fact,
            )
        if epochs and promised > max(epochs) and not history.lossy:
            found.differs(f"{folder / promise.NAME} promises epoch {promised}, which the journal never began", fact)
    _stray_manifests(records, found)


def _stray_manifests(records: RunRecords, found: Evidence) -> None:
    """Report manifests of one slave in more than one directory."""
    homes: dict[str, set[Path]] = {}
    for item in records.manifests:
        homes.setdefault(item.slave, set()).add(item.path.parent)
    for slave, folders in sorted(homes.items()):
        if len(folders) > 1:
            names = ", ".join(sorted(str(folder) for folder in folders))
            found.differs(f"manifests of slave {slave} are in more than one directory: {names}", f"manifest {slave}")


def ended_without_a_word(records: RunRecords) -> list[str]:
    """Notes about processes whose tape lacks the line of an orderly end, in a run that ended in order."""
    last = {who: tape.last_kind for who, tape in records.tapes.items()}
    if not any(role == "master" and kind == "master-ended" for (role, _), kind in last.items()):
        return []
    ends = {"slave": {"stopped"}, "worker": {"left", "stopped", "heldout"}}
    return [
        f"the tape of {role} {name} does not end with the line of an orderly end: the process was killed, is still "
        "running, or the last lines are missing"
        for (role, name), kind in sorted(last.items())
        if kind not in ends.get(role, {kind})
    ]


# ---- two journals of one run ----


def _other_journals(records: RunRecords, history: History, found: Evidence) -> None:
    """A standby's journal and its master's are one up to the take-over, and the newest version that the older master
    published after it is in the newer one's too, or a later one. One from before a rebuild is not judged."""
    mine = {row.number: row for row in records.rows}
    kept: dict[int, Pair] = {}  # the newest version of each timeline
    for version in history.commits:
        kept[version[0]] = max(version, kept.get(version[0], version))
    for folder, rows in records.others.items():
        apart = [at for at, row in enumerate(rows) if row.number in mine and mine[row.number].digest != row.digest]
        newest = records.rows[-1].number if records.rows else 0
        tail = rows[apart[0] :] if apart else [row for row in rows if row.number > newest]
        found.judged += len(rows) - len(tail)
        if len(tail) == len(rows):
            records.notes.append(f"the journal in {folder} has no record in common with the run's, and is not judged")
            continue
        if not tail:
            records.notes.append(f"the journal in {folder} is the same up to its end, record {rows[-1].number}")
            continue
        where = f"journal in {folder}"
        if apart and mine[tail[0].number].kind != EPOCH:
            found.differs(
                f"record {tail[0].number} is not the same in both journals, and no take-over explains it", where
            )
            continue
        for row in tail:
            made = decision_of(json.loads(row.record_json)) if row.kind in DECISIONS else None
            if made is None or made.version is None or made.version not in history.published:
                continue
            if made.version > kept.get(made.version[0], (0, 0)):
                found.differs(f"{made} was published, and the master that took over does not have it", where)
        records.notes.append(
            f"the journal in {folder} has {len(tail)} records after number {tail[0].number - 1}, from which the run "
            "does not go on"
        )


# ---- the journal, as the master's tape saw it grow ----


def put_back(records: RunRecords) -> str:
    """A sentence when the journal lost its end before a later master went on from it; empty when it did not."""
    lines, wrong = _other_rows(records)
    if not wrong or _at_the_end(records, lines, wrong):
        return ""
    number = lines[wrong[0]].fields["number"]
    return (
        f"the journal was restored from a copy, or lost its end, once: record {number} and what followed is not in it, "
        "though the master's tape says that it was written; what only the lost records said is not judged"
    )


def _journal_against_tape(records: RunRecords, _: History, found: Evidence) -> None:
    lines, wrong = _other_rows(records)
    found.judged += len(lines)
    if not lines and records.rows and records.rows[-1].digest and any(role == "master" for role, _ in records.tapes):
        records.unproven.append("the master's tape does not say how far the journal goes: an older release wrote it")
    if not wrong or not _at_the_end(records, lines, wrong):
        return
    number = int(lines[wrong[0]].fields["number"])
    newest = records.rows[-1].number if records.rows else 0
    if number > newest:
        found.differs(
            f"the journal ends at record {newest}, but the master's tape says that record {number} was written: the "
            "journal's end is lost",
            "master journaled",
        )
        return
    found.differs(
        f"record {number} of the journal, or one before it, is not the one that was written: the master's tape has "
        "another digest for it",
        "master journaled",
    )


def _other_rows(records: RunRecords) -> tuple[list[Fact], list[int]]:
    """The "journaled" lines of the master's tape, and the indexes of those that the journal contradicts."""
    digests = {row.number: row.digest for row in records.rows}
    oldest = records.rows[0].number if records.rows else 1
    if records.rows and not records.rows[-1].digest:
        return [], []  # of an older release
    lines = [line for line in records.lines["master"] if line.kind == "journaled"]
    lines = [line for line in lines if int(line.fields["number"]) >= oldest]
    wrong = [at for at, line in enumerate(lines) if digests.get(line.fields["number"]) != line.fields["digest"]]
    return lines, wrong


def _at_the_end(records: RunRecords, lines: list[Fact], wrong: list[int]) -> bool:
    """Whether no later master went on from the journal as it is now."""
    after = wrong[-1] + 1
    if after == len(lines):
        return True
    kinds = {row.number: row.kind for row in records.rows}
    return kinds[lines[after].fields["number"]] != EPOCH
