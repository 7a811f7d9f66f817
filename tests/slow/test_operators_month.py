"""docs/operations.md on one run of several machines: what the page says to type is typed as printed, task after task."""

from __future__ import annotations

import json
import os
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

HOSTS = (
    *("master-host", "master-host-2", "slave-host-0", "slave-host-1", "slave-host-2", "slave-host-3"),
    *("site-a", "site-b", "site-c"),
)
ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.1.1")
QUICK = {
    "DIPS_MASTER_PRESET": "safe",
    "DIPS_MASTER_OVERLAP": "none",
    "DIPS_MASTER_HEARTBEAT_S": "0.5",
    "DIPS_MASTER_GRACE_S": "0.5",
    "DIPS_SLAVE_RECORD_PUSHES": "1",
}
"""A run of a few seconds for a task, all of which is recorded."""

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may make namespaces"),
    *(
        pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed (apt-get install {package})")
        for program, package in (("ip", "iproute2"), ("sqlite3", "sqlite3"))
    ),
]


class Month:
    """The run, and the person at the master's machine."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.typed: set[Block] = set()
        self.rest = [block for block in blocks(OPERATIONS) if block.note == MACHINES]

    def type(self, heading: str, at: int = 0, code: int = 0) -> str:
        """The block at this place of those below a heading of the page."""
        block = [block for block in blocks_below(OPERATIONS, heading) if block.language in SHELL][at]
        self.typed.add(block)
        return self.say(block.text, code)

    def say(self, text: str, code: int = 0) -> str:
        self.first = self.rest[0].text.splitlines()[0]
        return self.machines.type("master-host", f"{self.first}\ncd ~\n{text}", code)

    def status(self) -> dict[str, Any]:
        try:
            told: dict[str, Any] = json.loads(self.say("dips status --json"))
            return told
        except AssertionError:
            return {}

    def publishes(self) -> None:
        pass


@pytest.fixture(scope="module")
def month(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Month]:
    folder = tmp_path_factory.mktemp("month")
    (folder / "master-host").mkdir()
    quick = {**QUICK, "HOME": str(folder / "master-host"), "PYTHONPATH": os.pathsep.join(sys.path)}
    with live.run(live.HEAVY), Machines(folder, HOSTS, ADDRESSES, quick) as machines:
        yield Month(machines)


def test_it(month: Month) -> None:
    print(month.type("Run"))
    [unit] = [block.text for block in blocks_below(OPERATIONS, "Run") if block.language == "ini"]
    start = [block for block in blocks_below(OPERATIONS, "Run") if block.language in SHELL][1]
    master, slave = shell_lines(start)
    print(master, slave)
    exec_start = next(line for line in unit.splitlines() if line.startswith("ExecStart="))
    assert exec_start == f"ExecStart=/opt/dips/bin/{master}"
    other = slave.replace("s0", "s1").replace("10.0.0.2", "10.0.0.3")
    (month.machines.folder / "master-host/etc/dips/big.toml").write_text("[master]\nsync_every = 4\nouter_lr = 0.7\n")
    for host, name, line in (("master-host", "dips-master", master), ("slave-host-0", "dips-s0", slave), ("slave-host-1", "dips-s1", other)):
        month.machines.write_unit(host, name, unit.replace(exec_start, f"ExecStart=/opt/dips/bin/{line}"))
        month.say(f"ssh {host} systemctl start {name}")
    for name in "ab":
        line = f"python -m support.cluster_process {name} 10.0.0.1:29400 --checkpoints /var/lib/dips/{name} --step-s 0.02 --astray /var/lib/dips/astray"
        month.machines.write_unit(f"site-{name}", f"dips-{name}", unit.replace(exec_start, f"ExecStart=/usr/bin/env DIPS_KEYS=/etc/dips/keys {line}"))
        month.say(f"ssh site-{name} systemctl start dips-{name}")
    try:
        until(lambda: (month.status().get("published") or "").startswith("1:"), "a version", lambda: "\n".join(month.machines.log(h, u)[-1500:] for h, u in (("master-host", "dips-master"), ("slave-host-0", "dips-s0"), ("site-a", "dips-a"))))
    finally:
        print(month.say("dips status"))
