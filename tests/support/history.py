"""A run's facts, as its processes record them: two slaves, two clusters, lent data, in the order in which they happen.

A test changes one of them and asks which promise breaks. Facts are plain lists and dictionaries, so that they can also
be written to a directory that looks like a run's.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from support.journals import append

from dips.core.files import make_folder
from dips.core.ids import Version, parse_version
from dips.core.messages import SnapshotInfo
from dips.core.observe.tape import Tape
from dips.judge.facts import Fact, journaled
from dips.judge.invariants import Checker, Violation
from dips.master.journal import Journal
from dips.master.state.penalty import judge, round_tokens
from dips.master.state.penalty_types import DetectorState, JudgeInputs, Participant, PenaltyConfig
from dips.master.state.records import outer_step_of
from dips.master.state.rounds import judgement_to_json
from dips.slave.disk import LocalDisk
from dips.slave.ring import Ring
from dips.slave.snapshot_files import parse_round

SLAVES = ("s0", "s1")
N_ELEMS = 8
TOTAL_TOKENS = 10_000
CHUNK_TOKENS = 100


def digest(*words: object) -> str:
    return hashlib.md5(repr(words).encode()).hexdigest()


@dataclass
class Step:
    source: str
    who: str
    kind: str
    fields: dict[str, Any]


@dataclass
class Script:
    """Writes a history. version, round: the newest ones; lent: tokens that were given out."""

    steps: list[Step] = field(default_factory=list)
    epoch: int = 0
    version: tuple[int, int] | None = None
    rounds: int = 0
    round_of: dict[tuple[int, int], str] = field(default_factory=dict)
    attached: dict[str, tuple[int, int]] = field(default_factory=dict)
    tokens: int = 0
    tokens_at: dict[tuple[int, int], int] = field(default_factory=dict)
    digests: dict[tuple[int, int], dict[str, str]] = field(default_factory=dict)
    fences: dict[str, int] = field(default_factory=lambda: {"a": 0, "b": 0})
    incarnation: dict[str, tuple[int, int]] = field(default_factory=dict)
    seqs: dict[str, int] = field(default_factory=lambda: {"a": 0, "b": 0})
    lent: int = 0
    applied: list[tuple[int, int]] = field(default_factory=list)
    detector: DetectorState = field(default_factory=DetectorState.empty)
    detector_at: dict[tuple[int, int], DetectorState] = field(default_factory=dict)
    says_detector: bool = True

    def add(self, source: str, who: str, kind: str, **fields: Any) -> None:
        self.steps.append(Step(source, who, kind, fields))

    def start_master(self, durability: str = "sync") -> None:
        self.epoch += 1
        self.says_detector = True
        self.add("journal", "", "EPOCH", epoch=self.epoch)
        self.add("master", "test", "epoch", epoch=self.epoch, durability=durability)
        for slave in SLAVES:
            self._attach(slave, started=self.epoch == 1)

    def _attach(self, slave: str, started: bool) -> None:
        """The master's tape has each attachment; the slave's also the start of its process."""
        epoch, n = self.attached.get(slave, (0, 0))
        self.attached[slave] = (self.epoch, n + 1 if epoch == self.epoch else 1)
        incarnation = "{}.{}".format(*self.attached[slave])
        self.add("master", "test", "slave_attached", slave=slave, incarnation=incarnation)
        if started:
            self.add("slave", slave, "started", endpoint="tcp://127.0.0.1:1", pid=1, snapshots=0)
        self.add("slave", slave, "incarnation", incarnation=incarnation)
        self.add("slave", slave, "promised", epoch=self.epoch)

    def join(self, cluster: str) -> None:
        known = self.incarnation.get(cluster)
        self.incarnation[cluster] = (self.epoch, 1 + (known[1] if known else 0))
        self.seqs[cluster] = 0
        incarnation = "{}.{}".format(*self.incarnation[cluster])
        self.add("journal", "", "JOIN", epoch=self.epoch, cluster=cluster, incarnation=[*self.incarnation[cluster]])
        self.add("master", "test", "join", cluster=cluster, incarnation=incarnation, process=f"{cluster}{self.epoch}")
        self.add("worker", cluster, "joined", incarnation=incarnation, epoch=self.epoch)

    def push(self, cluster: str, tokens: int = CHUNK_TOKENS) -> dict[str, Any]:
        self.seqs[cluster] += 1
        epoch, n = self.incarnation[cluster]
        name = f"{cluster}/{epoch}.{n}#{self.seqs[cluster]}"
        held = {slave: digest(name, slave) for slave in SLAVES}
        seed = self.version is None
        tokens = 0 if seed else tokens
        base = None if seed else _text(self.version)
        said = {"push": name, "attempt": 1, "base": str(base), "fence": self.fences[cluster], "tokens": tokens}
        self.add("master", "test", "ticket", **said)
        for slave in SLAVES:
            self.add("slave", slave, "staged", push=name, attempt=1, digest=held[slave])
        self.add("worker", cluster, "push_sent", **said, digest_of_slave=held)
        self.add("master", "test", "admitted", push=name, attempt=1, tokens=tokens)
        return {
            "push": [cluster, epoch, n, self.seqs[cluster]],
            "attempt": 1,
            "verdict": "APPLIED",
            "base": None if seed else [*(self.version or ())],
            "fence": self.fences[cluster],
            "tokens": tokens,
            "steps": 1,
            "ranges": self._lend(tokens),
        }

    def _lend(self, tokens: int) -> list[list[int]]:
        ranges = []
        for begin in range(self.lent, self.lent + tokens, CHUNK_TOKENS):
            ranges.append([1 + begin // CHUNK_TOKENS, 0, begin // CHUNK_TOKENS, 0, CHUNK_TOKENS])
        self.lent += tokens
        return ranges

    def next_round(self) -> str:
        self.rounds += 1
        return f"r{self.epoch}.{self.rounds}"

    def commit(self, *participants: dict[str, Any]) -> None:
        before = self.version
        self.version = (before[0], before[1] + 1) if before else (self.epoch, 0)
        round_name = self.next_round()
        version, self.round_of[self.version] = _text(self.version), round_name
        shards = self.digests[self.version] = {slave: digest(version, slave) for slave in SLAVES}
        for slave in SLAVES:
            if before:
                share = [repr(value / len(SLAVES)) for row in _gram(participants) for value in row]
                sums = {"gram": share, "nonfinite_elems": [0] * len(participants)}
                self.add("slave", slave, "measured", round=round_name, version=_text(before), **sums)
            made = {"version": version, "round": round_name, "digest": shards[slave]}
            self.add("slave", slave, "prepared", **made, durable=True, finite=True)
        accepted = [item for item in participants if item["verdict"] == "APPLIED"]
        self.tokens += sum(item["tokens"] for item in accepted)
        self.tokens_at[self.version] = self.tokens
        record = {
            "epoch": self.epoch,
            "round": [self.epoch, self.rounds],
            "version": [*self.version],
            "from_version": [*before] if before else None,
            "digests": dict(shards),
            "tokens": self.tokens,
            "s_max": 8,
            "participants": list(participants),
            "judgement": self._judgement(participants, before) if before else None,
            "wall_s": 1000.0 + self.rounds,
        }
        self.add("journal", "", "COMMIT", **record)
        self.detector_at[self.version] = self.detector
        for item in participants:
            self.fences[item["push"][0]] += 1
            self.applied += [(r[2] * CHUNK_TOKENS, (r[2] + 1) * CHUNK_TOKENS) for r in item["ranges"]]
        self._flip(round_name, record)
        self._publish(round_name, participants)

    def _judgement(self, participants: tuple[dict[str, Any], ...], before: tuple[int, int]) -> dict[str, Any]:
        """By JUDGE itself, as the master writes it; the detector's state before stands in the first of an epoch."""
        config, upper = PenaltyConfig(), _gram(participants)
        k = len(participants)
        gram = tuple(tuple(upper[min(i, j)][abs(i - j)] for j in range(k)) for i in range(k))
        pushes = tuple(Participant(i["push"][0], float(i["tokens"]), 0, i["steps"]) for i in participants)
        rates, intervals_s, live = {"a": 10.0, "b": 10.0}, {"a": 20.0}, frozenset("ab")
        t_round = round_tokens(rates, intervals_s)
        judged = judge(self.detector, config, pushes, gram, live - self.detector.quarantined, t_round)
        said, self.says_detector = self.detector if self.says_detector else None, False
        of_rates, of_intervals = tuple(sorted(rates.items())), tuple(sorted(intervals_s.items()))
        inputs = JudgeInputs(config, 0.7, pushes, gram, tuple(sorted(live)), of_rates, of_intervals, t_round, said)
        step = outer_step_of(config, 0.7, judged.scale, judged.rho, Version(*before))
        self.detector = judged.next_state_if_committed
        return judgement_to_json(judged, step, inputs) or {}

    def _flip(self, round_name: str, record: dict[str, Any]) -> None:
        text = json.dumps({**record, "kind": "COMMIT", "ledger": self.ledger()})
        commit_hash = hashlib.sha256(text.encode()).hexdigest()
        for slave in SLAVES:
            made = {"version": _text(self.version), "round": round_name, "digest": self._shards()[slave]}
            self.add("manifest", slave, "manifest", **made, commit_hash=commit_hash, commit_record=text)
            self.add("slave", slave, "committed", **made, commit_hash=commit_hash, durable=True)

    def _publish(self, round_name: str, participants: tuple[dict[str, Any], ...]) -> None:
        version = _text(self.version)
        self.add("master", "test", "publish", version=version, tokens=self.tokens)
        for item in participants:
            name = push_name(item)
            said = {"push": name, "verdict": item["verdict"], "version": version}
            self.add("master", "test", "verdict", **said, round=round_name, reason="merged")
            self.add("worker", item["push"][0], "verdict", **said, reason="merged")
        for cluster in ("a", "b"):
            self.add("worker", cluster, "installed", version=version, digest_of_slave=dict(self._shards()))

    def _shards(self) -> dict[str, str]:
        assert self.version is not None, "asked after a commit"
        return self.digests[self.version]

    def restart_slave(self, slave: str) -> None:
        assert self.version is not None, "there is something to load"
        round_name = self.round_of[self.version]
        made = {"version": _text(self.version), "round": round_name, "digest": self._shards()[slave]}
        self._attach(slave, started=True)
        self.add("slave", slave, "configured", **made)

    def roll_back(self, origin: tuple[int, int], taken: list[list[Any]]) -> None:
        before, lost = self.version, self.tokens - self.tokens_at[origin]
        assert before is not None, "there is something to lose"
        self.version = (self.epoch, origin[1])
        round_name = self.round_of[self.version] = self.next_round()
        self.tokens = self.tokens_at[self.version] = self.tokens_at[origin]
        shards = self.digests[self.version] = self.digests[origin]
        self.detector = self.detector_at[self.version] = self.detector_at[origin]
        record = {
            "epoch": self.epoch,
            "round": [self.epoch, self.rounds],
            "version": [*self.version],
            "from_version": [*before],
            "origin": [*origin],
            "origin_round": [1, 1],
            "digests": dict(shards),
            "tokens": self.tokens,
            "lost_tokens": lost,
            "rolled_back": taken,
            "participants": [],
            "donor": None,
        }
        self.add("journal", "", "ROLLBACK", **record)
        for cluster in self.fences:
            self.fences[cluster] += 1
        for slave in SLAVES:
            made = {"version": _text(self.version), "round": round_name, "digest": shards[slave]}
            self.add("slave", slave, "rolled_back", **made, origin=_text(origin))
            self.add("slave", slave, "configured", **made)
        self.add("master", "test", "publish", version=_text(self.version), tokens=self.tokens)

    def ledger(self) -> dict[str, Any]:
        """As a COMMIT's record carries it; the lease table has every token once."""
        rows, at = [], 0
        for begin, end in sorted(self.applied):
            rows += [[0, at, begin, "free", "", 0]] if begin > at else []
            rows.append([0, begin, end, "settled", "", 0])
            at = end
        rows += [[0, at, TOTAL_TOKENS, "free", "", 0]]
        return {
            "run_id": "test",
            "tokens": self.tokens,
            "detector": self.detector.to_json(),
            "data_plan": ["LEASED", "00", TOTAL_TOKENS, CHUNK_TOKENS],
            "leases": {
                "begun": 1,
                "next_lease_id": 1000,
                "holdings": rows,
                "settled": {"applied": sum(end - begin for begin, end in self.applied), "excluded": 0},
            },
        }


def push_name(participant: dict[str, Any]) -> str:
    cluster, epoch, n, seq = participant["push"]
    return f"{cluster}/{epoch}.{n}#{seq}"


def _text(version: tuple[int, int] | None) -> str:
    return "None" if version is None else f"{version[0]}:{version[1]}"


def _gram(participants: Sequence[dict[str, Any]]) -> list[list[float]]:
    """The upper triangle by rows, of pushes that have half of their way in common."""
    norms = [1.0 + 0.1 * item["push"][3] for item in participants]
    return [[a * b * (1.0 if i == j else 0.5) for j, b in enumerate(norms) if j >= i] for i, a in enumerate(norms)]


def begun(*clusters: str) -> Script:
    """A run with its first version."""
    script = Script()
    script.start_master()
    for cluster in clusters:
        script.join(cluster)
    script.commit(script.push(clusters[0]))
    return script


def usual_run() -> Script:
    script = begun("a", "b")
    for _ in range(2):
        script.commit(script.push("a"), script.push("b"))
    script.restart_slave("s0")
    script.commit(script.push("b"))
    script.start_master()
    for slave in SLAVES:
        script.restart_slave(slave)
    script.join("a")
    script.commit(script.push("a"))
    return script


def rolled_back_run() -> Script:
    script = begun("a", "b")
    script.commit(script.push("a"))
    lost = script.push("b")
    script.commit(lost)
    script.start_master()
    script.roll_back((1, 1), [lost["push"]])
    told = {"push": push_name(lost), "verdict": "ROLLED_BACK", "version": "2:1"}
    script.add("worker", "b", "verdict", **told, reason="lost")
    script.lent -= CHUNK_TOKENS
    script.applied.pop()
    script.join("b")
    script.commit(script.push("b"))
    return script


Change = Callable[[list[Step]], None]


def changed(script: Script, change: Change) -> list[Step]:
    steps = copy.deepcopy(script.steps)
    change(steps)
    return steps


def nth(steps: list[Step], source: str, kind: str, index: int = 0) -> Step:
    return [step for step in steps if (step.source, step.kind) == (source, kind)][index]


def feed(checker: Checker, step: Step) -> list[Violation]:
    if step.source == "journal":
        return checker.feed(journaled({"kind": step.kind, **step.fields}))
    return checker.feed(Fact(step.source, step.who, step.kind, step.fields))


def check(steps: list[Step], **options: Any) -> Checker:
    checker = Checker(**options)
    for step in steps:
        feed(checker, step)
    checker.finish()
    return checker


def write_run(directory: Path, script: Script, steps: list[Step] | None = None) -> Path:
    """The facts as a run's directory has them: a journal, a tape for each process, and each slave's newest snapshot."""
    steps = script.steps if steps is None else steps
    make_folder(directory / "master")
    ledger = json.dumps(script.ledger())
    journal = Journal.open(directory / "master", "test")
    entry, grown = 0, dict[int, tuple[int, str]]()
    for at, step in ((at, step) for at, step in enumerate(steps) if step.source == "journal"):
        if step.kind == "EPOCH":
            assert journal.begin_epoch() == step.fields["epoch"]
        else:
            entry += 1
            text = json.dumps({"kind": step.kind, **step.fields})
            append(journal, step.fields["epoch"], entry, step.kind, text, ledger)
        grown[at] = journal.newest()
    journal.close()
    for role, name in sorted({(s.source, s.who) for s in steps if s.source not in ("journal", "manifest")}):
        folder = {"master": directory / "master", "slave": directory / "slaves" / name}.get(role, directory / "tapes")
        with Tape(folder / f"{name}.tape.jsonl", role, name) as tape:
            for at, step in enumerate(steps):
                if (step.source, step.who) == (role, name):
                    tape.write(step.kind, "-", **step.fields)
                if role == "master" and at in grown:
                    number, said = grown[at]
                    tape.write("journaled", "-", number=number, digest=said)
    newest = {step.who: step for step in steps if step.source == "manifest"}
    for slave, step in newest.items():
        _write_snapshot(directory / "slaves" / slave, slave, step.fields)
    return directory


def _write_snapshot(directory: Path, slave: str, said: dict[str, Any]) -> None:
    """A ring of two files, one of them committed; the shard is all zeros, whatever its digest says."""
    make_folder(directory)
    ring = Ring(LocalDisk(directory), "test", slave, 1)
    ring.make(N_ELEMS)
    version, round_id = parse_version(said["version"]), parse_round(said["round"])
    info = SnapshotInfo(version, round_id, b"l" * 16, b"p" * 16, bytes.fromhex(said["digest"]), committed=False)
    ring.write_shadow(info, np.zeros(N_ELEMS, np.float32), np.zeros(N_ELEMS, np.float32))
    ring.commit(info, bytes.fromhex(said["commit_hash"]), said["commit_record"].encode())
