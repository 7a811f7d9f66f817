"""docs/operations.md on one run of several machines, from its keys to its end: each task is typed as the page prints it."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import live
from support.documents import MACHINES, OPERATIONS, SHELL, Block, blocks, blocks_below, shell_lines
from support.machines import Machines
from support.waiting import until

from dips.core.errors import KEYS_REFUSED_EXIT
from dips.local.log_files import records
from dips.master.directory import TAPE_NAME
from dips.slave.control import RENEWED

SLAVE_HOSTS = tuple(f"slave-host-{number}" for number in range(4))
HOSTS = ("master-host", "master-host-2", *SLAVE_HOSTS, "site-a", "site-b", "site-c")
ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.1.1")
MASTER, BOTH = "10.0.0.1:29400", "10.0.0.1:29400,10.0.1.1:29400"
QUICK = {
    "DIPS_MASTER_PRESET": "safe",
    "DIPS_MASTER_OVERLAP": "none",
    "DIPS_MASTER_HEARTBEAT_S": "0.5",
    "DIPS_MASTER_GRACE_S": "0.5",
    "DIPS_MASTER_LINGER_S": "1 h",
    "DIPS_SLAVE_RECORD_PUSHES": "1",
}
"""Settings for rounds of less than a second, all of which are recorded."""

CLUSTER = (
    f"/usr/bin/env DIPS_KEYS=/etc/dips/keys python -m support.cluster_process {{0}} {BOTH} --step-s 0.02"
    " --checkpoints /var/lib/dips/{0} --astray /var/lib/dips/astray"
)
NEEDED = (("ip", "iproute2"), ("unshare", "util-linux"), ("sqlite3", "sqlite3"))
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may make namespaces"),
    *(pytest.mark.skipif(shutil.which(name) is None, reason=f"apt-get install {package}") for name, package in NEEDED),
]


class Month:
    """The run, and the person at the master's machine who types."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.typed: set[Block] = set()
        self._first = ""
        self.slow, self.bad = "", ""
        self._units = [block.text for block in blocks(OPERATIONS) if block.language == "ini"]

    def block(self, heading: str, at: int = 0) -> Block:
        """The one at this place among the shell blocks below a heading of the page."""
        block = [block for block in blocks_below(OPERATIONS, heading) if block.language in SHELL][at]
        assert block.note == MACHINES
        self.typed.add(block)
        return block

    def type(self, heading: str, at: int = 0, version: str = "1:42") -> str:
        """version: what the page's example of one is here."""
        text = self.block(heading, at).text.replace("1:42", version)
        if text.startswith("export "):
            self._first += text.splitlines()[0] + "\n"
        return self.say(text)

    def say(self, text: str) -> str:
        return self.machines.type("master-host", f"{self._first}cd ~\n{text}")

    def serve(self, host: str, line: str) -> None:
        """Start this command there with the page's unit."""
        [unit] = self._units
        named = re.search(r"--slave-id (\S+)|cluster_process (\S+)", line)
        name = "dips-" + (named[1] or named[2] if named else "master")
        start = line if line.startswith("/") else f"/opt/dips/bin/{line}"
        self.machines.write_unit(host, name, re.sub("ExecStart=.*", f"ExecStart={start}", unit))
        self.say(f"ssh {host} systemctl start {name}")

    def status(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.say("dips status --json"))
        return told

    def until(self, fact: str, is_so: Any) -> None:
        """is_so: of what `dips status --json` says, once the master answers."""

        def seen() -> bool:
            said = self.say("dips status --json || true")
            return said.startswith("{") and bool(is_so(json.loads(said)))

        until(seen, fact, self.everything)

    def versions(self) -> list[str]:
        tape = self.machines.folder / "master-host/var/lib/dips/master" / TAPE_NAME
        return [str(line["version"]) for line in records(tape) if line["kind"] == "publish"]

    def publishes(self, more: int = 2) -> None:
        wanted = len(self.versions()) + more
        until(lambda: len(self.versions()) >= wanted, f"{more} more versions", self.everything)

    def lose(self, host: str) -> None:
        """The machine, with its disks. A new one gets its name, its keys and its units."""
        for unit in self.machines.units(host):
            self.say(f"ssh {host} systemctl off {unit}")
        old = (self.machines.folder / host).resolve()
        self.machines.new_machine(host)
        shutil.copytree(old / "etc", self.machines.folder / host / "etc", dirs_exist_ok=True)
        for unit in old.glob("*.service"):
            shutil.copy(unit, self.machines.folder / host)

    def everything(self) -> str:
        """What all processes said last."""
        hosts = self.machines.folder.glob("machine-*")
        logs = "\n".join(f"{log}:\n{log.read_text()[-700:]}" for host in hosts for log in host.glob("*.log"))
        return logs + self.say("dips status || true")


@pytest.fixture(scope="module")
def month(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Month]:
    folder = tmp_path_factory.mktemp("month")
    (folder / "home").mkdir()
    variables = {**QUICK, "HOME": str(folder / "home"), "PYTHONPATH": os.pathsep.join(sys.path)}
    with live.run(live.HEAVY), Machines(folder, HOSTS, ADDRESSES, variables) as machines:
        yield Month(machines)


@pytest.fixture(autouse=True)
def one_task_after_the_other(request: pytest.FixtureRequest) -> None:
    if request.session.testsfailed:
        pytest.skip("the task before this one failed")


def alive(status: dict[str, Any], what: str) -> list[str]:
    key = "cluster_id" if what == "clusters" else "slave_id"
    return [one[key] for one in status[what] if one["alive"]]


def of(status: dict[str, Any], cluster: str) -> dict[str, Any]:
    return next(one for one in status["clusters"] if one["cluster_id"] == cluster)


def test_run(month: Month) -> None:
    shown = month.type("Run")
    assert all(re.search(rf"^ *{name} +\w+ +\w", shown, re.MULTILINE) for name in ("master", "s1", "a", "me"))
    master, slave = shell_lines(month.block("Run", 1))
    assert f"ExecStart=/opt/dips/bin/{master}" in month._units[0].splitlines()
    [minimum] = [block.text for block in blocks_below(OPERATIONS, "A minimum for each round") if block.language == "toml"]
    settings = month.machines.folder / "master-host/etc/dips/big.toml"
    settings.write_text(f"[master]\nsync_every = 4\nouter_lr = 0.7\n{minimum}\n")
    month.serve("master-host", master)
    slave = slave.replace(MASTER, BOTH)
    month.serve("slave-host-0", slave)
    month.serve("slave-host-1", slave.replace("s0", "s1").replace("10.0.0.2", "10.0.0.3"))
    for name in "ab":
        month.serve(f"site-{name}", CLUSTER.format(name))
    month.publishes()
    assert re.search(r"run big +version 1:\d", month.type("Operations"))
    month.until("a and b", lambda status: alive(status, "clusters") == ["a", "b"])


def test_rotate_keys(month: Month) -> None:
    before = month.status()
    serials = set(re.findall(r"\b[0-9a-f]{12}\b", month.say("dips keys show runs/big/keys")))
    assert not serials & set(re.findall(r"\b[0-9a-f]{12}\b", month.type("Rotate keys").partition("serial  ")[2]))
    for number in range(2):
        until(lambda n=number: RENEWED in month.machines.log(f"slave-host-{n}", f"dips-s{n}"), "renewed keys")  # type: ignore[misc]
    month.publishes()
    after = month.status()
    assert [one["incarnation"] for one in after["clusters"]] == [one["incarnation"] for one in before["clusters"]]
    assert after["epoch"] == before["epoch"]


def test_revoke(month: Month) -> None:
    month.type("Rotate keys", 1)
    until(lambda: month.machines.codes("site-b", "dips-b") == [KEYS_REFUSED_EXIT], "b ends", month.everything)
    assert "seen by others" in month.machines.log("site-b", "dips-b").splitlines()[-1]
    month.publishes()
    month.type("Rotate keys", 2)
    month.until("b is back", lambda status: alive(status, "clusters") == ["a", "b"])
    month.publishes()


def test_add_a_site(month: Month) -> None:
    assert "0 FAIL: nothing prevents the run" in month.type("Add a site")
    month.serve("site-c", CLUSTER.format("c"))
    month.until("a push of c is merged", lambda status: any(
        one["cluster_id"] == "c" and one["pushes_applied"] for one in status["clusters"]))


def test_back_up_and_restore_on_other_machines(month: Month) -> None:
    month.type("Back up")
    assert (month.machines.folder / "backup/model.safetensors").is_file()
    assert "backup" in month.type("Back up", 1)
    month.until("rest", lambda status: status["phase"] in ("IDLE", "WINDOW"))
    saved = month.versions()[-1]
    month.type("Back up", 2)
    tapes = "".join(f" --without-tape {name}" for name in "abc")
    print(month.say(f"dips verify /backup/monday --replay{tapes}"))
    month.publishes()
    hosts = ("master-host", *SLAVE_HOSTS[:2])
    for host in hosts:
        month.lose(host)
    month.type("Restore")
    for host in hosts:
        for unit in month.machines.units(host):
            month.say(f"ssh {host} systemctl start {unit}")
    month.until("all are back, in the pause", lambda status: status["paused"] and len(alive(status, "clusters")) == 3)
    assert month.versions()[-1] == saved
    month.say("dips resume")
    month.publishes()


def test_slow_round(month: Month) -> None:
    month.say("ssh slave-host-1 systemctl kill --signal SIGSTOP dips-s1")
    month.until("s1 is away", lambda status: "s1" not in alive(status, "slaves"))
    month.slow = str(month.status()["recent_rounds"][-1]["round"])
    print(month.say("dips status"))
    month.say("ssh slave-host-1 systemctl kill --signal SIGCONT dips-s1")
    month.publishes()


def test_bad_update(month: Month) -> None:
    month.say("ssh site-c touch /var/lib/dips/astray")
    month.until("an alarm", lambda status: of(status, "c")["direction_alarm"])
    month.bad = month.versions()[-1]
    print(month.say("dips status"))


def test_remove_a_site(month: Month) -> None:
    month.type("Add a site", 1)
    until(lambda: month.machines.codes("site-c", "dips-c") == [0], "c leaves", month.everything)
    month.publishes()


def test_change_h_and_the_outer_rate(month: Month) -> None:
    month.type("Change a setting")
    month.until("new settings", lambda status: (status["settings"]["sync_every_steps"], status["settings"]["outer_lr"]) == (8, 0.5))
    month.until("a and b", lambda status: alive(status, "clusters") == ["a", "b"])
    month.publishes()


def test_add_and_remove_a_slave(month: Month) -> None:
    month.type("Scale slaves")
    [line] = shell_lines(month.block("Scale slaves", 1))
    month.serve("slave-host-2", line.replace(MASTER, BOTH))
    month.until("s1 and s2", lambda status: alive(status, "slaves") == ["s1", "s2"] and not status["reshard"])
    until(lambda: month.machines.codes("slave-host-0", "dips-s0")[-1:] == [0], "the end of s0", month.everything)
    month.publishes()


def test_move_a_slave(month: Month) -> None:
    month.type("Scale slaves", 2)
    line = shell_lines(month.block("Run", 1))[1].replace(MASTER, BOTH)
    month.machines.name("slave-host-1", "slave-host-3")
    month.serve("slave-host-1", line.replace("s0", "s1").replace("10.0.0.2", "10.0.0.5"))
    month.publishes()


def test_move_the_master(month: Month) -> None:
    month.type("Several addresses of the master", 1)
    month.machines.name("master-host", "master-host-2")
    month.serve("master-host", shell_lines(month.block("Run", 1))[0].replace("10.0.0.1:", "10.0.1.1:"))
    until(lambda: "serving run" in month.machines.log("master-host", "dips-master"), "the master at its new address")
    assert re.search(r"run big +version 1:\d", month.type("Several addresses of the master"))
    month.publishes()


SERVERS = (("master-host", "dips-master"), ("slave-host-1", "dips-s1"), ("slave-host-2", "dips-s2"))
CLUSTERS = (("site-a", "dips-a"), ("site-b", "dips-b"))


def end(month: Month, folder: str) -> None:
    """Of the run; what the page does not name is collected too."""
    for units in (CLUSTERS, SERVERS):
        month.say("dips stop")
        for host, unit in units:
            until(lambda: month.machines.codes(host, unit)[-1:] == [0], f"the end of {unit}", month.everything)
    month.say(f"mkdir -p {folder}/slaves && scp -rp slave-host-2:/var/lib/dips/s2 {folder}/slaves/")
    month.say(f"scp -p site-c:/var/lib/dips/c/*.jsonl {folder}/")


def test_afterwards(month: Month) -> None:
    end(month, "/backup/big")
    print(month.type("When the run has ended"))
    print(month.slow, month.bad)
    said = month.type("Afterwards", version=month.bad)
    print("XXX", said)
    print(month.say("cd proof && sha256sum -c SHA256SUMS && cd .. && dips verify proof --replay"))


def test_take_the_end_back(month: Month) -> None:
    for host, unit in SERVERS:
        month.say(f"ssh {host} systemctl start {unit}")
    until(lambda: month.machines.log("master-host", "dips-master").count("serving run") == 2, "the master", month.everything)
    print(month.say("dips extend"))
    for host, unit in CLUSTERS:
        month.say(f"ssh {host} systemctl start {unit}")
    month.publishes()


def test_replace_a_slaves_disk(month: Month) -> None:
    print(month.type("Restore", 1))
    month.publishes()
    print(month.say("dips status"))


def test_rebuild_the_master(month: Month) -> None:
    month.say("ssh master-host systemctl off dips-master")
    month.say("ssh master-host rm -rf /var/lib/dips/master")
    month.type("Restore", 2)
    until(lambda: month.versions(), "a version", month.everything)
    month.say("ssh master-host sed -i /^rebuild/d /etc/dips/big.toml")
    month.publishes()
    print(month.say("dips status"))


def test_last_end(month: Month) -> None:
    end(month, "/backup/end")
    text = month.block("Afterwards").text.replace("/backup/big", "/backup/end").replace("1:42", month.versions()[-1])
    print("YYY", month.say(text.replace("--replay", "--without-tape master --without-tape s1").replace("proof", "proof2")))


def test_each_block_of_the_page_was_typed(month: Month) -> None:
    assert month.typed == {block for block in blocks(OPERATIONS) if block.note == MACHINES}
