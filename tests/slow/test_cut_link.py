"""A link that is cut: nothing gets through, nothing is closed, and the same connection goes on afterwards."""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.dips_command import dips

from dips.local.cut_link import CutLink

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="iproute2 is not installed (apt-get install iproute2)"),
]

CLIENT = """
import socket, sys
one = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
for line in sys.stdin:
    one.sendall(line.encode())
    print(one.recv(100).decode(), end="", flush=True)
"""


@pytest.fixture(autouse=True)
def namespaces() -> None:
    name = f"dips-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
    subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.fixture
def link() -> Iterator[CutLink]:
    with CutLink(1) as made:
        yield made


def echo(server: socket.socket) -> None:
    with server.accept()[0] as connection:
        while data := connection.recv(100):
            connection.sendall(data)


def test_a_connection_survives_a_cut(link: CutLink) -> None:
    server = socket.create_server(("127.0.0.1", link.ports[0]))
    threading.Thread(target=echo, args=(server,), daemon=True).start()
    command, pipe = [*link.prefix, sys.executable, "-c", CLIENT, str(link.ports[0])], subprocess.PIPE
    with subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(b"before\n")
        assert client.stdout.readline() == b"before\n"
        link.cut(until_s=10.0)
        client.stdin.write(b"during\n")
        assert select.select([client.stdout], [], [], 1.5)[0] == []
        assert not link.look(9.9)
        assert link.look(10.0)
        assert client.stdout.readline() == b"during\n"
        client.stdin.close()
    server.close()


def test_a_demo_whose_cluster_loses_its_link(tmp_path: Path) -> None:
    wish = ["--clusters", 2, "--minutes", 0.3, "--no-faults", "--cut-link", "--json"]
    told = dips("demo", "--run-dir", tmp_path / "run", *wish)
    assert told.returncode == 0, told.stderr[-4000:]
    report = json.loads(told.stdout)
    [fault] = report["faults"]
    assert (fault["what"], fault["kind"]) == ("link of cluster a cut for 12 s", "link")
    assert fault["back_when"] - fault["when"] > 12
    assert report["clusters"]["a"]["incarnations"] >= 2
