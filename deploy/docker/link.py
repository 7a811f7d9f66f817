"""Limits the network of the container that it joins (LINK_RATE, such as 10mbit), to try out links of unequal rates.

What the container sends (pushes) goes through a token bucket; what it receives (pulls) is policed, where the kernel
can. What cannot be limited is said in one line, once, and the link goes on as it is. Interfaces come and go: a network
that is disconnected and connected again is limited again, and when the container that owns the network has ended this
one ends too, so that its restart joins the new one. Needs root and NET_ADMIN in its own container, and nothing else.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from types import FrameType

LOOK_S = 1.0
"""How soon a new interface is limited."""

RETURN_S = 3.0
"""How long interfaces that went may need to come back, as long as a container needs to start again."""

QUEUE_MS = 100
"""What waits longer than this before the bucket is dropped: the buffer of a usual router."""

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)\Z")


def bits_per_s(rate: str) -> float:
    """ "10mbit" -> 1e7. Raises ValueError for what is not a rate."""
    match = _RATE.match(rate)
    if match is None or not float(match[1]):
        raise ValueError(f"LINK_RATE is {rate!r}: write a rate such as 500kbit, 10mbit or 1gbit")
    return float(match[1]) * _UNITS[match[2]]


def burst_bytes(rate: str) -> int:
    """What may pass at once: 10 ms of the rate, and two of the largest packets that a kernel makes."""
    return max(int(bits_per_s(rate) / 8 * 0.010), 128 << 10)


def push_command(interface: str, rate: str) -> list[str]:
    """Everything that leaves through the interface."""
    bucket = ["rate", rate, "burst", str(burst_bytes(rate)), "latency", f"{QUEUE_MS}ms"]
    return ["tc", "qdisc", "replace", "dev", interface, "root", "tbf", *bucket]


def pull_commands(interface: str, rate: str) -> list[list[str]]:
    """Everything that arrives: dropped above the rate, so that its senders slow down."""
    police = ["police", "rate", rate, "burst", str(2 * burst_bytes(rate)), "conform-exceed", "drop"]
    return [
        ["tc", "qdisc", "replace", "dev", interface, "handle", "ffff:", "ingress"],
        ["tc", "filter", "replace", "dev", interface, "parent", "ffff:", "prio", "1", "matchall", "action", *police],
    ]


class Link:
    """The interfaces of one network, each limited once, with a line for what was done and what could not be."""

    def __init__(self, name: str, rate: str) -> None:
        self.name = name
        self.rate = rate
        self.seen: set[str] = set()

    def look(self, interfaces: Iterable[str]) -> None:
        """Limit what is new, and forget what has gone."""
        now = set(interfaces)
        for interface in sorted(now - self.seen):
            self.limit(interface)
        self.seen = now

    def limit(self, interface: str) -> None:
        done = [
            f"{what} {self.rate if not why else f'NOT limited ({why})'}"
            for what, why in (
                ("pushes", _run([push_command(interface, self.rate)])),
                ("pulls", _run(pull_commands(interface, self.rate))),
            )
        ]
        print(f"link of {self.name}, {interface}: {', '.join(done)}", flush=True)


def _run(commands: Sequence[Sequence[str]]) -> str:
    """Empty, or why one of the commands failed."""
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return " ".join(done.stderr.split())[:200] or f"tc ended with {done.returncode}"
    return ""


def interfaces() -> list[str]:
    """Names of this network's interfaces but the loopback's."""
    return [name for _, name in socket.if_nameindex() if name != "lo"]


def main() -> int:
    rate = os.environ.get("LINK_RATE", "")
    try:
        bits_per_s(rate)
    except ValueError as error:
        print(f"link: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _ended)
    link = Link(os.environ.get("LINK_NAME") or socket.gethostname(), rate)
    while True:
        had = bool(link.seen)
        link.look(interfaces())
        if had and not link.seen:
            time.sleep(RETURN_S)
            if not interfaces():
                print(f"link of {link.name}: its network has gone; starting again to join the new one", flush=True)
                return 1
        time.sleep(LOOK_S)


def _ended(signal_number: int, frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main())
