"""What a standby costs the master: the time of a decision without one, with one that follows, and waiting for one.

    python benchmarks/bench_replica.py [--delays 0,10,50] [--decisions N] [--quick] [--json]

A master and a standby are real processes in network namespaces, with --delays ms each way between them. An operator's
pauses and resumes are decisions: each is answered once it is durable. Rows are asked in turn, in blocks, so that all
have the same machine.

median_ms, most_ms   of a decision, from the call to the answer
memory_mib           the master's most resident memory
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from shaped import Cable, NotPossible, ShapedNet

from dips.core.net.security import INSECURE
from dips.local.operator_client import OperatorClient

BITS_PER_S, PORT, BLOCK = 1e9, 29400, 50
ROWS = {"alone": 0, "followed": 0, "waited for": 1}


def dips(net: ShapedNet, site: str, folder: Path, *options: object) -> subprocess.Popen[bytes]:
    """`dips master` at a site; its directory and its log are in the folder."""
    words = ["-m", "dips.cli", "master", "--run-id", "bench", "--insecure", "--listen", f"{net.address(site)}:{PORT}"]
    command = ["ip", "netns", "exec", net.namespace(site), sys.executable, *words, "--directory", folder / site]
    with (folder / f"{site}.log").open("wb") as log:
        return subprocess.Popen([*map(str, command), *map(str, options)], stdout=log, stderr=log)


@contextlib.contextmanager
def served(row: str, delay_ms: float) -> Iterator[tuple[ShapedNet, int]]:
    """The network of a master, and its process."""
    sites = {site: Cable(BITS_PER_S, BITS_PER_S, delay_ms / 2) for site in ("master", "standby")}
    prefix = f"dips{ROWS[row]}{row[0]}{delay_ms:g}"
    with tempfile.TemporaryDirectory() as made, ShapedNet(sites, prefix) as net:
        folder = Path(made)
        running = [dips(net, "master", folder, "--journal-replicas", ROWS[row])]
        if row != "alone":
            running.append(dips(net, "standby", folder, "--standby", f"{net.address('master')}:{PORT}"))
            while "follows the master" not in (folder / "standby.log").read_text():
                time.sleep(0.05)
        try:
            yield net, running[0].pid
        finally:
            for process in running:
                process.terminate()
                process.wait()


def ask(address: str, n_decisions: int) -> list[float]:
    """Seconds of each decision."""
    found = []
    with OperatorClient(address, security=INSECURE) as client:
        client.pause("the first call connects")
        for n in range(n_decisions):
            began_s = time.perf_counter()
            client.resume("") if n % 2 == 0 else client.pause("bench")
            found.append(time.perf_counter() - began_s)
    return found


def measure(delay_ms: float, n_decisions: int) -> Iterator[dict[str, object]]:
    with contextlib.ExitStack() as stack:
        nets = {row: stack.enter_context(served(row, delay_ms)) for row in ROWS}
        times: dict[str, list[float]] = {row: [] for row in ROWS}
        for _ in range(-(-n_decisions // BLOCK)):
            for row, (net, _) in nets.items():
                here = [sys.executable, __file__, "--ask", f"{net.address('master')}:{PORT}"]
                command = ["ip", "netns", "exec", net.namespace("master"), *here, "--decisions", str(BLOCK)]
                times[row] += json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        for row, (_, pid) in nets.items():
            (peak,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmHWM" in line]
            ms = [1e3 * each for each in times[row]]
            found = {"standby": row, "delay_ms": delay_ms, "median_ms": statistics.median(ms), "most_ms": max(ms)}
            yield {**found, "decisions": len(ms), "memory_mib": int(peak.split()[1]) / 1024}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delays", default="0,10,50", help="ms each way between the two hosts")
    parser.add_argument("--decisions", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="50 decisions without a delay: whether it works")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ask", metavar="HOST:PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask:
        print(json.dumps(ask(options.ask, options.decisions)))
        return 0
    delays, n_decisions = ([0.0], BLOCK) if options.quick else (options.delays.split(","), options.decisions)
    try:
        rows = [row for delay in delays for row in measure(float(delay), n_decisions)]
    except NotPossible as why:
        print(f"bench_replica cannot run here: {why}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({"results": rows}, indent=2))
    else:
        for row in rows:
            texts = ((name, f"{value:.2f}" if isinstance(value, float) else value) for name, value in row.items())
            words = [f"{name} {text}" for name, text in texts]
            print("  ".join(words))
    return 0


if __name__ == "__main__":
    sys.exit(main())
