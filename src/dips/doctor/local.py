"""Checks a file of `dips up`: everything runs on this machine.

The checks in the order in which a person wants them: what is written wrong, then what is missing, then what is slow.
"""

from __future__ import annotations

import importlib.util
import math
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from dips.core.errors import ConfigError, RetryLater
from dips.core.net.addresses import format_address, is_loopback
from dips.core.net.object_store import open_store
from dips.core.net.security import Role
from dips.core.placement import shard_bytes_needed
from dips.core.release import how_to_install
from dips.core.units import format_bytes, format_count
from dips.doctor import host, network
from dips.doctor import host as disk
from dips.doctor.findings import Check, Finding, Findings, Grade, examined, fail, ok, warn
from dips.doctor.host import check_packages
from dips.doctor.network import check_identities
from dips.local.authority import OPERATOR, WantedIdentity
from dips.local.processes import EVALUATOR, MASTER, OwnCluster, RunPlan, TrainedCluster
from dips.local.run_directory import KEYS, UP, is_held, read_mark
from dips.local.sizing import SizeTable, size_of_run
from dips.trainer.config import corpus_of
from dips.trainer.sizes import SIZES


@dataclass(frozen=True)
class DoctorOptions:
    """The options of `dips doctor`. Link and round trip: to the clusters that come from elsewhere; link None: not
    given, and what is on loopback has none."""

    params: int | None = None  # of the model, where a cluster brings its own loop
    link_bits_per_s: float | None = None
    round_trip_s: float = 0.05

    @property
    def link(self) -> float:
        """The rate that was given, or an ordinary one."""
        return self.link_bits_per_s or host.ORDINARY_LINK_BITS_PER_S


class LocalDoctor:
    """The checks of one file, which was read without a mistake."""

    def __init__(self, plan: RunPlan, wanted: DoctorOptions, facts: host.HostFacts | None = None) -> None:
        """facts: of this machine, as they are now, unless given."""
        self._run, self._plan, self._wanted = plan.run, plan, wanted
        self._facts = facts or host.read_facts()
        self.runs_now = is_held(plan.run.directory)
        self._own = [cluster for cluster in plan.clusters if isinstance(cluster, OwnCluster)]
        self._trainings = [cluster.train for cluster in plan.clusters if isinstance(cluster, TrainedCluster)]
        # The model that the file's clusters train; None when they bring their own.
        trained = max((SIZES[train.model_size].n_elems for train in self._trainings), default=None)
        self._params = wanted.params or trained
        self._sizes = None if self._params is None else _sizes(plan, self._params)

    def quick_checks(self) -> list[Check]:
        """Of what would fail at once."""
        own = [Check("clusters", self._programs), Check("keys", self._keys), Check("ports", self._ports)]
        return [*own, Check("backup", partial(check_backup, self._plan))]

    def checks(self) -> list[Check]:
        # Extras of pyproject.toml; the same package may be in several.
        extras = ["slave", *(["master"] if self._run.page else [])]
        if self._plan.evaluate is not None or self._trainings:
            extras.append("worker")
        return [
            Check("directory", self._directory),
            Check("permissions", self._permissions),
            Check("packages", partial(check_packages, extras)),
            Check("clusters", self._clusters),
            Check("data", self._data),
            Check("keys", self._keys),
            Check("ports", self._ports),
            Check("backup", partial(check_backup, self._plan)),
            Check("addresses", self._addresses),
            Check("model", self._model),
            Check("memory", self._memory),
            Check("disk", self._disk),
            Check("flush", self._disk_speed),
            Check("kernel buffers", self._buffers),
            Check("host", lambda: [judge(self._facts) for judge in host.EVERY_PROCESS]),
        ]

    # ---- what is there ----

    def _directory(self) -> Findings:
        directory, plan = self._run.directory, self._plan
        mark = read_mark(directory) if directory.is_dir() else None
        if mark is not None and (mark.made_by, mark.run_id) != (UP, plan.run.id):
            sentence = f"{directory} belongs to run {mark.run_id!r} of `{mark.made_by}`, not to run {plan.run.id!r}"
            yield fail("directory", sentence, "choose another directory, or remove that one")
            return
        if mark is None and directory.is_dir() and any(directory.iterdir()):
            remedy = "choose another directory"
            yield fail("directory", f"{directory} is not empty and holds no run of dips", remedy)
            return
        yield disk.check_writable(directory)
        if self.runs_now:
            sentence = f"a launcher runs in {directory} now, so its ports are taken by the run itself"
            yield warn("directory", sentence, "only what does not depend on ports is checked; end the run to check all")

    def _permissions(self) -> Findings:
        plan = self._plan
        folders = [self._run.directory, plan.master.directory, *(slave.directory for slave in plan.slaves)]
        folders += [one.client.checkpoint_dir for one in plan.clusters if one.client.checkpoint_dir is not None]
        return disk.check_closed(folders, self._run.files_group)

    def _programs(self) -> Findings:
        for cluster in self._own:
            program = cluster.own_command[0]
            if shutil.which(program) is None:
                remedy = "install it, or write its path in the cluster's command"
                yield fail("clusters", f"cluster {cluster.cluster_id}: there is no program {program!r}", remedy)
            else:
                yield ok("clusters", f"cluster {cluster.cluster_id}: {program} is there")

    def _clusters(self) -> Findings:
        yield from self._programs()
        if self._own and importlib.util.find_spec("torch") is None:
            sentence = "torch is not installed in this environment, and a loop of one's own uses it"
            yield warn("clusters", sentence, "see that the clusters' commands find it")
        for train in self._trainings:
            if train.device == "cuda":
                yield _cuda()

    def _data(self) -> Findings:
        for paths in sorted({train.data for train in self._trainings}):
            train = next(train for train in self._trainings if train.data == paths)
            corpus = corpus_of(train)
            sentence = ", ".join(map(str, paths)) or "the source of Python's standard library"
            n_bytes = sum(len(document.text) for document in corpus.training)
            yield ok("data", f"{sentence}: {len(corpus.training)} files, {format_bytes(n_bytes)} of text")

    def _keys(self) -> Findings:
        plan, keys = self._plan, self._run.directory / KEYS
        if plan.run.insecure:
            sentence = "the run uses no keys: nothing is encrypted and no one is authenticated, on this machine only"
            yield warn("keys", sentence, "leave out insecure for anything but trying out")
        elif not keys.is_dir():
            yield ok("keys", f"`dips up` will make them in {keys}")
        else:
            wanted = [WantedIdentity(keys / name, role, name) for role, name in _holders(plan)]
            there = [one for one in wanted if one.directory.is_dir()]
            yield from check_identities(there)
            if len(there) < len(wanted):
                missing = ", ".join(one.name for one in wanted if one not in there)
                yield ok("keys", f"`dips up` will make those of {missing}")

    # ---- the network ----

    def _ports(self) -> Findings:
        if self.runs_now:
            return iter(())
        return network.check_addresses(_addresses(self._plan))

    def _addresses(self) -> Findings:
        for slave in self._plan.slaves:
            if slave.advertise:
                yield from network.check_advertised(f"slave {slave.slave_id}", slave.advertise, "advertise")
        if self._plan.public_host and any(slave.data_port == 0 for slave in self._plan.slaves):
            sentence = (
                "the slaves' data ports are free ones that the system chooses, and other machines have to reach them"
            )
            yield warn(
                "addresses",
                sentence,
                "give [slave] data_port, from which each slave takes the next, and open these ports",
            )

    def _buffers(self) -> Findings:
        outside = [slave.data_host for slave in self._plan.slaves if not is_loopback(slave.data_host)]
        if outside or self._wanted.link_bits_per_s is not None:
            yield host.judge_buffers(self._facts, self._wanted.link, self._wanted.round_trip_s)

    # ---- memory and disks ----

    def _model(self) -> Findings:
        if self._sizes is None or self._params is None:
            sentence = "how large the model is cannot be seen in the file, so memory and disks cannot be judged"
            yield warn("model", sentence, "give --params, such as --params 7B")
            return
        plan = self._plan
        fair = math.ceil(self._params / len(plan.slaves))
        master = plan.master
        files, wire = master.memory_files, master.pull_wire
        least = shard_bytes_needed([fair], master.chunk_bytes, master.max_clusters, 0, files, wire)
        enough = self._sizes.whole("slave_memory_bytes")
        for slave in plan.slaves:
            yield _judge_shard(slave.slave_id, slave.memory_bytes, least, enough, self._params)

    def _memory(self) -> Findings:
        plan = self._plan
        yield host.judge_processors(self._facts, len(plan.slaves) + len(plan.clusters))
        if self._sizes is None:
            return
        parts = {
            f"{len(plan.slaves)} slaves": len(plan.slaves) * self._sizes["slave_process_bytes"].value,
            "the master": self._sizes["master_memory_bytes"].value,
            f"{len(plan.clusters)} clusters in addition to their training": len(plan.clusters)
            * self._sizes["cluster_memory_bytes"].value,
        }
        listed = ", ".join(f"{name} {format_bytes(round(n))}" for name, n in parts.items() if n)
        yield host.judge_memory(self._facts, round(sum(parts.values())), f"{listed}, at most")

    def _disk(self) -> Findings:
        if self._sizes is None:
            return iter(())
        plan, sizes = self._plan, self._sizes
        rooms = [disk.Room(plan.master.directory, sizes.whole("master_disk_bytes"), "the master's journal")]
        of_slave = sizes.whole("slave_ring_bytes")
        if "slave_file_bytes" in sizes.rows:
            of_slave += sizes.whole("slave_file_bytes")
        rooms += [disk.Room(slave.directory, of_slave, slave.slave_id) for slave in plan.slaves]
        for cluster in plan.clusters:
            if cluster.client.checkpoint_dir is not None:
                needed = sizes.whole("cluster_disk_bytes")
                rooms.append(disk.Room(cluster.client.checkpoint_dir, needed, f"checkpoints of {cluster.cluster_id}"))
        return disk.check_room(rooms)

    def _disk_speed(self) -> Findings:
        master, directory = self._plan.master, self._run.directory
        shard = None if self._sizes is None else 8 * len(self._plan.slaves) * self._sizes.whole("shard_params")
        durable = master.durability == "sync"
        speed = disk.measured(directory)
        return disk.judge_speed(disk.standing(directory), speed, shard, master.round_timeout_s, durable)


def check_backup(plan: RunPlan) -> Findings:
    """Whether the object store of [backup] answers: URL, library, credentials, bucket."""
    if plan.backup is None:
        return
    try:
        n_objects = len(open_store(plan.backup.to).sizes(plan.run.id))
    except ConfigError as error:
        yield fail("backup", str(error), "see [backup] to")
    except RetryLater as error:
        yield warn("backup", str(error), "the run begins without it, and asks again and again")
    else:
        yield ok("backup", f"{plan.backup.to} answers, and holds {n_objects} objects of run {plan.run.id}")


def refuse_what_cannot_start(plan: RunPlan) -> None:
    """For `dips up`: raise ConfigError for the first thing that must fail, before anything is made or started.

    Only what is quick to look at. A directory in which a launcher runs is left to the one who claims it.
    """
    doctor = LocalDoctor(plan, DoctorOptions())
    if doctor.runs_now:
        return
    refuse_failed(examined(doctor.quick_checks()))


def refuse_failed(findings: Iterable[Finding]) -> None:
    """Raise ConfigError for the first that FAILs."""
    for found in findings:
        if found.grade is Grade.FAIL:
            raise ConfigError(f"{found.sentence}: {found.remedy}" if found.remedy else found.sentence)


def _sizes(plan: RunPlan, params: int) -> SizeTable:
    master, slave = plan.master, plan.slaves[0]
    clusters = max(1, len(plan.clusters) + len(plan.run.keys_for))
    return size_of_run(
        master,
        slave,
        params=max(params, len(plan.slaves)),
        clusters=clusters,
        slaves=len(plan.slaves),
        link=10e9,
        max_clusters=max(master.max_clusters, clusters),
        keys=not plan.run.insecure,
    )


def _judge_shard(slave: str, stated: int, least: int, enough: int, params: int) -> Finding:
    sentence = f"slave {slave} states memory_bytes = {format_bytes(stated)}"
    model = f"its share of {format_count(params)} parameters"
    remedy = f"set memory_bytes = {enough} in [slave], start more slaves, or lower max_clusters"
    if stated < least:
        return fail("model", f"{sentence}, and {model} needs {format_bytes(least)}: the model would be refused", remedy)
    if stated < enough:
        needed = f"up to {format_bytes(enough)}, depending on how blocks are assigned"
        return warn("model", f"{sentence}, and {model} needs {needed}", remedy)
    return ok("model", f"{sentence}, enough for {model}")


def _holders(plan: RunPlan) -> Iterable[tuple[Role, str]]:
    yield Role.MASTER, MASTER
    yield from ((Role.SLAVE, name) for name in plan.run.slave_ids)
    yield from ((Role.CLUSTER, name) for name in (*plan.cluster_ids, *plan.run.keys_for))
    yield Role.OPERATOR, OPERATOR
    if plan.evaluate is not None:
        yield Role.OPERATOR, EVALUATOR


def _addresses(plan: RunPlan) -> Iterable[network.ListenAddress]:
    yield network.ListenAddress("the master", plan.master.listen, "listen in [master]")
    for slave in plan.slaves:
        address = format_address(slave.data_host, slave.data_port)
        yield network.ListenAddress(f"slave {slave.slave_id}", address, "data_port in [slave]")
    clients = [(cluster.cluster_id, cluster.client) for cluster in plan.clusters]
    roles = [
        ("the master", plan.master),
        *((f"slave {slave.slave_id}", slave) for slave in plan.slaves),
        *((f"cluster {name}", client) for name, client in clients),
    ]
    for who, knobs in roles:
        for setting, words in (("metrics_listen", "metrics"), ("page_listen", "page")):
            wanted: str | None = getattr(knobs, setting, None)
            if wanted:
                yield network.ListenAddress(f"{who}'s {words}", wanted, setting)


def _cuda() -> Finding:
    try:
        import torch
    except ImportError as error:
        raise ConfigError(
            "device = 'cuda' is asked for, and torch is not installed: " + how_to_install("worker")
        ) from error
    if torch.cuda.is_available():
        return ok("clusters", f"a CUDA device is there: {torch.cuda.get_device_name(0)}")
    remedy = "install its driver and a torch with CUDA, or set device = 'auto'"
    return fail("clusters", "device = 'cuda' is asked for, and torch finds no CUDA device", remedy)
