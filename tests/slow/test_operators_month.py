"""docs/operations.md on one run of several machines, from its keys to its end: the tasks are typed as printed."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import live
from support.documents import MACHINES, OPERATIONS, SHELL, Block, blocks, blocks_below, shell_lines
from support.machines import Machines
from support.waiting import until

from dips.core.errors import KEYS_REFUSED_EXIT
from dips.master.directory import TAPE_NAME
from dips.slave.control import RENEWED

HOSTS = ("master-host", "master-host-2", *(f"slave-host-{n}" for n in range(4)), "site-a", "site-b", "site-c")
ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.1.1")
MASTER, BOTH = "10.0.0.1:29400", "10.0.0.1:29400,10.0.1.1:29400"
QUICK = {
    "DIPS_MASTER_OVERLAP": "none",
    "DIPS_MASTER_HEARTBEAT_S": "0.5",
    "DIPS_MASTER_GRACE_S": "0.5",
    "DIPS_MASTER_LINGER_S": "1 h",
    "DIPS_SLAVE_RECORD_PUSHES": "1",
}
"""Rounds of less than a second, all of which are recorded."""

CLUSTER = (
    f"/usr/bin/env DIPS_KEYS=/etc/dips/keys python -m support.cluster_process {{0}} {BOTH} --step-s 0.02"
    " --checkpoints /var/lib/dips/{0} --astray /var/lib/dips/astray"
)
SERVERS = (("master-host", "dips-master"), ("slave-host-1", "dips-s1"), ("slave-host-2", "dips-s2"))
CLUSTERS = (("site-a", "dips-a"), ("site-b", "dips-b"))
"""What is left at the end of the month."""

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may make namespaces"),
    pytest.mark.skipif(not (shutil.which("ip") and shutil.which("sqlite3")), reason="apt-get install iproute2 sqlite3"),
]

Status = dict[str, Any]


class Month:
    """The run, and the person at the master's machine who types."""

    def __init__(self, machines: Machines, failed_before: int) -> None:
        self.machines, self.failed_before = machines, failed_before
        self.typed: set[Block] = set()
        self.slow, self.bad = "", ""
        [self.unit] = [block.text for block in blocks(OPERATIONS) if block.language == "ini"]
        self._exports = ""

    def block(self, heading: str, at: int = 0) -> Block:
        """The one at this place among the shell blocks below a heading of the page."""
        block = [block for block in blocks_below(OPERATIONS, heading) if block.language in SHELL][at]
        assert block.note == MACHINES
        self.typed.add(block)
        self._exports += "".join(f"{line}\n" for line in block.text.splitlines() if line.startswith("export "))
        return block

    def type(self, heading: str, at: int = 0, version: str = "1:42") -> str:
        """version: what stands here for the page's example of one."""
        return self.say(self.block(heading, at).text.replace("1:42", version))

    def say(self, text: str) -> str:
        return self.machines.type("master-host", f"{self._exports}cd ~\n{text}")

    def serve(self, host: str, line: str) -> None:
        """Start this command there as a service, with the page's unit."""
        named = re.search(r"--slave-id (\S+)|cluster_process (\S+)", line)
        name = "dips-" + (named[1] or named[2] if named else "master")
        start = line if line.startswith("/") else f"/opt/dips/bin/{line}"
        service = re.sub("ExecStart=.*", f"ExecStart={start}", self.unit)
        (self.machines.folder / host / f"{name}.service").write_text(service)
        self.start((host, name))

    def start(self, *units: tuple[str, str]) -> None:
        for host, unit in units:
            self.say(f"ssh {host} systemctl start {unit}")

    def until(self, fact: str, is_so: Callable[[Status], object]) -> Status:
        """The first status of which it is so."""
        status: Status = {}

        def seen() -> bool:
            said = self.say("dips status --json || true")
            status.update(json.loads(said) if said.startswith("{") else {})
            return bool(status and is_so(status))

        self.wait(fact, seen)
        return status

    def wait(self, fact: str, is_so: Callable[[], object]) -> None:
        until(is_so, fact, lambda: self.machines.last_words() + self.say("dips status || true"))

    def versions(self) -> list[str]:
        tape = self.machines.folder / "master-host/var/lib/dips/master" / TAPE_NAME
        said = tape.read_text() if tape.exists() else ""
        return re.findall(r'"kind":"publish",.*"version":"([0-9:]+)"', said)

    def publishes(self) -> None:
        wanted = len(self.versions()) + 2
        self.wait("two more versions", lambda: len(self.versions()) >= wanted)

    def ends(self, host: str, unit: str, code: int = 0) -> None:
        self.wait(f"the end of {unit}", lambda: self.machines.codes(host, unit)[-1:] == [str(code)])

    def lose(self, host: str) -> list[tuple[str, str]]:
        """The machine with its disks. A new one gets its name, its keys and its units, which are returned."""
        old = (self.machines.folder / host).resolve()
        units = [(host, file.stem) for file in old.glob("*.service")]
        for _, unit in units:
            self.say(f"ssh {host} systemctl off {unit}")
        self.machines.new_machine(host)
        shutil.copytree(old / "etc", self.machines.folder / host / "etc", dirs_exist_ok=True)
        for _, unit in units:
            shutil.copy(old / f"{unit}.service", self.machines.folder / host)
        return units

    def end(self, folder: str) -> None:
        """Of the run. What came later than the page's block names is collected too."""
        for units in (CLUSTERS, SERVERS):
            self.say("dips stop")
            for host, unit in units:
                self.ends(host, unit)
        self.say(f"mkdir -p {folder}/slaves && scp -rp slave-host-2:/var/lib/dips/s2 {folder}/slaves/")
        self.say(f"scp -p site-c:/var/lib/dips/c/*.jsonl {folder}/")


@pytest.fixture(scope="module")
def month(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Month]:
    folder, home = tmp_path_factory.mktemp("month"), tmp_path_factory.mktemp("home")
    variables = {**QUICK, "HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
    with live.run(live.HEAVY), Machines(folder, HOSTS, ADDRESSES, variables) as machines:
        yield Month(machines, request.session.testsfailed)


@pytest.fixture(autouse=True)
def one_task_after_the_other(month: Month, request: pytest.FixtureRequest) -> None:
    if request.session.testsfailed > month.failed_before:
        pytest.skip("a task before this one failed")


def alive(status: Status, what: str) -> list[str]:
    return [one[f"{what}_id"] for one in status[f"{what}s"] if one["alive"]]


def of(status: Status, cluster: str) -> dict[str, Any]:
    return next((one for one in status["clusters"] if one["cluster_id"] == cluster), {})


def test_run(month: Month) -> None:
    shown = month.type("Run")
    assert all(re.search(rf"^ *{name} +\w+ +\w", shown, re.MULTILINE) for name in ("master", "s1", "a", "me"))
    master, slave = shell_lines(month.block("Run", 1))
    assert f"ExecStart=/opt/dips/bin/{master}" in month.unit.splitlines()
    [minimum] = [block.text for block in blocks_below(OPERATIONS, "A minimum for each round")]
    settings = month.machines.folder / "master-host/etc/dips/big.toml"
    settings.write_text(f"[master]\nsync_every = 4\nouter_lr = 0.7\nevict_after_beats = 600\n{minimum}\n")
    month.serve("master-host", master)
    slave = slave.replace(MASTER, BOTH)
    month.serve("slave-host-0", slave)
    month.serve("slave-host-1", slave.replace("s0", "s1").replace("10.0.0.2", "10.0.0.3"))
    for name in "ab":
        month.serve(f"site-{name}", CLUSTER.format(name))
    month.publishes()
    assert re.search(r"run big +version 1:\d", month.type("Operations"))


def test_rotate_keys(month: Month) -> None:
    before = month.until("a and b", lambda status: alive(status, "cluster") == ["a", "b"])
    serial = re.compile(r"\b[0-9a-f]{12}\b")
    old = set(serial.findall(month.say("dips keys show runs/big/keys")))
    assert not old & set(serial.findall(month.type("Rotate keys").partition(" until ")[2]))
    month.wait("s0 has its new keys", lambda: RENEWED in month.machines.log("slave-host-0", "dips-s0"))
    month.wait("s1 has its new keys", lambda: RENEWED in month.machines.log("slave-host-1", "dips-s1"))
    month.publishes()
    after = month.until("an answer", bool)
    assert [one["incarnation"] for one in after["clusters"]] == [one["incarnation"] for one in before["clusters"]]
    assert after["epoch"] == before["epoch"]


def test_revoke(month: Month) -> None:
    month.type("Rotate keys", 1)
    month.ends("site-b", "dips-b", KEYS_REFUSED_EXIT)
    assert "seen by others" in month.machines.log("site-b", "dips-b").splitlines()[-1]
    month.publishes()
    month.type("Rotate keys", 2)
    month.until("b is back", lambda status: alive(status, "cluster") == ["a", "b"])
    month.publishes()


def test_add_a_site(month: Month) -> None:
    assert "0 FAIL: nothing prevents the run" in month.type("Add a site")
    month.serve("site-c", CLUSTER.format("c"))
    month.until("a push of c is merged", lambda status: of(status, "c").get("pushes_applied"))


def test_back_up_and_restore_on_other_machines(month: Month) -> None:
    month.type("Back up")
    assert (month.machines.folder / "backup/model.safetensors").is_file()
    assert "backup" in month.type("Back up", 1)
    month.until("rest", lambda status: status["phase"] in ("IDLE", "WINDOW"))
    saved = month.versions()[-1]
    month.type("Back up", 2)
    month.publishes()
    month.say("dips verify /backup/monday --replay --without-tape a --without-tape b --without-tape c")
    lost = [unit for host in ("master-host", "slave-host-0", "slave-host-1") for unit in month.lose(host)]
    month.type("Restore")
    month.start(*lost)
    month.until("all are back, in the pause", lambda status: status["paused"] and len(alive(status, "cluster")) == 3)
    assert month.versions()[-1] == saved
    month.say("dips resume")
    month.publishes()


def test_slow_round(month: Month) -> None:
    month.say("ssh site-b systemctl kill --signal SIGSTOP dips-b")
    waits = month.until("a round that waits for b", lambda status: re.search(r"\bb\b", status["waiting_for"]))
    month.slow = str(waits["round"])
    month.say("ssh site-b systemctl kill --signal SIGCONT dips-b")
    month.publishes()


def test_bad_update_of_a_site_that_is_removed(month: Month) -> None:
    month.say("ssh site-c touch /var/lib/dips/astray")
    month.until("an alarm", lambda status: of(status, "c")["direction_alarm"])
    month.bad = month.versions()[-1]
    month.type("Add a site", 1)
    month.ends("site-c", "dips-c")
    month.publishes()


def test_change_h_and_the_outer_rate(month: Month) -> None:
    month.say("ssh master-host sed -i /^evict/d /etc/dips/big.toml")
    month.type("Change a setting")
    wanted = {"sync_every_steps": 8, "outer_lr": 0.5}
    month.until("new settings", lambda status: wanted.items() <= status["settings"].items())
    month.until("a and b", lambda status: alive(status, "cluster") == ["a", "b"])
    month.publishes()


def test_add_and_remove_a_slave(month: Month) -> None:
    assert "start slave s2 now" in month.type("Scale slaves")
    month.until("the wait for s2", lambda status: "slave s2 has yet to attach" in status["reshard"])
    month.publishes()
    [line] = shell_lines(month.block("Scale slaves", 1))
    month.serve("slave-host-2", line.replace(MASTER, BOTH))
    month.until("s1 and s2", lambda status: alive(status, "slave") == ["s1", "s2"] and not status["reshard"])
    month.ends("slave-host-0", "dips-s0")
    month.publishes()


def test_move_a_slave(month: Month) -> None:
    month.type("Scale slaves", 2)
    month.machines.name("slave-host-1", "slave-host-3")
    line = shell_lines(month.block("Run", 1))[1].replace(MASTER, BOTH)
    month.serve("slave-host-1", line.replace("s0", "s1").replace("10.0.0.2", "10.0.0.5"))
    month.publishes()


def test_move_the_master(month: Month) -> None:
    month.type("Several addresses of the master", 1)
    month.machines.name("master-host", "master-host-2")
    month.serve("master-host", shell_lines(month.block("Run", 1))[0].replace("10.0.0.1:", "10.0.1.1:"))
    month.publishes()
    assert re.search(r"run big +version 1:\d", month.type("Several addresses of the master"))


def test_afterwards(month: Month) -> None:
    month.end("/backup/big")
    said = month.type("Afterwards", version=month.bad)
    assert re.search(
        rf"^{month.slow} .* WINDOW .* the push of cluster b came [\d.]+ m?s after the first", said, re.MULTILINE
    )
    assert re.search(r"master +judged .* cosines=\{a: 0\.\d+, b: 0\.\d+, c: -0\.\d+\}", said)
    assert said.count("run big: ok") == 2
    assert re.search(r"replayed \d{2,} versions", said)
    assert "not replayed" not in said
    month.say("cd proof && sha256sum --quiet -c SHA256SUMS && dips verify . --replay")
    last = month.versions()[-1]
    assert f"/backup/model.safetensors: version {last} of run big" in month.type("When the run has ended")


def test_take_the_end_back(month: Month) -> None:
    month.start(*SERVERS)
    month.until("a master, which has ended", lambda status: status["stopping"] or status["stopped"])
    month.say("dips extend")
    month.start(*CLUSTERS)
    month.publishes()


def test_replace_a_slaves_disk(month: Month) -> None:
    month.type("Restore", 1)
    month.publishes()
    said = month.machines.log("master-host", "dips-master")
    assert re.search(
        r"ROLLBACK to version 1:\d+, now \d+:\d+ \(its parameters come from cluster [ab], momentum is", said
    )


def test_rebuild_the_master(month: Month) -> None:
    month.say("ssh master-host systemctl off dips-master")
    month.say("ssh master-host rm -rf /var/lib/dips/master")
    month.type("Restore", 2)
    month.wait("a version", month.versions)
    month.say("ssh master-host sed -i /^rebuild/d /etc/dips/big.toml")
    month.publishes()
    assert "the master took over version" in month.machines.log("master-host", "dips-master")


def test_nothing_is_violated_at_the_end(month: Month) -> None:
    month.end("/backup/end")
    collect = [line for line in shell_lines(month.block("Afterwards")) if line.startswith("scp ")]
    month.say("\n".join(collect).replace("/backup/big", "/backup/end"))
    assert "run big: ok" in month.say("dips verify /backup/end --without-tape master --without-tape s1")


def test_each_block_of_the_page_was_typed(month: Month) -> None:
    assert month.typed == {block for block in blocks(OPERATIONS) if block.note == MACHINES}
