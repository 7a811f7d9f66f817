"""Computes the sizes of pods and volumes by the formulas of `dips size`, and writes them as Kubernetes does.

Pure. A volume that was asked for and is too small is refused here, before anything is made: a slave would refuse the
model only when a cluster joins.
"""

from __future__ import annotations

from dataclasses import dataclass

from dips.core.errors import ConfigError
from dips.core.units import format_bytes, format_count
from dips.deploy.deploy_knobs import DeployKnobs, ModelKnobs
from dips.local.sizing import SizeKnobs, size
from dips.master.config import MasterConfig
from dips.slave.config import SlaveConfig

MIB = 1 << 20
SUPERVISOR_BYTES = 192 * MIB
"""Of the supervisor's process: interpreter, gRPC and the client of Kubernetes take 110 MiB here."""

TAPE_ROOM_BYTES = 2 << 30
"""In addition to the journal, for the master's tape: some KB for each round and push (docs/budgets.md)."""

_IRRELEVANT_LINK = "1gbps"
"""No size of memory or disk depends on the link; `dips size` shows times."""


@dataclass(frozen=True)
class PodSizes:
    """Sizes of pods and volumes in bytes.

    slave_memory is the setting memory_bytes; *_process what a pod asks for; *_volume of its volume.
    """

    slave_memory_bytes: int
    slave_process_bytes: int
    slave_volume_bytes: int
    master_process_bytes: int
    master_volume_bytes: int
    needed_slave_volume_bytes: int
    needed_master_volume_bytes: int

    def explain(self) -> list[str]:
        """For a person, one line each."""
        setting, pod, volume = self.slave_memory_bytes, self.slave_process_bytes, self.slave_volume_bytes
        return [
            f"slave: memory_bytes {format_bytes(setting)}, pod {format_bytes(pod)}, volume {format_bytes(volume)}",
            f"master: pod {format_bytes(self.master_process_bytes)}, volume {format_bytes(self.master_volume_bytes)}",
        ]


def sizes_for(
    run: DeployKnobs, model: ModelKnobs, master: MasterConfig, slave: SlaveConfig, n_clusters: int, where: str
) -> PodSizes:
    """The sizes of a deployment. Raises ConfigError, which begins with `where`, for a volume below its formula."""
    table = size(
        SizeKnobs(
            params=model.parameters,
            clusters=n_clusters,
            slaves=run.slaves,
            link=_IRRELEVANT_LINK,
            max_clusters=master.max_clusters,
            pinned_versions=master.pinned_versions,
            snapshots_kept=slave.snapshots_kept,
            chunk_bytes=master.chunk_bytes,
            archive_bytes=master.archive_bytes,
            journal_records=master.journal_records,
        )
    )
    of_slave = _rounded(table.whole("slave_volume_bytes"))
    of_master = _rounded(table.whole("master_disk_bytes") + TAPE_ROOM_BYTES)
    _check_volume(where, "slave_volume", run.slave_volume, of_slave, format_count(model.parameters), run.slaves)
    _check_volume(where, "master_volume", run.master_volume, of_master, format_count(model.parameters), run.slaves)
    return PodSizes(
        _rounded(table.whole("slave_memory_bytes")),
        _rounded(table.whole("slave_process_bytes")),
        run.slave_volume or of_slave,
        _rounded(table.whole("master_memory_bytes")),
        run.master_volume or of_master,
        of_slave,
        of_master,
    )


def quantity(n_bytes: int) -> str:
    """A size as Kubernetes itself writes it, so that what it gives back compares equal; rounded up to whole MiB."""
    amount, unit = -(-n_bytes // MIB), 0
    while amount % 1024 == 0 and unit < 3:
        amount, unit = amount // 1024, unit + 1
    return f"{amount}{('Mi', 'Gi', 'Ti', 'Pi')[unit]}"


def processors(cpus: float) -> str:
    """Processors as Kubernetes itself writes them: whole ones, or thousandths."""
    thousandths = round(cpus * 1000)
    return str(thousandths // 1000) if thousandths % 1000 == 0 else f"{thousandths}m"


def parse_quantity(text: object) -> int:
    """The bytes of a size that Kubernetes gave back; 0 for what is no size."""
    units = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50, "Ei": 1 << 60}
    units |= {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
    words = str(text)
    number = words.rstrip("KMGTPEik")
    try:
        return int(float(number) * units[words[len(number) :]])
    except (KeyError, ValueError):
        return 0


def _rounded(n_bytes: int) -> int:
    return -(-n_bytes // MIB) * MIB


def _check_volume(where: str, key: str, given: int, needed: int, parameters: str, slaves: int) -> None:
    if given and given < needed:
        raise ConfigError(
            f"{where}: {key} = {format_bytes(given)} is too small: {parameters} parameters on {slaves} slaves need "
            f"{quantity(needed)}: give that, or leave it out; `dips size` has the formula"
        )
