"""Reads the set-up of a comparison from a TOML file, the user's own or one that comes with the package.

One file holds everything that is the same for all methods: speeds, links, hyper-parameters, tokens. Amounts carry units
("10 Gbps", "1 s"). The table [master] takes the settings of `dips master` by the same names; a method's own settings
override them. Nothing is guessed: an unknown name is refused with the nearest known one.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from dips.core.config import Knobs, SettingsFile, check_known, load_table
from dips.core.errors import ConfigError
from dips.core.layout import FLOAT32_BYTES
from dips.core.units import (
    BitsPerSecond,
    Bytes,
    Count,
    Seconds,
    format_bits_per_s,
    format_bytes,
    format_count,
    format_seconds,
)
from dips.lab.compare.methods import Method
from dips.lab.sim.network import all_reduce_s
from dips.lab.sim.run_plan import RUN_ID
from dips.master.config import MasterConfig
from dips.trainer.sizes import SIZES

# ---- setup tables ----------------------------------------------------------------------------------------------------
#
# The tables of a comparison's set-up, field by field, except [master], whose settings are those of `dips master`.


MAX_CLUSTERS = len(string.ascii_lowercase)


def _listed(value: object) -> object:
    """One value for all clusters, or one for each."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _known_size(name: str) -> str:
    if name not in SIZES:
        raise ValueError(f"choose one of {', '.join(SIZES)}")
    return name


Rates = Annotated[tuple[BitsPerSecond, ...], BeforeValidator(_listed)]


class RunTable(Knobs):
    """[run]"""

    about: str = Field("", description="One sentence about the set-up")
    tokens: Annotated[Count, Field(ge=1)] = Field(786_432, description="Tokens of the run, equal for all methods")
    inner_steps: int = Field(16, ge=1, le=1_000_000, description="H: inner steps between two pushes")
    evaluations: int = Field(12, ge=1, le=1000, description="Points of a curve, equally spaced in tokens")
    heldout_bytes: Bytes = Field(16_384, ge=1024, description="Held-out text that an evaluation reads")
    device: Literal["cpu", "cuda", "auto"] = Field(
        "cpu", description="Where models are trained; auto: a CUDA device when there is one"
    )
    threads: int = Field(
        1,
        ge=1,
        description="Most processor threads of one run; it gets more than one when there are more cores than runs at "
        "work. Equal runs are equal to the bit only with as many threads",
    )


class ModelTable(Knobs):
    """[model]"""

    size: Annotated[str, AfterValidator(_known_size)] = Field(
        "tiny", description="The byte model that is really trained: tiny, small, medium or wide"
    )
    wire_parameters: Count = Field(
        0, description="Parameters from which the size of transfers follows, in float32; 0: as many as the model has"
    )


class InnerTable(Knobs):
    """[inner]: the inner optimizer and its schedule, by the names of `dips train`."""

    batch_size: int = Field(4, ge=1, description="Sequences in an inner step")
    sequence_tokens: int = Field(128, ge=1, description="Tokens in a sequence")
    inner_optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="adamw; muon: Muon for the layers' matrices, and AdamW for the rest"
    )
    lr: float = Field(3e-3, gt=0, description="Peak learning rate")
    warmup_tokens: Count = Field(50_000, description="Tokens of the run over which the learning rate rises")
    min_lr_fraction: float = Field(0.1, ge=0, le=1, description="Learning rate at the end, as a fraction of the peak")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay, of matrices only")
    grad_clip: float = Field(1.0, gt=0, description="Largest norm of the gradient of an inner step")


class ClustersTable(Knobs):
    """[clusters]: one entry of gaps for each."""

    fastest_step: Seconds = Field(1.0, gt=0, description="One inner step without a gap")
    gaps: tuple[float, ...] = Field(
        (0.0, 0.16, 0.33, 0.5),
        description="By how much a step of each cluster takes longer than without a gap: 0.16 = 16 %",
    )
    jitter: float = Field(
        0.0, ge=0, lt=0.5, description="Random variation of a step's time: 0.1 = up to 10 % more or less"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not 1 <= len(self.gaps) <= MAX_CLUSTERS:
            raise ValueError(f"gaps has {len(self.gaps)} entries: give one for each cluster, 1 to {MAX_CLUSTERS}")
        if min(self.gaps) < 0:
            raise ValueError(f"gaps holds {min(self.gaps):g}: a gap is the additional time of a step, so 0 or more")
        return self


class LinksTable(Knobs):
    """[links]: one rate for all clusters, or a list. 0: no limit."""

    up: Rates = Field((0.0,), description="Each cluster's rate towards the servers")
    down: Rates = Field((0.0,), description="Each cluster's rate from the servers")
    latency: Seconds = Field(0.001, gt=0, description="One way between any two processes")
    slave_card: BitsPerSecond = Field(0.0, description="Network card of one slave, each way")


class ServersTable(Knobs):
    """[servers]"""

    slaves: int = Field(2, ge=1, le=64, description="How many slaves hold the model")
    flush: Seconds = Field(0.001, description="One durable write of a slave's or the master's disk")
    work: Seconds = Field(0.001, description="Time of one job of a slave: to measure, to prepare, to write")


class ChangeTable(Knobs):
    """[[changes]]: what becomes different for one cluster, and when; what a row does not name stays as it is."""

    at: Seconds = Field(gt=0, description="When, counted from the first version")
    cluster: str = Field(description="The cluster: a, b, c...")
    step_factor: float | None = Field(
        None, gt=0, description="From then on a step takes so many times the time of [clusters]; 1: that time again"
    )
    jitter: float | None = Field(None, ge=0, lt=0.5, description="Its jitter from then on, in place of [clusters]")
    up: BitsPerSecond | None = Field(None, description="Its rate towards the servers from then on; 0: no limit")
    down: BitsPerSecond | None = Field(None, description="Its rate from the servers from then on")
    presence: Literal["comes", "leaves", "killed"] | None = Field(
        None,
        description="leaves: it pushes its last steps and ends; killed: as by kill -9; comes: a new process of it "
        "starts, which has no state; a cluster whose first presence is this one joins late",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if all(value is None for value in (self.step_factor, self.jitter, self.up, self.down, self.presence)):
            raise ValueError("nothing changes: give step_factor, jitter, up, down or presence")
        return self

    def __str__(self) -> str:
        words = [
            None if self.step_factor is None else f"steps x {self.step_factor:g}",
            None if self.jitter is None else f"jitter {self.jitter:.0%}",
            None if self.up is None else f"up {_rate_text(self.up)}",
            None if self.down is None else f"down {_rate_text(self.down)}",
            {"killed": "is killed", None: None}.get(self.presence, self.presence),
        ]
        return f"{format_seconds(self.at)} {self.cluster} {', '.join(word for word in words if word is not None)}"


@dataclass(frozen=True)
class Conditions:
    """One cluster at one time."""

    step_s: float  # of one inner step
    jitter: float
    up_bits_per_s: float  # 0: no limit
    down_bits_per_s: float
    present: bool


# ---- setup -----------------------------------------------------------------------------------------------------------


SHIPPED = files("dips.lab.compare") / "setups"
LOSS_FIGURES = ("2b", "7", "12")
"""The paper's figures about losses, in dips.lab.compare.figures."""

FOLDER = Path("compared")
"""The folder in the master's settings; a simulated master never uses it."""


VERDICT_WAIT = "30 s"
"""A fixed time, so that the comparison does not depend on how long exchanges took."""

_OURS = {"run_id", "directory", "listen", "log_level", "log_format"}
"""Settings of a real master process that a simulated one does not use."""

_FROM_TABLES = {
    "slaves": "[servers] slaves",
    "sync_every": "[run] inner_steps",
    "tk_max": "[run] tokens",
    "min_clusters": "[clusters]",
    "max_clusters": "[clusters]",
}
"""Settings of the master that follow from other tables, with their keys there."""

_TABLES = ("run", "model", "inner", "clusters", "links", "servers", "master", "changes", "figures")


OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon and AdamW"}
"""For people."""


class ComparisonSetup(Knobs):
    """A complete set-up. Clusters are named a, b, c...; rates in bits/s, times in seconds."""

    name: str = Field(description="File name without .toml")
    run: RunTable = Field(description="[run]")
    model: ModelTable = Field(description="[model]")
    inner: InnerTable = Field(description="[inner]")
    clusters: ClustersTable = Field(description="[clusters]")
    links: LinksTable = Field(description="[links]")
    servers: ServersTable = Field(description="[servers]")
    master: Mapping[str, Any] = Field(description="[master]")
    changes: tuple[ChangeTable, ...] = Field((), description="[[changes]]")
    figures: Mapping[str, tuple[str, ...]] = Field(
        {}, description="[figures]: the lines that a figure has on this set-up; a figure without a row has all of its"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("up", "down"):
            n_rates = len(getattr(self.links, name))
            if n_rates not in (1, self.n_clusters):
                raise ValueError(
                    f"[links] {name} has {n_rates} rates for {self.n_clusters} clusters: give one, or one for each"
                )
        self._check_changes()
        return self

    def _check_changes(self) -> None:
        for number, change in enumerate(self.changes, 1):
            if change.cluster not in self.cluster_names:
                names = ", ".join(self.cluster_names)
                raise ValueError(f"[[changes]] {number}: there is no cluster {change.cluster!r}: choose one of {names}")
        for name in self.cluster_names:
            here = self._present_at_first(name)
            for change in self._in_order:
                if change.cluster != name or change.presence is None:
                    continue
                if (change.presence == "comes") is here:
                    state = "here already" if here else "not here"
                    raise ValueError(
                        f"[[changes]]: cluster {name} is {state} at {format_seconds(change.at)}, so that it cannot be: "
                        f"{change.presence}"
                    )
                here = not here
        for begins_s, _, clusters in self.periods():
            if not any(cluster.present for cluster in clusters):
                raise ValueError(
                    f"[[changes]]: no cluster is here from {format_seconds(begins_s)} on: keep one, or let one come "
                    "before"
                )

    # ---- derived values ----

    @property
    def n_clusters(self) -> int:
        return len(self.clusters.gaps)

    @property
    def cluster_names(self) -> tuple[str, ...]:
        return tuple(string.ascii_lowercase[: self.n_clusters])

    @property
    def slave_names(self) -> tuple[str, ...]:
        return tuple(f"s{index}" for index in range(self.servers.slaves))

    @property
    def step_s(self) -> tuple[float, ...]:
        """Seconds of one inner step, cluster by cluster."""
        return tuple(self.clusters.fastest_step * (1 + gap) for gap in self.clusters.gaps)

    @property
    def up_bits_per_s(self) -> tuple[float, ...]:
        """Rates towards the servers, cluster by cluster; 0: no limit."""
        return _for_each(self.links.up, self.n_clusters)

    @property
    def down_bits_per_s(self) -> tuple[float, ...]:
        return _for_each(self.links.down, self.n_clusters)

    # ---- changes in the run ----

    @property
    def _in_order(self) -> list[ChangeTable]:
        return sorted(self.changes, key=lambda change: change.at)

    def _present_at_first(self, cluster: str) -> bool:
        presences = [c.presence for c in self._in_order if c.cluster == cluster and c.presence is not None]
        return presences[:1] != ["comes"]

    @property
    def first_names(self) -> tuple[str, ...]:
        """The clusters that are there from the beginning."""
        return tuple(name for name in self.cluster_names if self._present_at_first(name))

    def periods(self) -> Iterator[tuple[float, float, tuple[Conditions, ...]]]:
        """(begin, end, conditions of each cluster) of each time without a change, from the first version on; the last
        one has no end."""
        rates = zip(self.cluster_names, self.step_s, self.up_bits_per_s, self.down_bits_per_s, strict=True)
        jitter = self.clusters.jitter
        now = {
            name: Conditions(step_s, jitter, up, down, self._present_at_first(name)) for name, step_s, up, down in rates
        }
        begins_s = 0.0
        for change in self._in_order:
            if change.at > begins_s:
                yield begins_s, change.at, tuple(now.values())
                begins_s = change.at
            now[change.cluster] = self._changed(now[change.cluster], change)
        yield begins_s, math.inf, tuple(now.values())

    def _changed(self, before: Conditions, change: ChangeTable) -> Conditions:
        step_s = self.step_s[self.cluster_names.index(change.cluster)]
        return Conditions(
            before.step_s if change.step_factor is None else step_s * change.step_factor,
            before.jitter if change.jitter is None else change.jitter,
            before.up_bits_per_s if change.up is None else change.up,
            before.down_bits_per_s if change.down is None else change.down,
            before.present if change.presence is None else change.presence == "comes",
        )

    def conditions(self, at_s: float) -> tuple[Conditions, ...]:
        """The conditions of each cluster at this time, seconds from the first version; at a change, those after it."""
        return next(clusters for _, ends_s, clusters in self.periods() if at_s < ends_s)

    def present_s(self, until_s: float) -> dict[str, float]:
        """For how long each cluster is there, up to this time."""
        found = dict.fromkeys(self.cluster_names, 0.0)
        for begins_s, ends_s, clusters in self.periods():
            for name, cluster in zip(self.cluster_names, clusters, strict=True):
                found[name] += max(0.0, min(ends_s, until_s) - begins_s) * cluster.present
        return found

    def ideal_tokens(self, until_s: float) -> float:
        """Tokens up to this time when every cluster that is there trains all the time, and transfers take none."""
        return sum(
            max(0.0, min(ends_s, until_s) - begins_s) * self._tokens_per_s(clusters)
            for begins_s, ends_s, clusters in self.periods()
        )

    def _tokens_per_s(self, clusters: Sequence[Conditions]) -> float:
        return sum(self.tokens_per_step / cluster.step_s for cluster in clusters if cluster.present)

    @property
    def least_tokens_per_s(self) -> float:
        """The lowest of the ideal rates, between any two changes."""
        return min(self._tokens_per_s(clusters) for _, _, clusters in self.periods())

    @property
    def least_bits_per_s(self) -> float:
        """The rate of the narrowest link at any time; infinite where no link has a limit."""
        clusters = [cluster for _, _, found in self.periods() for cluster in found]
        rates = [rate for cluster in clusters for rate in (cluster.up_bits_per_s, cluster.down_bits_per_s)]
        return min((rate for rate in (*rates, self.links.slave_card) if rate > 0), default=math.inf)

    @property
    def tokens_per_step(self) -> int:
        return self.inner.batch_size * self.inner.sequence_tokens

    @property
    def ideal_tokens_per_s(self) -> float:
        """The rate when every cluster trains all the time, and transfers take no time; before any change."""
        return sum(self.tokens_per_step / step_s for step_s in self.step_s)

    @property
    def ideal_ratio(self) -> float:
        """ideal_tokens_per_s / the rate of a method in which all wait for the slowest cluster: sum of speeds / (K x
        slowest)."""
        return sum(1 / step_s for step_s in self.step_s) * max(self.step_s) / self.n_clusters

    def wire_bytes(self, n_elems: int | None = None) -> int:
        """Bytes of one transfer of the whole model, in float32: of wire_parameters, else of the model's n_elems."""
        return FLOAT32_BYTES * (self.model.wire_parameters or n_elems or SIZES[self.model.size].n_elems)

    def all_reduce_s(self, n_elems: int | None = None, at_s: float = 0.0) -> float:
        """Seconds of one ring all-reduce of the model over the clusters' links, as they are at that time."""
        clusters = self.conditions(at_s)
        rates = [c.up_bits_per_s for c in clusters], [c.down_bits_per_s for c in clusters]
        return all_reduce_s(self.wire_bytes(n_elems), *rates, self.links.latency)

    def with_overrides(
        self,
        *,
        gaps: Sequence[float] | None = None,
        inner_steps: int | None = None,
        tokens: int | None = None,
        evaluations: int | None = None,
        device: str | None = None,
        lr: float | None = None,
        inner_optimizer: str | None = None,
        up: Sequence[float] | None = None,
        down: Sequence[float] | None = None,
        jitter: float | None = None,
        latency_s: float | None = None,
        master: Mapping[str, Any] | None = None,
    ) -> ComparisonSetup:
        """The same set-up with these values; None keeps the present one. Raises ConfigError.

        lr: the inner optimizer's. up, down: bits/s, one or one for each cluster; a list of rates is dropped
        when the number of clusters changes. master: added to the table [master].
        """
        tables = self.model_dump()
        changes: Mapping[str, Mapping[str, Any]] = {
            "run": {"inner_steps": inner_steps, "tokens": tokens, "evaluations": evaluations, "device": device},
            "inner": {"lr": lr, "inner_optimizer": inner_optimizer},
            "clusters": {"gaps": gaps, "jitter": jitter},
            "links": {"up": up, "down": down, "latency": latency_s},
        }
        for table, values in changes.items():
            tables[table] |= {name: value for name, value in values.items() if value is not None}
        tables["master"] = {**self.master, **(master or {})}
        tables["changes"] = list(tables["changes"])
        return _from_file(self.name, SettingsFile(f"set-up {self.name}, changed", tables))

    def master_config(self, method: Method) -> MasterConfig:
        """The settings of `dips master` for this method. Raises ConfigError."""
        return load_table(
            MasterConfig,
            {
                "run_id": RUN_ID,
                "directory": FOLDER,
                "slaves": self.servers.slaves,
                "sync_every": self.run.inner_steps,
                "tk_max": self.run.tokens,
                "min_clusters": len(self.first_names),
                "max_clusters": self.n_clusters,
                "verdict_wait_s": VERDICT_WAIT,
                **self.master,
                **method.master,
            },
            f"set-up {self.name}, method {method.name}",
        )

    def check(self, method: Method) -> None:
        """Raises ConfigError for a method that cannot run on this set-up."""
        if method.kind == "servers":
            self.master_config(method)
        elif any(change.presence is not None for change in self.changes):
            raise ConfigError(
                f"method {method.name} needs every cluster in every step, and in set-up {self.name} clusters come, "
                f"leave or are killed: leave {method.name} out of --methods"
            )

    # ---- for people and files ----

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and texts."""
        plain: dict[str, Any] = self.model_dump(mode="json")
        return plain

    def digest(self) -> str:
        """A digest that is equal for set-ups whose runs are equal, whatever their name, description and figures."""
        tables = self.to_json()
        tables["run"].pop("about")
        del tables["name"], tables["figures"]
        return hashlib.blake2b(json.dumps(tables, sort_keys=True).encode(), digest_size=8).hexdigest()

    def describe(self) -> list[tuple[str, str]]:
        """The set-up as lines (what, value) for the screen."""
        inner, run, settings = self.inner, self.run, dict(self.master)
        carried = format_count(self.model.wire_parameters) if self.model.wire_parameters else "its own"
        steps = ", ".join(
            f"{name} {format_seconds(step_s)} (+{gap:.0%})"
            for name, step_s, gap in zip(self.cluster_names, self.step_s, self.clusters.gaps, strict=True)
        )
        return [
            ("set-up", f"{self.name}: {run.about}" if run.about else self.name),
            ("tokens", f"{format_count(run.tokens)} in all, H {run.inner_steps}"),
            (
                "model",
                f"{self.model.size}, {format_count(SIZES[self.model.size].n_elems)} parameters; parameters on the "
                f"wire: {carried}; trained on {run.device}",
            ),
            (
                "inner",
                f"{OPTIMIZERS[inner.inner_optimizer]}, batch {inner.batch_size} x {inner.sequence_tokens} tokens, lr "
                f"{inner.lr:g} (warm-up {format_count(inner.warmup_tokens)} tokens, down to {inner.min_lr_fraction:g} "
                f"of it), weight decay {inner.weight_decay:g}, gradient clip {inner.grad_clip:g}",
            ),
            ("one step", f"{steps}; jitter {self.clusters.jitter:.0%}; ideal ratio {self.ideal_ratio:.3f}"),
            ("links up", self._rates_text(self.up_bits_per_s)),
            ("links down", self._rates_text(self.down_bits_per_s)),
            (
                "servers",
                f"{self.servers.slaves} slaves, card {_rate_text(self.links.slave_card)}, a job "
                f"{format_seconds(self.servers.work)}, a durable write {format_seconds(self.servers.flush)}, latency "
                f"{format_seconds(self.links.latency)}",
            ),
            *([("changes", "; ".join(map(str, self._in_order)))] if self.changes else []),
            ("held-out", f"{format_bytes(run.heldout_bytes)}, {run.evaluations} evaluations"),
            ("master", ", ".join(f"{name} {value}" for name, value in settings.items()) or "defaults"),
        ]

    def _rates_text(self, rates: tuple[float, ...]) -> str:
        if len(set(rates)) == 1:
            return _rate_text(rates[0])
        return ", ".join(f"{name} {_rate_text(rate)}" for name, rate in zip(self.cluster_names, rates, strict=True))


def shipped() -> list[str]:
    """Names of the set-ups that come with the package."""
    return sorted(item.name.removesuffix(".toml") for item in SHIPPED.iterdir() if item.name.endswith(".toml"))


def load_setup(name: str | Path) -> ComparisonSetup:
    """Load a shipped set-up by its name, or the user's own file. Raises ConfigError."""
    path = _find(name)
    return _from_file(path.stem, SettingsFile.read(path, _TABLES))


def _find(name: str | Path) -> Path:
    """The file of a set-up. A shipped name takes precedence over a file or folder of that name in the working
    directory."""
    own = Path(name)
    if str(name) in shipped():
        return Path(str(SHIPPED / f"{name}.toml"))
    if own.suffix == ".toml" or own.exists():
        return own
    near = difflib.get_close_matches(str(name), shipped(), n=1)
    remedy = f"did you mean {near[0]!r}?" if near else "give the path of a .toml file, or one of these names"
    raise ConfigError(
        f"{str(name)!r} is neither a file nor a set-up that comes with dips ({', '.join(shipped())}): {remedy}"
    )


def _from_file(name: str, file: SettingsFile) -> ComparisonSetup:
    parts: dict[str, object] = {
        "name": name,
        "run": file.settings(RunTable, "run"),
        "model": file.settings(ModelTable, "model"),
        "inner": file.settings(InnerTable, "inner"),
        "clusters": file.settings(ClustersTable, "clusters"),
        "links": file.settings(LinksTable, "links"),
        "servers": file.settings(ServersTable, "servers"),
        "master": file.table("master"),
        "changes": file.settings_of_rows(ChangeTable, "changes"),
        "figures": file.table("figures"),
    }
    check_known(file.table("figures"), LOSS_FIGURES, file.where("figures"))
    # The settings of `dips master` stay as written; they are checked here, and again with those of each method.
    if wrong := sorted(_OURS & set(file.table("master"))):
        raise ConfigError(f"{file.where('master')}: {wrong[0]!r} has no meaning in a simulation: leave it out")
    if wrong := sorted(set(_FROM_TABLES) & set(file.table("master"))):
        follows = _FROM_TABLES[wrong[0]]
        raise ConfigError(f"{file.where('master')}: {wrong[0]!r} follows from {follows}: leave it out here")
    load_table(MasterConfig, {"run_id": RUN_ID, "directory": FOLDER, **file.table("master")}, file.where("master"))
    return load_table(ComparisonSetup, parts, file.name)


def _for_each(values: tuple[float, ...], n: int) -> tuple[float, ...]:
    return values * n if len(values) == 1 else values


def _rate_text(bits_per_s: float) -> str:
    return format_bits_per_s(bits_per_s) if bits_per_s else "without limit"
