"""python -m canonical_records: writes and compares what simulated runs did, without sentences and names in the
code.

A change that only moves, renames or merges code must keep what a run does. The trace hash of a seed is too strict for
that: it also covers sentences and names of classes. The canonical records are every entry of the master's journal,
every verdict, refusal code and published version, and every version that a slave serves or has on disk, each with its
virtual time. The digest of a seed is the SHA-256 of its lines. tests/frozen/seeds.txt holds the digests of 500 seeds
(docs/simulation.md).
"""

from __future__ import annotations

import argparse
import gc
import gzip
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dips.core import errors
from dips.core.errors import RefusalCode
from dips.core.messages import SnapshotInfo
from dips.lab.sim.counts import refuses
from dips.lab.sim.kernel import SimulatedProcess
from dips.lab.sim.seed_run import SeedOutcome, SeedRun
from dips.lab.sim.world import MasterProcess, SlaveProcess

CHUNK = 10
"""Seeds that one worker process takes at a time."""

SENTENCES = frozenset({"reason", "sentence", "why"})
"""Fields of journal records that people read."""

OWN_RECORDS = frozenset({"ledger"})
"""The state after a COMMIT, inside its record: its form may change while all decisions stay equal."""

TAPE = {
    ("master", "verdict"): ("verdict", ("push", "verdict", "version", "round")),
    ("master", "publish"): ("published", ("version", "tokens")),
    ("master", "refused"): ("call_refused", ("peer", "code")),
    ("slave", "committed"): ("serves", ("version", "round", "digest")),
    ("slave", "configured"): ("serves", ("version", "round", "digest")),
    ("slave", "rolled_back"): ("serves", ("version", "round", "digest")),
    ("worker", "verdict"): ("told", ("push", "verdict", "version")),
    ("worker", "push_refused"): ("push_refused", ("push", "code")),
    ("worker", "installed"): ("pulled", ("version", "tokens")),
}
"""Lines of tapes that become canonical records: role and kind -> kind of the record, and the fields that it takes."""

HEADER = """\
# What 500 simulated runs did. A change of behaviour changes these lines, and only such a change may.
# `make frozen` compares; docs/simulation.md says when and how the file is written again.
# seed, trace hash, SHA-256 of the canonical records, number of records
"""


@dataclass(frozen=True)
class Frozen:
    """One seed: its trace hash, the digest of its canonical records, and how many these are."""

    seed: int
    trace_hash: str
    digest: str
    records: int

    def __str__(self) -> str:
        return f"{self.seed} {self.trace_hash} {self.digest} {self.records}"


class RecordedSeedRun(SeedRun):
    """A simulated run that collects its canonical records, a JSON text for each."""

    def __init__(self, seed: int) -> None:
        self.records: list[str] = []
        self._tokens_of: dict[str, int] = {}
        self._refused_at: tuple[float, set[str]] = (-1.0, set())
        super().__init__(seed)

    def run(self) -> SeedOutcome:
        """Run the whole simulation."""
        errors.watchers.append(self._refused)
        try:
            return super().run()
        finally:
            errors.watchers.remove(self._refused)

    def record(self, who: str, kind: str, fields: Mapping[str, Any]) -> None:
        """Add one record, at the present virtual time."""
        at_s = round(self.kernel.now_s, 9)
        entry = {"seed": self.seed, "at_s": at_s, "who": who, "kind": kind, **fields}
        self.records.append(json.dumps(entry, separators=(",", ":"), sort_keys=True))

    def journalled(self, master: MasterProcess, record: Mapping[str, Any]) -> None:
        """Record an entry of the journal that is now durable."""
        self.record(master.name, "journal", {"entry": without_sentences(record)})
        super().journalled(master, record)

    def manifest(self, slave: SlaveProcess, info: SnapshotInfo, record: bytes) -> None:
        """Record a slave's manifest that is now durable. Its commit_hash is of a text with sentences, so the text is
        digested here."""
        decided = json.dumps(without_sentences(json.loads(record)), sort_keys=True)
        self.record(
            slave.name,
            "manifest",
            {
                "version": str(info.version),
                "round": str(info.round),
                "digest": info.digest.hex(),
                "decided": hashlib.sha256(decided.encode()).hexdigest(),
            },
        )
        super().manifest(slave, info, record)

    def tape(self, role: str, process: SimulatedProcess, kind: str, cause: str, fields: Mapping[str, Any]) -> None:
        """Record one line of a process's tape."""
        if role == "master" and kind == "ticket":
            self._tokens_of[fields["push"]] = fields["tokens"]
        if (role, kind) in TAPE:
            name, chosen = TAPE[role, kind]
            known = {field: fields[field] for field in chosen if field in fields}
            if name == "verdict":
                known["tokens"] = self._tokens_of.get(fields["push"])
            self.record(process.name, name, known)
        super().tape(role, process, kind, cause, fields)

    def _refused(self, code: RefusalCode, module: str) -> None:
        """Record a refusal that was raised. One that is passed on at the same moment is not counted twice."""
        if not refuses(module):
            return
        if self._refused_at[0] != self.kernel.now_s:
            self._refused_at = (self.kernel.now_s, set())
        if code.name not in self._refused_at[1]:
            self._refused_at[1].add(code.name)
            self.record("", "refusal", {"code": code.name})

    @property
    def text(self) -> bytes:
        """All records, a line for each."""
        return "".join(line + "\n" for line in self.records).encode()

    @property
    def digest(self) -> str:
        """The SHA-256 of all records."""
        return hashlib.sha256(self.text).hexdigest()


def without_sentences(record: Any) -> Any:
    """A journal record without what only people read and without the stored state."""
    if isinstance(record, Mapping):
        left = {key: value for key, value in record.items() if key not in SENTENCES | OWN_RECORDS}
        if "rejected" in left:  # pairs of a cluster and a sentence
            left["rejected"] = [cluster for cluster, _ in left["rejected"]]
        return {key: without_sentences(value) for key, value in left.items()}
    if isinstance(record, list | tuple):
        return [without_sentences(item) for item in record]
    return record


def freeze(seed: int, out: Path | None = None) -> Frozen:
    """Simulate one seed. out: a folder that gets its records as <seed>.jsonl.gz.

    Raises RuntimeError when an invariant is violated: such a run is no evidence.
    """
    world = RecordedSeedRun(seed)
    collecting = gc.isenabled()
    gc.disable()  # a run is short, with few megabytes of garbage: collecting it would cost a tenth of the time
    try:
        outcome = world.run()
    finally:
        if collecting:
            gc.enable()
    if outcome.violations:
        raise RuntimeError(f"seed {seed} violates an invariant: {outcome.violations[0]}")
    if out is not None:
        # mtime=0: equal records give equal files
        (out / f"{seed}.jsonl.gz").write_bytes(gzip.compress(world.text, mtime=0))
    return Frozen(seed, outcome.trace_hash, world.digest, len(world.records))


def freeze_all(seeds: Sequence[int], jobs: int, out: Path | None = None) -> Iterator[Frozen]:
    """Freeze all seeds in their order, on `jobs` processes."""
    one = partial(freeze, out=out)
    if jobs <= 1:
        yield from map(one, seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(one, seeds, chunksize=CHUNK)


def read(path: Path) -> dict[int, Frozen]:
    """Read a file that --write made. Raises ValueError for an invalid line."""
    lines = [line.split() for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {int(seed): Frozen(int(seed), trace, digest, int(n)) for seed, trace, digest, n in lines}


def differences(known: Mapping[int, Frozen], now: Sequence[Frozen]) -> tuple[list[str], list[str]]:
    """Differences from the file: in the canonical records, and in the trace hashes of otherwise equal seeds."""
    canonical, raw = [], []
    for frozen in now:
        before = known.get(frozen.seed)
        if before is None:
            canonical.append(f"seed {frozen.seed}: not in the file")
        elif (before.digest, before.records) != (frozen.digest, frozen.records):
            was = f"{before.records} records {before.digest[:12]}"
            canonical.append(f"seed {frozen.seed}: {frozen.records} records {frozen.digest[:12]}, not {was}")
        elif before.trace_hash != frozen.trace_hash:
            raw.append(f"seed {frozen.seed}: trace {frozen.trace_hash[:12]}, not {before.trace_hash[:12]}")
    return canonical, raw


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 when --check finds other canonical records, or with --raw other trace hashes; 0 after --write."""
    parser = argparse.ArgumentParser(
        prog="python tools/canonical_records.py", description="What simulated runs did, as canonical records."
    )
    parser.add_argument("--seeds", type=int, default=500, help="how many seeds (500)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the records there, one file for each seed")
    parser.add_argument("--check", type=Path, metavar="FILE", help="compare with this file; exit code 1 if they differ")
    parser.add_argument("--raw", action="store_true", help="with --check: trace hashes must be equal too")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write this file")
    options = parser.parse_args(arguments)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    known = read(options.check) if options.check is not None else {}
    seeds = range(options.first, options.first + options.seeds)
    now = []
    for frozen in freeze_all(seeds, options.jobs, options.out):
        now.append(frozen)
        if options.check is None and options.write is None:
            print(frozen, flush=True)
    if options.write is not None:
        options.write.write_text(HEADER + "".join(f"{frozen}\n" for frozen in now))
    if options.check is None:
        return 0
    canonical, raw = differences(known, now)
    for line in [*canonical, *(raw if options.raw else ())]:
        print(line)
    print(
        f"{len(now)} seeds, {sum(frozen.records for frozen in now)} canonical records: {len(canonical)} seeds differ; "
        f"{len(raw)} more only in the trace hash"
    )
    return 1 if options.write is None and (canonical or (options.raw and raw)) else 0


if __name__ == "__main__":
    sys.exit(main())
