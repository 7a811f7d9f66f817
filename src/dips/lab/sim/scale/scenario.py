"""Reads the set-up of a simulation at scale from a TOML file, the user's own or one that comes with the package.

Amounts carry units ("12 Gbps", "600 GB", "2 h"). The table [master] takes the settings of `dips master` by the same
names, so that what is simulated is what would run. Nothing is guessed: an unknown name is refused with the nearest
known one.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from dips.core.config import Knobs, Name, SettingsFile, check_unique, load_table
from dips.core.errors import ConfigError
from dips.core.units import BitsPerSecond, Bytes, BytesPerSecond, Count, Seconds
from dips.master.config import MasterConfig
from dips.master.state.shared import RunConfig

SHIPPED = files("dips.lab.sim.scale") / "scenarios"
DAY_S = 86_400.0

_OURS = {"run_id", "directory", "listen", "slaves", "log_level", "log_format"}
"""Settings of a real master process that a simulated one does not use."""

_TABLES = ("run", "model", "data", "slaves", "master", "clusters", "faults")


Rate = Annotated[BitsPerSecond, Field(gt=0)]
Window = tuple[float, float]


class ScaleRunTable(Knobs):
    """[run]"""

    about: str = Field("", description="One sentence about the simulated run")
    hours: float = Field(24.0, gt=0, le=10_000, description="How long the run lasts, in simulated hours")
    seed: int = Field(0, ge=0, description="Seed of failures, speeds and norms; the same seed gives the same run")
    paper_overhead: float = Field(0.0, ge=0, lt=1, description="Overhead from a source, to print next to ours")
    paper_tokens: Count = Field(0, description="Tokens from a source, to print next to ours")


class ScaleModelTable(Knobs):
    """[model]"""

    parameters: Annotated[Count, Field(ge=1)] = Field(description="How many parameters; float32 on the wire")
    layers: int = Field(ge=1, le=10_000, description="Layers of equal size, which are distributed over the slaves")


class DataTable(Knobs):
    """[data]"""

    total_tokens: Annotated[Count, Field(ge=1)] = Field(description="Tokens of the data set; then it begins again")
    chunk_tokens: Annotated[Count, Field(ge=1)] = Field(description="Tokens that are leased as one piece")


class SlavesTable(Knobs):
    """[slaves]"""

    count: int = Field(ge=1, le=1024, description="How many slaves hold the model")
    network: Rate = Field(description="Network card of one slave, each way")
    memory: Bytes = Field(description="Memory of one slave for parameters")
    memory_rate: BytesPerSecond = Field(description="Bytes that one slave's outer step moves in a second")
    disk_rate: BytesPerSecond = Field(description="Bytes that one slave writes durably, or reads, in a second")
    restart: Seconds = Field(30.0, description="From a slave's or master's death until its process is up again")
    journal: Seconds = Field(0.005, description="One durable write of the master's journal")
    round_trip: Seconds = Field(0.02, description="Network delay there and back between a cluster and master or slaves")
    near_round_trip: Seconds = Field(0.001, description="The same between master and slaves, which are at one site")


class ClusterTable(Knobs):
    """[[clusters]]"""

    id: Name = Field(description="Name of the cluster")
    npus: int = Field(1, ge=1, description="Accelerators; only for the picture of resources")
    tokens_per_s: float = Field(gt=0, description="Training speed")
    tokens_per_step: Annotated[Count, Field(ge=1)] = Field(description="Tokens of one inner step")
    jitter: float = Field(0.0, ge=0, lt=0.5, description="Standard deviation of its speed from round to round")
    up: Rate = Field(description="Its rate towards the slaves")
    down: Rate = Field(description="Its rate from the slaves")
    copy_rate: BytesPerSecond = Field(description="Copying live parameters to and from the transfer buffer")
    mtbf_days: float = Field(0.0, ge=0, description="Mean days between its failures; 0: it never fails")
    restart: Seconds = Field(600.0, description="Mean time from its failure until it can join again")
    link_mtbf_days: float = Field(0.0, ge=0, description="Mean days between outages of its link; 0: none")
    link_outage: Seconds = Field(120.0, description="Mean length of an outage of its link")
    bad_push: float = Field(0.0, ge=0, le=1, description="Share of its pushes whose norm is 30 times too large")
    present_days: tuple[Window, ...] = Field((), description="[[from, to], ...] when it may run; empty: always")

    @model_validator(mode="after")
    def _check(self) -> Self:
        at = 0.0
        for begin, end in self.present_days:
            if not at <= begin < end:
                raise ValueError(
                    f"present_days holds [{begin:g}, {end:g}]: list windows in order of time, each with its "
                    "beginning before its end"
                )
            at = end
        return self


class FaultsTable(Knobs):
    """[faults]"""

    slave_mtbf_days: float = Field(0.0, ge=0, description="Mean days between deaths of any slave; 0: none")
    master_mtbf_days: float = Field(0.0, ge=0, description="Mean days between deaths of the master; 0: none")


class Scenario(Knobs):
    """A complete set-up."""

    name: str = Field(description="File name without .toml")
    run: ScaleRunTable = Field(description="[run]")
    model: ScaleModelTable = Field(description="[model]")
    data: DataTable = Field(description="[data]")
    slaves: SlavesTable = Field(description="[slaves]")
    clusters: tuple[ClusterTable, ...] = Field(description="[[clusters]]")
    faults: FaultsTable = Field(description="[faults]")
    master: RunConfig = Field(description="[master]")

    @property
    def duration_s(self) -> float:
        return self.run.hours * 3600.0

    def windows_s(self, cluster: ClusterTable) -> list[tuple[float, float]]:
        """When a cluster may run, within the run's time."""
        if not cluster.present_days:
            return [(0.0, self.duration_s)]
        cut = ((begin * DAY_S, min(end * DAY_S, self.duration_s)) for begin, end in cluster.present_days)
        return [(begin, end) for begin, end in cut if begin < end]

    def ideal_tokens(self) -> float:
        """Tokens that the clusters would train on in their windows without failures, if only training took time."""
        return sum(
            cluster.tokens_per_s * (end - begin) for cluster in self.clusters for begin, end in self.windows_s(cluster)
        )


def shipped() -> list[str]:
    """Names of the scenarios that come with the package."""
    return sorted(item.name.removesuffix(".toml") for item in SHIPPED.iterdir() if item.name.endswith(".toml"))


def find(name: str) -> Path:
    """The file of a shipped scenario, or the user's own. Raises ConfigError."""
    own = Path(name)
    if own.suffix == ".toml" or own.exists():
        return own
    if name in shipped():
        return Path(str(SHIPPED / f"{name}.toml"))
    raise ConfigError(
        f"{name!r} is neither a file nor a scenario that comes with dips ({', '.join(shipped())}): give the path of "
        "a .toml file, or one of these names"
    )


def load_scenario(path: Path, *, hours: float | None = None, seed: int | None = None) -> Scenario:
    """Read and check a set-up; hours and seed override the file. Raises ConfigError."""
    file = SettingsFile.read(path, _TABLES)
    given = {key: value for key, value in (("hours", hours), ("seed", seed)) if value is not None}
    slaves = file.settings(SlavesTable, "slaves")
    clusters = file.settings_of_rows(ClusterTable, "clusters", required=True)
    check_unique((cluster.id for cluster in clusters), "id", f"{path} [[clusters]]")
    if wrong := sorted(_OURS & set(file.table("master"))):
        raise ConfigError(f"{file.where('master')}: {wrong[0]!r} has no meaning in a simulation: leave it out")
    master: dict[str, object] = {"max_clusters": max(8, len(clusters)), **file.table("master")}
    master |= {"run_id": "simulated", "directory": Path("simulated"), "slaves": slaves.count}
    scenario = Scenario(
        name=path.stem,
        run=file.settings(ScaleRunTable, "run", given),
        model=file.settings(ScaleModelTable, "model"),
        data=file.settings(DataTable, "data"),
        slaves=slaves,
        clusters=clusters,
        faults=file.settings(FaultsTable, "faults"),
        master=load_table(MasterConfig, master, file.where("master")).to_run_config(),
    )
    _check_fits(scenario, path)
    return scenario


def _check_fits(scenario: Scenario, path: Path) -> None:
    if scenario.model.layers < scenario.slaves.count:
        raise ConfigError(
            f"{path} [model]: {scenario.model.layers} layers cannot be split over {scenario.slaves.count} slaves: give "
            "the model more layers, or [slaves] a smaller count"
        )
    if scenario.model.parameters < scenario.model.layers:
        raise ConfigError(f"{path} [model]: {scenario.model.parameters} parameters are fewer than the layers")
    if scenario.master.max_clusters < len(scenario.clusters):
        raise ConfigError(
            f"{path} [master]: max_clusters is {scenario.master.max_clusters}, but {len(scenario.clusters)} clusters "
            "are described: raise it"
        )
    if all(scenario.windows_s(cluster) == [] for cluster in scenario.clusters):
        raise ConfigError(f"{path} [run]: within {scenario.run.hours:g} hours no cluster is present: raise hours")
