"""A real Slurm on this machine: munge, slurmctld and two nodes, with folders, keys and ports of their own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from support.ports import own_port
from support.waiting import until

WHY_NOT = "needs Slurm (Debian, Ubuntu: apt-get install slurmctld slurmd slurm-client munge), which is not installed"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
FREEZER = Path("/sys/fs/cgroup/freezer")
NOBODY = 65534
KILL_WAIT_S = 5
"""Seconds from TERM to KILL of a job that is cancelled, or whose time is over."""

PARTITIONS = {
    "requeued": "PreemptMode=REQUEUE Default=YES",
    "requeued-later": "PreemptMode=REQUEUE GraceTime=30",
    "cancelled": "PreemptMode=CANCEL",
    "cancelled-later": "PreemptMode=CANCEL GraceTime=30",
    "urgent": "PreemptMode=OFF PriorityTier=9",
}
"""Jobs in `urgent` preempt those in the others."""

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobRequeue=1
KillWait={kill_wait_s}
ReturnToService=2
SlurmdParameters=config_overrides
{more}
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
# cred_expire: a job that is queued again waits that long, two minutes by default. config_overrides: the processors and
# the memory are what is written here.


def is_installed() -> bool:
    return all(shutil.which(program) for program in PROGRAMS)


def has_control_groups() -> bool:
    """Whether Slurm can track processes as nearly all sites have it: a signal is sent to tasks, not to their children,
    among which is the srun of a script. Without, it is sent to all of them.
    """
    return os.access(FREEZER, os.W_OK) and FREEZER.is_mount()


class Slurm:
    """Use as a context manager. Jobs are an ordinary user's, nobody's, and lie in `folder`."""

    def __init__(self, *, more: str = "", user: int = NOBODY) -> None:
        """more: a line of slurm.conf."""
        # Sockets want short paths, and a user who is not root must get there.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.folder.chmod(0o755)
        self.jobs = self.folder / "jobs"
        self.jobs.mkdir()
        os.chown(self.jobs, user, user)
        self._user = user
        self._processes: list[subprocess.Popen[bytes]] = []
        host, port, ports = socket.gethostname().partition(".")[0], own_port(), (own_port(), own_port())
        # Nodes find each other by their names: these need no entry in /etc/hosts.
        self._nodes = [f"127.{port >> 8}.{port & 255}.1" for port in ports]
        tracking = "cgroup" if has_control_groups() else "linuxproc"
        text = _CONFIGURATION.format(
            host=host, port=port, folder=self.folder, tracking=tracking, more=more, kill_wait_s=KILL_WAIT_S
        )
        for name, its_port in zip(self._nodes, ports, strict=True):
            text += f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={its_port} "
            text += "CPUs=64 RealMemory=1000000\n"
        for name, what in PARTITIONS.items():
            text += f"PartitionName={name} Nodes={','.join(self._nodes)} MaxTime=INFINITE {what}\n"
        (self.folder / "slurm.conf").write_text(text)
        cgroups = f"CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nCgroupMountpoint={FREEZER.parent}\n"
        (self.folder / "cgroup.conf").write_text(cgroups)
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        (self.folder / "state").mkdir()

    def __enter__(self) -> Self:
        munge = [f"--{name}={self.folder / file}" for name, file in MUNGE_FILES.items()]
        configuration = str(self.folder / "slurm.conf")
        try:
            self._start("munged", "--foreground", "--force", *munge)
            until(lambda: self._runs() and (self.folder / "munge.socket").exists(), "munge serves", self.said)
            self._start("slurmctld", "-D", "-f", configuration)
            for node in self._nodes:
                self._start("slurmd", "-D", "-N", node, "-f", configuration)
            until(lambda: self._runs() and self._idle(), "all nodes are up", self.said)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.ask("scancel", f"--user={self._user}", user=0)
            until(lambda: not self.ask("squeue", "--noheader"), "all jobs have ended", self.said)
        finally:
            for process in reversed(self._processes):
                process.terminate()
            for process in reversed(self._processes):
                process.wait()
            self._kill_the_rest()
        for node in self._nodes:
            for group in sorted(FREEZER.glob(f"slurm_{node}/**/"), reverse=True):
                tasks = group / "tasks"
                until(lambda tasks=tasks: not tasks.read_text(), f"no process is in {group}")  # type: ignore[misc]
                group.rmdir()
        shutil.rmtree(self.folder)

    def ask(self, *command: str, user: int | None = None) -> str:
        """What a command of Slurm prints, of the jobs' user."""
        user = self._user if user is None else user
        # Python forks for another user, and a fork in a process with calls of gRPC can stand still for ever.
        other: Any = {"user": user, "group": user, "extra_groups": ()} if user != os.geteuid() else {}
        done = subprocess.run(command, capture_output=True, check=False, cwd=self.jobs, env=self.environment, **other)
        return str(done.stdout, "utf-8").strip()

    @property
    def environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        kept = {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}
        return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", "SLURM_CONF": str(self.folder / "slurm.conf")}

    def submit(self, script: Path, *options: str, **added: str) -> Job:
        """Queue a script, in the jobs' folder and with more variables."""
        export = ",".join(["ALL", *(f"{name}={value}" for name, value in added.items())])
        number = self.ask("sbatch", "--parsable", f"--export={export}", *options, str(script))
        assert number, self.said()
        return Job(self, int(number))

    def said(self) -> str:
        """What the daemons said last, and what is in the queue."""
        logs = (f"{file.name}:\n{file.read_text(errors='replace')[-3000:]}" for file in self.folder.glob("*.log"))
        return "\n".join([*logs, self.ask("sinfo"), self.ask("scontrol", "show", "job")])

    def _kill_the_rest(self) -> None:
        """What a test leaves whose time is over: every process of this Slurm has its configuration's name."""
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"SLURM_CONF={self.folder}/".encode() in environ.read_bytes():
                    os.kill(int(environ.parent.name), signal.SIGKILL)

    def _runs(self) -> bool:
        assert all(process.poll() is None for process in self._processes), "a daemon has ended"
        return True

    def _idle(self) -> bool:
        return self.ask("sinfo", "--noheader", "--format=%T") == "idle"

    def _start(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.log").open("ab") as log:
            self._processes.append(
                subprocess.Popen(command, stdout=log, stderr=log, env=self.environment, cwd=self.folder)
            )


MUNGE_FILES = {
    "key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed",
}  # fmt: skip


class Job:
    """A job of this Slurm, and what its script's log says; attempts follow each other in it."""

    def __init__(self, slurm: Slurm, number: int) -> None:
        self._slurm = slurm
        self.number = str(number)

    @property
    def log(self) -> str:
        (file,) = [*self._slurm.jobs.glob(f"*-{self.number}.log"), None][:1]
        return file.read_text() if file else ""

    @property
    def facts(self) -> Mapping[str, str]:
        return dict(re.findall(r"(\w+)=(\S*)", self._slurm.ask("scontrol", "show", "job", self.number)))

    def until_said(self, *words: str) -> None:
        """Wait until its log has each of them."""
        until(lambda: all(word in self.log for word in words), f"job {self.number} says {words}", self.story)

    def end(self) -> Mapping[str, str]:
        """Wait until it has ended for good: it has not been queued again."""
        until(lambda: self.facts["JobState"] in ENDED, f"the end of job {self.number}", self.story)
        return self.facts

    def until_it_runs_again(self) -> None:
        """Wait until it has been queued again, and runs."""
        until(lambda: self.runs_with("1"), f"job {self.number} begins again", self.story)

    def runs_with(self, restarts: str) -> bool:
        facts = self.facts
        return (facts["JobState"], facts["Restarts"]) == ("RUNNING", restarts)

    def cancel(self, *options: str) -> None:
        self._slurm.ask("scancel", *options, self.number)

    def story(self) -> str:
        return f"{self._slurm.ask('scontrol', 'show', 'job', self.number)}\n{self.log}"


ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL")
