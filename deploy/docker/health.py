"""python health.py [--at HOST:PORT] [--page] [--show PREFIX]: 0 when a process answers, and so is at work.

The images' health check: the standard library alone, since it runs every few seconds. It asks as Prometheus does, over
TLS with the process's own keys (DIPS_KEYS), and hears an error when the process stands still. Whether training moves is
another question, which `dips status` and the alerts answer; a container must not be called ill because its peers are.

--at: another process than the one in this container. --page: ask a master's status page, at port 8080, whether it is
there; a master cannot ask for its own metrics, since its certificate is for serving only. --show: print the lines of
the metrics that begin so.
"""

from __future__ import annotations

import argparse
import http.client
import os
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

METRICS, PAGE, TIMEOUT_S = "127.0.0.1:9400", "127.0.0.1:8080", 4.0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Ask a process of a run whether it is at work.")
    parser.add_argument("--at", metavar="HOST:PORT", default="")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--show", metavar="PREFIX")
    given = parser.parse_args(arguments)
    address = given.at or (PAGE if given.page else METRICS)
    try:
        status, text = ask(
            address, "/healthz" if given.page else "/metrics", os.environ.get("DIPS_KEYS", ""), given.page
        )
    except (OSError, http.client.HTTPException) as error:
        print(f"nothing answers at {address}: {error}")
        return 1
    if status != http.client.OK:
        print(f"{address} answers {status}: {text.strip()}")
        return 1
    shown = [line for line in text.splitlines() if given.show and line.startswith(given.show)]
    print("\n".join(shown) or "answers")
    return 0


def ask(address: str, path: str, keys: str, anonymous: bool) -> tuple[int, str]:
    """The status and text that `path` answers with. keys: a directory of `dips keys`; empty: in the clear."""
    host, _, port = address.rpartition(":")
    connection: http.client.HTTPConnection
    if keys:
        context = _context(Path(keys), anonymous)
        connection = http.client.HTTPSConnection(host, int(port), timeout=TIMEOUT_S, context=context)
    else:
        connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S)
    try:
        connection.request("GET", path, headers={"Host": "localhost"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def _context(keys: Path, anonymous: bool) -> ssl.SSLContext:
    """The other side shows a certificate of the run's authority, of whatever name, and so do we unless anonymous."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(keys / "ca.crt")
    if not anonymous:
        context.load_cert_chain(keys / "tls.crt", keys / "tls.key")
    return context


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
