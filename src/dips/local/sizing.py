"""Computes how much memory, disk and time a run needs: one table of formulas, from a few numbers that a person knows.

Pure: the same knobs give the same table. The formulas are those of docs/capacity.md, docs/storage.md and
lab/sim/scale/rates.py; rates that depend on a machine are knobs, and their defaults name their source. It must never
hold a rate without one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from dips.core.assumptions import names_of, value_of
from dips.core.config import Knobs
from dips.core.errors import ConfigError
from dips.core.layout import DEFAULT_BLOCK_ELEMS, MAX_ELEMS
from dips.core.math.outer_numpy import PIECE_ELEMS
from dips.core.placement import KEPT_PRODUCTS
from dips.core.protocol import MAX_RANKS
from dips.core.units import BitsPerSecond, Bytes, BytesPerSecond, Count
from dips.core.wire import RESIDUAL_CODEC, SCALE_BLOCK_ELEMS, WIRE_DTYPES, Codec, encoded_bytes
from dips.master.config import MasterConfig
from dips.slave.config import SlaveConfig


@dataclass(frozen=True)
class Quantity:
    """One number with its formula."""

    key: str
    what: str
    unit: str  # "bytes", "s", "bits/s", "share" (of one) or "" (a count)
    formula: str
    numbers: Mapping[str, float]  # what was put in, by the formula's names, in their order
    value: float
    note: str = ""  # where it is used, or what is not in it

    @property
    def whole(self) -> int:
        """Rounded up, for who needs a whole number of bytes or parameters."""
        return math.ceil(self.value)


_ALIASES = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16"}

Rate = Annotated[BitsPerSecond, Field(gt=0)]


def _wire(value: object) -> object:
    known = _ALIASES.get(str(value).lower(), str(value).lower())
    if known not in WIRE_DTYPES:
        raise ValueError(f"{value!r} is none of {', '.join(WIRE_DTYPES)}")
    return known


class SizeKnobs(Knobs):
    """The settings of `dips size`. Rates are a machine's; their defaults say where they were measured or fitted."""

    params: Annotated[Count, Field(ge=1, le=MAX_ELEMS)] = Field(description="Parameters of the model")
    clusters: int = Field(ge=1, le=1024, description="Clusters that train at the same time")
    slaves: int = Field(ge=1, le=1024, description="Slaves that share the model")
    ranks: int = Field(
        1,
        ge=1,
        le=MAX_RANKS,
        description="Ranks of each cluster, of any parallelism; each pushes and pulls its own share of the model",
    )
    link: Rate = Field(
        description="Rate of a cluster's link to the slaves' site, each way, such as 10gbps; with --ranks, of each "
        "rank's own"
    )
    slave_link: Rate | None = Field(None, description="Network card of one slave, each way (default: as --link)")
    wire: Annotated[str, BeforeValidator(_wire)] = Field(
        "float32", description="How pushes are written: float32 (fp32), bfloat16 (bf16), int8 or int4"
    )
    pull_wire: Annotated[str, BeforeValidator(_wire)] = Field(
        "float32", description="How pulls are written, as the master's: float32, bfloat16, int8 or int4"
    )
    keys: bool = Field(True, description="Whether the data flow is encrypted")
    sync_every: int = Field(64, ge=1, le=1_000_000, description="H: inner steps between two pushes")
    tokens_per_s: float | None = Field(
        None,
        gt=0,
        description="How fast one cluster trains (default: 112,912 tokens/s at 100e9 parameters, a cluster of 1,024 "
        "accelerators as fitted to the Di-PS paper in `dips simulate paper-33-days`, faster in proportion for less)",
    )
    tokens_per_step: Annotated[Count, Field(ge=1)] = Field(
        2_097_152, description="Tokens of one inner step of a cluster; the default is the same fit"
    )
    overlap: Literal["none", "push", "full"] = Field("full", description="What clusters train through; as the master's")
    max_clusters: int | None = Field(
        None, ge=1, le=1024, description="Staging slots of a slave, as the master's (default: as --clusters)"
    )
    pinned_versions: int = Field(2, ge=0, le=1024, description="Older versions kept for readers, as the master's")
    memory_files: Literal["none", "stagings", "versions"] = Field(
        "none", description="What slaves keep in files on their disk in place of memory, as the master's"
    )
    slave_ram: Annotated[Bytes, Field(gt=0)] | None = Field(
        None, description="Memory of a slave's host, such as 125GB: print what it holds (default: it is not asked)"
    )
    snapshots_kept: int = Field(3, ge=1, le=1000, description="Snapshots on a slave's disk, as the slave's")
    checkpoints_kept: int = Field(2, ge=1, description="Checkpoints on a cluster's disk, as the worker's")
    optimizer_bytes: float = Field(
        8.0,
        ge=0,
        le=64,
        description="Inner optimizer's bytes a parameter: 8 AdamW in float32, 4 momentum, 4 for matrices under Muon, "
        "0 SGD",
    )
    chunk_bytes: Annotated[Bytes, Field(ge=4096)] = Field(1 << 20, description="Size of one data message")
    archive_bytes: Bytes = Field(1 << 30, description="Room for the master's archive")
    journal_records: int = Field(20_000, ge=1, le=10_000_000, description="Decisions in the master's journal")
    link_share: float = Field(
        0.93, gt=0, le=1, description="What a push reaches of a link's rate; measured: docs/performance.md, a far link"
    )
    crypto_rate: BytesPerSecond = Field(
        1.2e9,
        description="One process's encryption; measured earlier: docs/performance.md has 1.7 GB/s for a push with keys",
    )
    slave_rate: BytesPerSecond = Field(
        2.2e9,
        description="What one slave receives, checks and lands; measured earlier, with Python loops: "
        "docs/performance.md has 3.1 to 3.9 GB/s for a push",
    )
    memory_rate: BytesPerSecond = Field(
        1.9e9, description="Bytes that one slave's outer step moves; fitted to the Di-PS paper's update time, 110 s"
    )
    disk_rate: BytesPerSecond = Field(
        2.74e9, description="Bytes that one slave writes durably; measured: docs/performance.md, Snapshots"
    )
    copy_rate: BytesPerSecond = Field(
        40e9, description="A cluster's copy of its live parameters; assumed, as in `dips simulate paper-33-days`"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.params < self.slaves:
            raise ValueError(
                f"{self.params} parameters cannot be divided among {self.slaves} slaves: give fewer slaves"
            )
        if self.max_clusters is not None and self.max_clusters < self.clusters:
            raise ValueError(
                f"max_clusters is {self.max_clusters}, and {self.clusters} clusters are to train: raise it, or leave "
                "it out"
            )
        if self.params < self.ranks:
            raise ValueError(f"{self.params} parameters cannot be divided among {self.ranks} ranks: give fewer ranks")
        if self.chunk_bytes % 4:
            raise ValueError(f"chunk_bytes is {self.chunk_bytes}: use a multiple of 4, the size of a parameter")
        return self


class SizeTable:
    """The table: quantities by key, in the order in which they are shown. remarks: what must not be overlooked."""

    def __init__(self, knobs: SizeKnobs) -> None:
        """Raises ConfigError when a number leaves all bounds."""
        self.knobs = knobs
        self.rows: dict[str, Quantity] = {}
        self._inputs = _inputs(knobs)
        for section in (_slave, _host, _master, _cluster, _transfers, _update, _round):
            for key, what, unit, formula, note in section(knobs):
                self._add(key, what, unit, formula, note)
        self.remarks = tuple(_remarks(self))

    def __getitem__(self, key: str) -> Quantity:
        return self.rows[key]

    def input(self, name: str) -> float:
        """A number that formulas start from, as it was given or by default."""
        return self._inputs[name]

    def whole(self, key: str) -> int:
        """A quantity rounded up: bytes or parameters."""
        return self.rows[key].whole

    def _add(self, key: str, what: str, unit: str, formula: str, note: str) -> None:
        known = {**self._inputs, **{name: row.value for name, row in self.rows.items()}}
        numbers = {name: known[name] for name in names_of(formula)}
        value = value_of(formula, numbers)
        if not math.isfinite(value):
            raise ConfigError(f"{what} is no finite number with these settings: check them")
        self.rows[key] = Quantity(key, what, unit, formula, numbers, value, note)


def size_of_run(master: MasterConfig, slave: SlaveConfig, **given: Any) -> SizeTable:
    """All quantities of a run whose processes have these settings. given: the other knobs. Raises as SizeTable."""
    return SizeTable(
        SizeKnobs(
            pinned_versions=master.pinned_versions,
            memory_files=master.memory_files,
            pull_wire=master.pull_wire,
            snapshots_kept=slave.snapshots_kept,
            chunk_bytes=master.chunk_bytes,
            archive_bytes=master.archive_bytes,
            journal_records=master.journal_records,
            **given,
        )
    )


SizeRow = tuple[str, str, str, str, str]
"""key, what, unit, formula, note."""

PAPER_PARAMS = 100e9
PAPER_TOKENS_PER_S = 112_912.0
"""Cluster A of the scenario paper-33-days: Table 1's PFLOPS, with one factor fitted to the run's tokens."""


def _inputs(knobs: SizeKnobs) -> Mapping[str, float]:
    """What formulas may name in addition to earlier quantities: knobs, and constants of the code."""
    slots = knobs.max_clusters or knobs.clusters
    given = {
        name: float(value)
        for name, value in dict(iter(knobs)).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return {
        **given,
        "slots": slots,
        "slave_ram": knobs.slave_ram or 0,
        "slave_link": knobs.slave_link or knobs.link,
        "tokens_per_s": knobs.tokens_per_s or PAPER_TOKENS_PER_S * PAPER_PARAMS / knobs.params,
        # Bytes of one parameter in a push, in a pull, and of what a slave keeps of a pull's rounding.
        "wire_bytes": _bytes_of_param(WIRE_DTYPES[knobs.wire]),
        "pull_wire_bytes": _bytes_of_param(WIRE_DTYPES[knobs.pull_wire]),
        "lost_bytes": _bytes_of_param(RESIDUAL_CODEC),
        "residual_bytes": 4 if WIRE_DTYPES[knobs.wire].is_difference else 0,
        "pairs": slots * (slots + 1) // 2,
        "products": min(slots * (slots - 1) // 2, KEPT_PRODUCTS),
        "block_params": DEFAULT_BLOCK_ELEMS,
        "piece_params": PIECE_ELEMS,
    }


def _bytes_of_param(codec: Codec) -> float:
    """Bytes of one parameter in this codec, scales included."""
    return encoded_bytes(codec, SCALE_BLOCK_ELEMS) / SCALE_BLOCK_ELEMS


_OF_PARAM = {
    "none": "20 + 4 * slots + 4 * pinned_versions",
    "stagings": "20 + 4 * pinned_versions",
    "versions": "8",
}
"""A slave's own memory for each parameter, by memory_files; _IN_FILES: what is in files."""

_IN_FILES = {"stagings": "4 * slots", "versions": "12 + 4 * slots + 4 * pinned_versions"}


_OF_DIFFERENCES = " + (3 + pinned_versions) * pull_wire_bytes + 2 * lost_bytes"
"""What pull_wire adds: the differences that lead to v, v-1, v+1 and pins, and what rounding lost of v and v+1."""


_OF_DIFFERENCES_NO_PINS = " + 3 * pull_wire_bytes + 2 * lost_bytes"


def _rounds(knobs: SizeKnobs) -> bool:
    return WIRE_DTYPES[knobs.pull_wire].is_difference


def _own_of_param(knobs: SizeKnobs, files: str) -> str:
    return _OF_PARAM[files] + (_OF_DIFFERENCES if _rounds(knobs) else "")


def _slave(knobs: SizeKnobs) -> Iterator[SizeRow]:
    # The ranks of a cluster divide its window of chunks, and have one chunk each at least.
    window = "64" if knobs.ranks <= 64 else "ranks"
    yield (
        "shard_params",
        "parameters of one slave, at most",
        "",
        "min(params, ceil(params / slaves) + block_params)",
        "whole blocks are assigned, largest first: no slave holds more than a fair share and one block",
    )
    yield (
        "tables_bytes",
        "what a slave notes of pieces and chunks",
        "bytes",
        "ceil(shard_params / piece_params) * (16 + 16 * slots + 8 * products + 9 * pairs)"
        " + ceil(4 * shard_params / chunk_bytes) * (72 * slots + 16 * products + 56 * (3 + pinned_versions))",
        "",
    )
    yield (
        "slave_memory_bytes",
        "memory_bytes of a slave",
        "bytes",
        f"1.01 * (shard_params * ({_own_of_param(knobs, knobs.memory_files)}) + tables_bytes) + MiB",
        "the setting; 1 % for blocks that end short where a layer ends",
    )
    yield (
        "slave_process_bytes",
        "memory of a slave's process",
        "bytes",
        f"slave_memory_bytes + 90 * MiB + 2 * slots * {window} * chunk_bytes + 256 * MiB",
        "base, messages under way and room in addition to the setting (docs/capacity.md)",
    )
    yield (
        "slave_ring_bytes",
        "snapshots on a slave's disk",
        "bytes",
        f"(snapshots_kept + 1) * ({'(8 + lost_bytes)' if _rounds(knobs) else '8'} * shard_params + 4096)",
        "claimed when the model is known; without record_pushes",
    )
    if knobs.memory_files != "none":
        yield (
            "slave_file_bytes",
            f"files of a slave's memory (memory_files {knobs.memory_files})",
            "bytes",
            f"shard_params * ({_IN_FILES[knobs.memory_files]})",
            "they have no names, and are freed with the process; the system keeps their pages in memory that is free",
        )
    yield (
        "slave_volume_bytes",
        "volume of a slave",
        "bytes",
        "1.06 * (slave_ring_bytes + slave_file_bytes) + 256 * MiB"
        if knobs.memory_files != "none"
        else "1.06 * slave_ring_bytes + 256 * MiB",
        "5 % that ext4 keeps back, 1 % for its own tables; manifests, and tapes for a while",
    )


def _host(knobs: SizeKnobs) -> Iterator[SizeRow]:
    """What slave_ram holds. Durability needs no memory: nothing is copied for "async" either (docs/storage.md)."""
    if knobs.slave_ram is None:
        return
    room = "slave_ram - 347 * MiB - 1.01 * tables_bytes"
    of_slot = "4.04 * shard_params + 128 * chunk_bytes"
    for suffix, pins, about in (("", " + 4 * pinned_versions", "with these pins"), ("_no_pins", "", "without pins")):
        differences = (_OF_DIFFERENCES if pins else _OF_DIFFERENCES_NO_PINS) if _rounds(knobs) else ""
        yield (
            f"slots_held{suffix}",
            f"staging slots in slave_ram (memory_files none), {about}",
            "",
            f"max(0, floor(({room} - 1.01 * shard_params * (20{pins}{differences})) / ({of_slot})))",
            "as many clusters, durability sync or async",
        )
    for files in _OF_PARAM:
        of_param = _own_of_param(knobs, files)
        hot = {"none": "", "stagings": "", "versions": " + 4"}[files]
        yield (
            f"slaves_{files}",
            f"slaves with slave_ram that hold the run, memory_files {files}",
            "",
            f"ceil(1.01 * params * ({of_param}{hot}) / max(1, {room} - 128 * slots * chunk_bytes - 1.01 *"
            f" block_params * ({of_param}{hot})))",
            "for all slots and pins, durability sync or async"
            + ("; with room for the current version, which every pull and push reads" if hot else ""),
        )


def _master(_: SizeKnobs) -> Iterator[SizeRow]:
    yield (
        "measure_bytes",
        "answers to MEASURE of all slaves",
        "bytes",
        "ceil(slaves * shard_params / block_params) * (32 + 10 * slots + 8 * pairs)",
        "",
    )
    yield (
        "master_connections_bytes",
        "what connections may take of the master, whoever opens them",
        "bytes",
        "(832 + 6 * (slots + slaves)) * 80 * KiB + 128 * 640 * KiB + 16 * 512 * KiB",
        "control port, status page, metrics (docs/capacity.md)",
    )
    yield (
        "master_memory_bytes",
        "memory of the master's process",
        "bytes",
        "45 * MiB + (1024 + slots) * KiB + 4 * measure_bytes + 256 * MiB + master_connections_bytes",
        "base, every id that ever took part, numbers as Python's objects, messages, connections",
    )
    yield (
        "master_disk_bytes",
        "journal and archive of the master",
        "bytes",
        "archive_bytes + 2 * journal_records * (2 + slots) * KiB",
        "about 1 KB for each cluster in an entry; twice, as SQLite keeps a log next to the file; without the tape",
    )


def _cluster(knobs: SizeKnobs) -> Iterator[SizeRow]:
    # theta_base and theta_at_push, in whose place the pulled version lands as long as training waits.
    vectors = 8 if knobs.overlap == "none" else 12
    if knobs.ranks > 1:
        yield from _ranks(vectors)
        return
    yield (
        "cluster_memory_bytes",
        "memory on the hosts of one cluster, for Di-PS",
        "bytes",
        f"params * ({vectors} + 2 * residual_bytes + 12 + optimizer_bytes) + slaves * 64 * chunk_bytes + 80 * MiB",
        "with the training itself not counted: base and push vectors, the copy that checkpoints are written from, "
        "chunks under way, and libraries with compiled code",
    )
    yield (
        "cluster_disk_bytes",
        "checkpoints of one cluster",
        "bytes",
        "(checkpoints_kept + 1) * params * (12 + optimizer_bytes + residual_bytes)",
        "one more than are kept, while it is written",
    )


def _ranks(vectors: int) -> Iterator[SizeRow]:
    """A cluster of several ranks. Shares are the same for every parallelism (worker/parallel/ownership.py). vectors:
    bytes a parameter, of all vectors but the residual.
    """
    yield (
        "share_params",
        "parameters that one rank owns, with even shares",
        "",
        "min(params, params / ranks + chunk_bytes / 4)",
        "whole chunks; for every parallelism, as shares do not depend on it",
    )
    yield (
        "share_most_params",
        "parameters that one rank owns, at most",
        "",
        "min(params, 1.1 * params / ranks + chunk_bytes / 4)",
        "where ranks hold parts of different sizes",
    )
    for suffix, about in (("", "with even shares"), ("_most", "at most")):
        yield (
            f"rank_memory{suffix}_bytes",
            f"host memory of one rank, for Di-PS, {about}",
            "bytes",
            f"share{suffix}_params * ({vectors} + residual_bytes) + 4 * 8 * MiB + 16 * ranks"
            f" + min(slaves * max(1, 64 / ranks) * chunk_bytes, 4 * share{suffix}_params) + 80 * MiB",
            "base and push vectors, residual; buckets of the exchange among ranks; chunks under way; libraries with "
            "compiled code",
        )
    yield (
        "cluster_memory_bytes",
        "memory on the hosts of one cluster, for Di-PS",
        "bytes",
        "ranks * rank_memory_bytes",
        "of all ranks together; with the training itself, and copies that checkpoints are written from, not counted",
    )


def _transfers(knobs: SizeKnobs) -> Iterator[SizeRow]:
    yield "push_bytes", "bytes of one push", "bytes", "params * wire_bytes", ""
    if _rounds(knobs):
        note = "the difference to the version before; who joined, or is three versions behind, gets parameters"
        yield "pull_bytes", "bytes of one pull", "bytes", "params * pull_wire_bytes", note
    else:
        yield "pull_bytes", "bytes of one pull", "bytes", "params * 4", "parameters travel back as float32"
    crypto = ", 8 * crypto_rate" if knobs.keys else ""
    disk = ", 8 * disk_rate" if knobs.memory_files != "none" else ""
    yield (
        "slaves_rate",
        "what all slaves take or give together",
        "bits/s",
        f"slaves * min(link_share * slave_link, 8 * slave_rate{crypto}{disk})",
        "",
    )
    of_ranks = "ranks * " if knobs.ranks > 1 else ""
    yield (
        "alone_rate",
        "rate of a cluster that moves alone",
        "bits/s",
        f"min({of_ranks}link_share * link, slaves_rate{crypto.replace('8', f'{of_ranks}8')})",
        "each rank has a link of its own; up to 1.1 times as slow where shares are uneven" if of_ranks else "",
    )
    yield "together_rate", "rate of each when all move", "bits/s", "min(alone_rate, slaves_rate / clusters)", ""
    for what in ("push", "pull"):
        yield f"{what}_s", f"time of a {what}, alone", "s", f"8 * {what}_bytes / alone_rate", ""
        yield (
            f"{what}_together_s",
            f"time of a {what}, all at once",
            "s",
            f"8 * {what}_bytes / together_rate",
            "",
        )


def _update(knobs: SizeKnobs) -> Iterator[SizeRow]:
    # Where memory for them is short, pushes are read back from their files, and with them theta of v and v+1.
    paged = {"none": "", "stagings": " + 4 * shard_params * {k} / disk_rate"}.get(
        knobs.memory_files, " + 4 * shard_params * ({k} + 2) / disk_rate"
    )
    yield (
        "update_s",
        "update with one cluster's push",
        "s",
        "4 * shard_params * (1 + 1 + 4 + 1) / memory_rate + 8 * shard_params / disk_rate" + paged.format(k=1),
        "MEASURE reads 1 + k vectors (at most: sums are mostly taken on receipt), the step moves 4 + k, and the "
        "snapshot follows",
    )
    yield (
        "update_together_s",
        "update with a push of every cluster",
        "s",
        "4 * shard_params * (1 + clusters + 4 + clusters) / memory_rate + 8 * shard_params / disk_rate"
        + paged.format(k="clusters"),
        "",
    )
    yield (
        "slave_start_s",
        "start of a slave that was killed",
        "s",
        "(snapshots_kept + 1) * 8 * shard_params / disk_rate",
        "every file of the ring is read back before it attaches to the master",
    )


def _round(knobs: SizeKnobs) -> Iterator[SizeRow]:
    yield "step_s", "one inner step", "s", "tokens_per_step / tokens_per_s", ""
    yield "compute_s", "inner steps between two pushes", "s", "sync_every * step_s", ""
    yield "copies_s", "copies of the live parameters", "s", "2 * 4 * params / copy_rate", "to the push, from the pull"
    yield "exchange_s", "exchange of a cluster alone", "s", "push_s + update_s + pull_s + copies_s", ""
    yield (
        "exchange_together_s",
        "exchange when all come at once",
        "s",
        "push_together_s + update_together_s + pull_together_s + copies_s",
        "",
    )
    for suffix, whose in (("", "a cluster alone"), ("_together", "all come at once")):
        yield (
            f"stall{suffix}_s",
            f"of it, not hidden (overlap {knobs.overlap}), {whose}",
            "s",
            _stall(knobs.overlap, suffix),
            "",
        )
        yield (
            f"overhead{suffix}",
            f"overhead fraction, {whose}",
            "share",
            f"stall{suffix}_s / (compute_s + stall{suffix}_s)",
            "without the wait for the grace window and for a round that is under way",
        )
    yield (
        "sync_every_5_percent",
        "sync_every for an overhead of 5 % (overlap none)",
        "",
        "ceil(exchange_s * (1 - 0.05) / 0.05 / step_s)",
        "",
    )


def _stall(overlap: str, suffix: str) -> str:
    push, update, pull = (f"{what}{suffix}_s" for what in ("push", "update", "pull"))
    if overlap == "none":
        return f"exchange{suffix}_s"
    if overlap == "push":
        return f"{update} + {pull} + copies_s + max(0, {push} - compute_s)"
    return f"copies_s + max(0, {push} + {update} + {pull} - compute_s)"


MAX_MESSAGE_BYTES = 64 << 20
"""The default of the master's max_message_bytes, which bounds one slave's answer to MEASURE."""


MUCH_OF_A_ROUND = 0.25
"""In the set-up slow-link of `dips compare` a round of 24 s loses 0.18 nats by 14 s of transfers, and 0.06 by 2 s."""


def _remarks(sizes: SizeTable) -> Iterator[str]:
    slots = sizes.knobs.max_clusters or sizes.knobs.clusters
    if slots != 8:
        yield f"the master's max_clusters is 8 unless set: write max_clusters = {slots} in [master]"
    of_slave = sizes["measure_bytes"].value / sizes.knobs.slaves
    if of_slave > MAX_MESSAGE_BYTES:
        yield (
            f"a slave's answer to MEASURE has up to {math.ceil(of_slave)} bytes, above max_message_bytes (64 MiB): "
            "raise it in [master], or give more slaves"
        )
    # Of a round's steps, those made during an exchange
    hidden_s = sum(sizes[f"{what}_s"].value for what in ("push", "update", "pull"))
    hidden, overlaps = min(1.0, hidden_s / sizes["compute_s"].value), sizes.knobs.overlap == "full"
    remedy = "raise sync_every, or choose a smaller --wire and --pull-wire"
    if sizes["overhead"].value > 0.2:
        yield (
            f"clusters wait for more than a fifth of their time: {remedy}, {'' if overlaps else '--overlap full, '}"
            "or a faster link"
        )
    elif overlaps and hidden > MUCH_OF_A_ROUND:
        yield (
            f"clusters exchange during {hidden:.0%} of their steps, which begin at outdated parameters and cost loss "
            f"(docs/convergence.md, hard conditions): {remedy}"
        )
    if sizes["together_rate"].value < 0.99 * sizes["alone_rate"].value:
        yield "when all clusters move at once the slaves are the bottleneck, not the clusters' links: give more slaves"
