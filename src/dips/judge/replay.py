"""Computes every version of a run again, from the pushes that slaves recorded, and compares it bit for bit.

Uses the NumPy reference of the outer step, not the compiled kernel that slaves ran, so that each checks the other; both
define the same bits (docs/algorithm.md). Only rounds that the journal committed count. It must never write.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from dips.core.errors import ConfigError, Refused
from dips.core.ids import SlaveId
from dips.core.layout import FLOAT32_BYTES, Block, digest_of_array, layout_from_json
from dips.core.math import outer_numpy, wire_numpy
from dips.core.placement import Placement
from dips.core.wire import RESIDUAL_CODEC, Codec, encoded_bytes
from dips.judge.facts import MERGES, Decision, Pair, decision_of, pair, say_push, say_round, say_version, short
from dips.judge.judgement import near
from dips.judge.records import RunRecords
from dips.slave.disk import json_sum
from dips.slave.push_evidence import FORMAT

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

WITHOUT_CHECKSUMS = "dips-round-2"
"""The format that an older release wrote, without checksums."""

FOLDER = "pushes"


@dataclass
class Replayed:
    """The result of a replay."""

    versions: int = 0  # computed again on every slave
    shards: int = 0  # digests compared
    wrong: list[str] = field(default_factory=list)  # sentences
    skipped: list[str] = field(default_factory=list)  # why a version was not computed
    # those of skipped that nothing explains; the others follow a version of which the journal that is here knows
    # nothing, because it was lost once or its beginning was deleted
    missing: list[str] = field(default_factory=list)
    judged: int = 0  # rounds whose norms were measured again
    # sentences about norms, and about numbers of the step that slaves recorded and the COMMIT record says otherwise
    misjudged: list[str] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)  # what no checksum confirms

    def to_json(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self) if one.repr}

    made: set[Pair] = field(default_factory=set, repr=False)
    unknown: set[Pair] = field(default_factory=set, repr=False)

    def skip(self, version: Pair, before: Pair | None, sentence: str) -> None:
        """Note that a version is not computed, and why. before: the version that it would be computed from."""
        self.skipped.append(sentence)
        if before is not None and (before in self.unknown or before not in self.made):
            self.unknown.add(version)
        else:
            self.missing.append(sentence)


@dataclass(frozen=True)
class _State:
    """A shard of one version: theta and momentum, both (n,) float32; and what rounding lost of it, of each chunk as
    slaves keep it, none where nothing was lost."""

    theta: F32
    momentum: F32
    residual: tuple[U8, ...] = ()


def replay_run(run_dir: Path, records: RunRecords) -> Replayed:
    """Replay all committed rounds. Raises ConfigError when no pushes were recorded, or they cannot be read."""
    folders = _folders(run_dir)
    places = _Places(records)
    named = set[str]()
    result = Replayed()
    staged = _staged_digests(records)
    kept: dict[str, dict[Pair, _State]] = {}
    for record in records.journal:
        if record["kind"] not in MERGES:
            continue
        decision = decision_of(record)
        named |= decision.digests.keys()
        if decision.version is None:
            continue
        if decision.kind == "ADOPT":
            result.unknown.add(decision.version)
            continue
        places.take(decision, record)
        if decision.kind == "RESHARD":
            result.versions += _move_all(decision, places, kept, _chunk_bytes(folders[min(folders)]), result)
            result.made.add(decision.version)
            continue
        slaves = sorted(folders.keys() & decision.digests.keys())
        measured = _Measured(decision)
        done = [
            _replay_one(
                decision, slave, folders, kept.setdefault(slave, {}), places.blocks(slave), staged, result, measured
            )
            for slave in slaves
        ]
        result.versions += bool(done) and all(done)
        result.made.add(decision.version)
        if decision.judgement is not None and bool(done) and all(done) and len(slaves) == len(decision.digests):
            result.judged += 1
            result.misjudged += measured.compare()
    for slave in sorted(named - folders.keys()):
        result.skip((0, 0), None, f"slave {slave} recorded no pushes")
    if result.shards == 0:
        reasons = "; ".join(result.skipped[:3]) or "the journal committed no version"
        result.unproven.append(f"no version can be computed again: {reasons}")
    return result


def _folders(run_dir: Path) -> dict[str, Path]:
    """Slave -> the folder of its recorded pushes."""
    found: dict[str, Path] = {}
    for path in sorted(run_dir.rglob(f"{FOLDER}/round-*.json")):
        if path.parent not in found.values():
            found[str(_read_json(path)["slave_id"])] = path.parent
    if not found:
        raise ConfigError(
            f"{run_dir} has no recorded pushes, from which versions are computed again: start the slaves with "
            "--record-pushes (record_pushes = true in a run's file)"
        )
    return found


class _Places:
    """Which slave held which block at each version: a RESHARD changes it, and a ROLLBACK to before it restores it."""

    def __init__(self, records: RunRecords) -> None:
        ledger = records.ledger
        if ledger is None or not ledger.get("layout") or ledger.get("placement") is None:
            raise ConfigError(f"the journal in {records.run_dir} has no layout: no version was ever made")
        moves = [record for record in records.journal if record["kind"] == "RESHARD"]
        try:
            self.layout = layout_from_json(ledger["layout"])
            self.now = Placement(tuple(sorted(SlaveId(name) for name in ledger["slaves"])), tuple(ledger["placement"]))
            if moves:
                self.now = _placement(moves[0]["placement_before"])
            self._after = {pair(record["version"]): _placement(record["placement"]) for record in moves}
        except (KeyError, TypeError, ValueError, Refused) as error:
            raise ConfigError(
                f"layout and placement in the journal of {records.run_dir} cannot be read: {error}"
            ) from error
        self.before = self.now
        self._at: dict[Pair, Placement] = {}

    def take(self, made: Decision, record: Mapping[str, Any]) -> None:
        """Go on to the next version of the journal."""
        assert made.version is not None, "the caller passes only decisions that make a version"
        self.before = self.now
        if made.kind == "RESHARD":
            self.before, self.now = _placement(record["placement_before"]), self._after[made.version]
        elif made.kind == "ROLLBACK" and made.origin is not None:
            self.now = self._at.get(made.origin, self.now)
        self._at[made.version] = self.now

    def blocks(self, slave: str) -> list[Block]:
        return self.now.blocks_of(SlaveId(slave), self.layout)


def _placement(raw: Mapping[str, Any]) -> Placement:
    return Placement(tuple(SlaveId(str(name)) for name in raw["slaves"]), tuple(map(int, raw["slave_of_block"])))


def _move_all(
    made: Decision, places: _Places, kept: dict[str, dict[Pair, _State]], chunk_bytes: int, result: Replayed
) -> bool:
    """Put the shards of a RESHARD together from those of the version before; False when one of these is missing."""
    assert made.version is not None, "a RESHARD makes a version"
    parts: dict[int, tuple[F32, F32]] = {}
    for slave in places.before.slaves:
        state = kept.get(slave, {}).get(made.from_version) if made.from_version is not None else None
        if state is None:
            sentence = f"{made}: version {say_version(made.from_version)} was not computed on slave {slave}"
            result.skip(made.version, made.from_version, sentence)
            return False
        start = 0
        for block in places.before.blocks_of(slave, places.layout):
            span = slice(start, start + block.n_elems)
            parts[block.block_id] = (state.theta[span], state.momentum[span])
            start += block.n_elems
    for slave in places.now.slaves:
        mine = [parts[block.block_id] for block in places.blocks(slave)]
        theta, momentum = (np.concatenate(arrays) for arrays in zip(*mine, strict=True))
        moved = _State(theta, momentum)
        kept.setdefault(slave, {})[made.version] = moved
        _compare(made, slave, moved, places.blocks(slave), chunk_bytes, result)
    return True


def _replay_one(
    made: Decision,
    slave: str,
    folders: Mapping[str, Path],
    kept: dict[Pair, _State],
    blocks: Sequence[Block],
    staged: Mapping[tuple[str, str], set[str]],
    result: Replayed,
    measured: _Measured,
) -> bool:
    """Compute one shard again; False when it cannot be. A wrong one is reported, and the replay goes on with it."""
    assert made.version is not None, "the caller passes only decisions that make a version"
    name = f"version {say_version(made.version)} on slave {slave}"
    if made.kind == "ROLLBACK" and made.donor is None:
        origin = kept.get(made.origin) if made.origin is not None else None
        if origin is None:
            result.skip(made.version, made.origin, f"{name}: its origin {say_version(made.origin)} was not computed")
            return False
        kept[made.version] = origin
        return _compare(made, slave, origin, blocks, _chunk_bytes(folders[slave]), result)
    path = folders[slave] / f"round-{say_round(made.round)}.json"
    if not path.is_file():
        result.skip(made.version, made.from_version, f"{name}: {path.name} is missing")
        return False
    recorded = _read_json(path)
    before = pair(recorded["from_version"])
    if before is not None and before not in kept:
        result.skip(made.version, before, f"{name}: version {say_version(before)} was not computed")
        return False
    n_trained = sum(block.n_elems for block in blocks if not block.averaged)
    base = kept[before] if before is not None else None
    rows = np.stack([_push(folders[slave] / str(item["file"]), item.get("xxh3_128")) for item in recorded["accepted"]])
    if base is not None and made.judgement is not None:
        measured.add(base.theta, rows, blocks)
    after = _step(rows, recorded, base, blocks)
    kept[made.version] = after
    while len(kept) > KEPT:
        del kept[next(iter(kept))]
    merged, said = [say_push(p.push) for p in made.accepted], [str(item["push"]) for item in recorded["accepted"]]
    if merged != said:
        result.wrong.append(f"{name} was made of pushes {', '.join(said)}, but its record says {', '.join(merged)}")
    if recorded["format"] == WITHOUT_CHECKSUMS:
        result.unproven.append(f"{path} and its pushes have no checksums: an older release wrote them")
    if recorded["slave_id"] != slave:
        result.wrong.append(f"{name}: the recorded round is of slave {recorded['slave_id']}")
    if recorded["digest"] != made.digests.get(slave):
        result.wrong.append(f"{name} was recorded as {short(str(recorded['digest']))}, not as {made} says")
    for push, row in zip(said, rows, strict=True):
        known = staged.get((slave, push))
        digest = digest_of_array(row, blocks, int(recorded["chunk_bytes"])).hex() if known else ""
        if known and digest not in known:
            held = ", ".join(map(short, sorted(known)))
            result.wrong.append(f"{name}: push {push} is recorded as {short(digest)}, but the slave's tape says {held}")
    result.misjudged += _other_numbers(made, recorded, name, n_trained < rows.shape[1])
    return _compare(made, slave, after, blocks, int(recorded["chunk_bytes"]), result)


KEPT = 24
"""Versions of a shard that stay in memory: a ROLLBACK goes back to one that slaves keep on disk, and they are few."""


def _chunk_bytes(folder: Path) -> int:
    return int(_read_json(min(folder.glob("round-*.json")))["chunk_bytes"])


def _staged_digests(records: RunRecords) -> dict[tuple[str, str], set[str]]:
    """By slave and push, the digests on slaves' tapes of pushes that were sent as float32 and are kept unchanged."""
    plain = {
        str(line.fields["push"])
        for line in records.lines["master"]
        if line.kind == "ticket" and line.fields.get("wire") == "F32"
    }
    found: dict[tuple[str, str], set[str]] = {}
    for line in records.lines["slave"]:
        if line.kind == "staged" and (push := str(line.fields["push"])) in plain:
            found.setdefault((line.who, push), set()).add(str(line.fields.get("digest")))
    return found


def _compare(
    made: Decision, slave: str, state: _State, blocks: Sequence[Block], chunk_bytes: int, result: Replayed
) -> bool:
    digest = digest_of_array(state.theta, blocks, chunk_bytes).hex()
    result.shards += 1
    if digest != made.digests.get(slave):
        said, name = short(made.digests.get(slave, "nothing")), f"version {say_version(made.version)} on slave {slave}"
        result.wrong.append(f"{name} is {short(digest)} when it is computed again, but {made} says {said}")
    return True


class _Measured:
    """MEASURE again, from the recorded pushes of one round: the Gram matrix of the accepted ones, over all slaves."""

    def __init__(self, made: Decision) -> None:
        self._made = made
        k = len(made.accepted)
        self._gram = np.zeros((k, k))

    def add(self, theta: F32, rows: F32, blocks: Sequence[Block]) -> None:
        """Add one slave's share. Differences in float32, as slaves take them; products and sums in float64."""
        if len(rows) != len(self._gram):
            return  # other pushes than the record's: that is reported for the shard
        start = 0
        for block in blocks:
            if block.averaged:
                break  # part of no norm, and after all others
            for begin in range(start, start + block.n_elems, PIECE_ELEMS):
                piece = slice(begin, min(begin + PIECE_ELEMS, start + block.n_elems))
                ways = (theta[piece] - rows[:, piece]).astype(np.float64)
                self._gram += ways @ ways.T
            start += block.n_elems

    def compare(self) -> list[str]:
        """Sentences about norms in the record that differ from those of its pushes."""
        judgement = self._made.judgement
        assert judgement is not None, "only judged rounds are compared"
        said = {str(name): float(norm) for name, norm, *_ in judgement["norms"]}
        wrong = []
        for j, item in enumerate(self._made.accepted):
            name, norm = item.push[0], float(np.sqrt(self._gram[j, j]))
            if not near(said.get(name, math.nan), norm):
                wrong.append(f"{self._made} has norm {said.get(name)} of {name}, but its push makes it {norm!r}")
        weights = np.asarray([float(text) for text in judgement["weights"]])
        if len(weights) == len(self._gram):
            squared, parts = weights @ self._gram @ weights, np.abs(np.outer(weights, weights) * self._gram).sum()
            norm, merged = float(np.sqrt(max(0.0, squared))), float(judgement["merged_norm"])
            if not near(merged, norm, 1e-12 * parts / norm if norm > 0 else 1e-6 * float(np.sqrt(parts))):
                wrong.append(f"{self._made} has merged norm {merged!r}, but weights and pushes make it {norm!r}")
        return wrong


PIECE_ELEMS = 1 << 20
"""Elements whose differences are in memory at once, in float64."""


def _other_numbers(made: Decision, recorded: Mapping[str, Any], name: str, is_averaged: bool) -> list[str]:
    """Sentences about numbers of the step that differ between the slave's record and the COMMIT: both write every bit.

    is_averaged: this shard has averaged blocks, which move by rho.
    """
    wrong = []
    before = pair(recorded["from_version"])
    if pair(recorded["to_version"]) != made.version or (made.kind == "COMMIT" and before != made.from_version):
        wrong.append(f"{name} was made from {recorded['from_version']} to {recorded['to_version']}, not as {made} says")
    if made.judgement is None:
        return wrong
    step = {key: float(text) for key, text in (made.judgement["outer_step"] or {}).items()}
    other = [f"{key} {recorded[key]!r}, not {value!r}" for key, value in step.items() if float(recorded[key]) != value]
    share = float(recorded.get("averaged_share", 1.0))
    if is_averaged and share != float(made.judgement["rho"]):
        other.append(f"averaged_share {share!r}, not {made.judgement['rho']}")
    weights = [float(item["weight"]) for item in recorded["accepted"]]
    if weights != (said := [float(text) for text in made.judgement["weights"]]):
        other.append(f"weights {weights}, not {said}")
    return wrong + ([f"{name} was made with {'; '.join(other)} as {made} says"] if other else [])


def _step(rows: F32, recorded: Mapping[str, Any], before: _State | None, blocks: Sequence[Block]) -> _State:
    """Compute one outer step, as the slave did."""
    n, n_trained = rows.shape[1], sum(block.n_elems for block in blocks if not block.averaged)
    theta, momentum = np.empty(n, np.float32), np.empty(n, np.float32)
    if before is None:
        outer_numpy.seed_step(rows, 0, theta, momentum, 0, n)
        return _State(theta, momentum)
    weights = np.asarray([item["weight"] for item in recorded["accepted"]], np.float32)
    slots = np.arange(len(rows), dtype=np.int64)
    names = ("scale", "outer_lr", "momentum_decay", "momentum_lookahead", "gradient_weight")
    scale, outer_lr, decay, lookahead, gradient_weight = (float(recorded[name]) for name in names)
    outer_numpy.outer_step(
        before.theta, before.momentum, rows, slots, weights, scale, outer_lr, decay, lookahead, gradient_weight,
        theta, momentum, 0, n_trained,
    )  # fmt: skip
    if n_trained < n:
        share = float(recorded["averaged_share"])
        outer_numpy.average_step(before.theta, rows, slots, weights, share, theta, momentum, n_trained, n)
    codec = Codec[str(recorded.get("pull_wire", Codec.F32.name))]
    if not codec.is_difference:
        return _State(theta, momentum)
    return _State(theta, momentum, _publish(codec, theta, before, blocks, int(recorded["chunk_bytes"])))


def _publish(codec: Codec, theta: F32, before: _State, blocks: Sequence[Block], chunk_bytes: int) -> tuple[U8, ...]:
    """Round the step's result, in place, to what readers of the version hold; what that lost, of each chunk."""
    lost: list[U8] = []
    start = 0
    for block in blocks:
        for offset in range(0, block.n_bytes, chunk_bytes):
            stop = start + min(chunk_bytes, block.n_bytes - offset) // FLOAT32_BYTES
            n_bytes = encoded_bytes(RESIDUAL_CODEC, stop - start)
            old = before.residual[len(lost)] if before.residual else np.zeros(n_bytes, np.uint8)
            payload, new = np.empty(encoded_bytes(codec, stop - start), np.uint8), np.empty(n_bytes, np.uint8)
            wire_numpy.publish(codec, theta[start:stop], before.theta[start:stop], old, payload, new)
            lost.append(new)
            start = stop
    return tuple(lost)


def _push(path: Path, said: str | None) -> F32:
    try:
        if said is not None and _sum_of(path) != said:
            raise ConfigError(f"recorded push {path} is not what was written: its checksum differs; restore it")
        push = load_file(path)["push"]
    except (OSError, KeyError, SafetensorError) as error:
        raise ConfigError(f"recorded push {path} cannot be read ({error}): it is needed for the replay") from error
    return np.ascontiguousarray(push, np.float32)


def _sum_of(path: Path) -> str:
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            found.update(piece)
    return found.hexdigest()


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"recorded round {path} cannot be read: {error}") from error
    if not isinstance(raw, dict) or raw.get("format") not in (FORMAT, WITHOUT_CHECKSUMS):
        raise ConfigError(f"recorded round {path} is not of this release: it should say {FORMAT}")
    if raw["format"] == FORMAT and raw.get("xxh3_128") != json_sum(raw, compact=True):
        raise ConfigError(f"recorded round {path} is not what was written: its checksum differs; restore it")
    if str(raw.get("pull_wire", Codec.F32.name)) not in Codec.__members__:
        raise ConfigError(
            f"recorded round {path} was published as {raw['pull_wire']}, which this release does not know"
        )
    return raw
