"""A cluster behind a link that can be cut: a network namespace with nothing but loopback, and a relay out of it.

Inside, 127.0.0.1 has the ports of the master and the slaves, and what is sent to one goes through the relay to the
process at the same port of this machine. So addresses, certificates and settings are those of any other cluster. A cut
takes the namespace's device down: what is sent is lost and connections hang, as when a cable is pulled out.

The relay runs as `python -m dips.local.cut_link NAMESPACE PORT...`: a socket stays in the namespace where it was made.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence

from dips.core.errors import ConfigError, FatalError
from dips.local.child import wrapped

LOOPBACK = "127.0.0.1"
_CLONE_NEWNET = 0x40000000
_READ_BYTES = 256 << 10
_WITHOUT = "or leave out --cut-link"


class CutLink:
    """Use as a context manager: the namespace and the relay are there inside. Start processes with `prefix`."""

    def __init__(self, ports: int) -> None:
        """ports: how many of this machine's the namespace leads to; `self.ports` has their numbers."""
        self.name = f"dips-demo-{os.getpid()}"
        self.prefix = ("ip", "netns", "exec", self.name)
        self.ports = free_ports(ports)
        self._relay: subprocess.Popen[str] | None = None
        self._mend_s: float | None = None

    def __enter__(self) -> CutLink:
        """Raises ConfigError where no namespace can be made."""
        try:
            _ip("netns", "add", self.name)
            _ip("netns", "exec", self.name, "ip", "link", "set", "lo", "up")
            self._start_relay()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._remove()

    def cut(self, until_s: float) -> None:
        """Cut it; look() mends it once its clock shows until_s."""
        _ip("-n", self.name, "link", "set", "lo", "down")
        self._mend_s = until_s

    def look(self, now_s: float) -> bool:
        """Whether the link was mended just now. Raises FatalError when the relay has ended."""
        if self._relay is not None and self._relay.poll() is not None:
            raise FatalError(f"the relay of namespace {self.name} has ended: start the demo again {_WITHOUT}")
        if self._mend_s is None or now_s < self._mend_s:
            return False
        _ip("-n", self.name, "link", "set", "lo", "up")
        self._mend_s = None
        return True

    def _start_relay(self) -> None:
        command = [sys.executable, "-m", "dips.local.cut_link", self.name, *map(str, self.ports)]
        self._relay = subprocess.Popen(
            wrapped(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, process_group=0
        )
        assert self._relay.stdout is not None
        if not self._relay.stdout.readline():
            raise ConfigError(f"the relay of namespace {self.name} did not start: see the lines above, {_WITHOUT}")

    def _remove(self) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate()
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True, check=False)


def free_ports(how_many: int) -> tuple[int, ...]:
    """Ports of loopback that nothing uses now."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(how_many)]
        return tuple(one.getsockname()[1] for one in found)


def check_possible() -> None:
    """Raise ConfigError where a namespace surely cannot be made."""
    if sys.platform != "linux":
        raise ConfigError(f"a link is cut in a network namespace, which only Linux has: use Linux, {_WITHOUT}")
    if os.geteuid() != 0:
        raise ConfigError(f"a link is cut in a network namespace, which only root may make: run it as root, {_WITHOUT}")
    if shutil.which("ip") is None:
        raise ConfigError(f"a link is cut with the program ip, which is not here: apt-get install iproute2, {_WITHOUT}")


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        why = " ".join((done.stderr or done.stdout).split())
        raise ConfigError(f"ip {' '.join(words)} failed ({why}): network namespaces must be allowed here, {_WITHOUT}")


# ---- the relay's process ----


def main(arguments: Sequence[str]) -> int:
    name, ports = arguments[0], [int(port) for port in arguments[1:]]
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    _enter(os.open(f"/run/netns/{name}", os.O_RDONLY))
    inside = [socket.create_server((LOOPBACK, port)) for port in ports]
    _enter(home)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(inside))
    return 0


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "a network namespace cannot be entered")


async def _serve(inside: Sequence[socket.socket]) -> None:
    for one in inside:
        await asyncio.start_server(functools.partial(_joined, one.getsockname()[1]), sock=one)
    print("ready", flush=True)
    await asyncio.Event().wait()


async def _joined(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection, in both directions; when one end closes it or breaks, so it is at the other."""
    ends = [writer]
    try:
        there, other = await asyncio.open_connection(LOOPBACK, port)
        ends.append(other)
        ways = [asyncio.ensure_future(_copied(reader, other)), asyncio.ensure_future(_copied(there, writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
    except OSError:
        pass  # no one listens there now: the cluster sees a connection that is closed, and tries again
    finally:
        for end in ends:
            end.close()


async def _copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_READ_BYTES):
            writer.write(data)
            await writer.drain()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
