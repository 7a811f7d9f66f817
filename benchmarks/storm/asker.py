"""Asks for the status again and again until its input ends, then says how long each call took.

    python -m storm.asker ADDRESS [KEYS]

A process of its own, as `dips status` is: next to the storm's threads each call would wait for Python's lock as well.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

from dips.core.errors import Refused, RetryLater
from dips.core.net.keys import load_identity
from dips.core.net.security import INSECURE, Security
from dips.local.operator_client import OperatorClient

PAUSE_S = 0.02
CALL_S = 30.0


def ask(address: str, security: Security, ended: threading.Event) -> tuple[list[float], list[str]]:
    """Seconds of each call, a connection of its own, and what those said that failed."""
    status_s, failed = [], []
    while not ended.is_set():
        began_s = time.perf_counter()
        try:
            with OperatorClient(address, "", CALL_S, security=security) as client:
                client.status()
        except (RetryLater, Refused) as error:
            failed.append(str(error))
        status_s.append(time.perf_counter() - began_s)
        ended.wait(PAUSE_S)
    return status_s, failed


def main(address: str, keys: str = "") -> None:
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    print("asking", flush=True)
    status_s, failed = ask(address, load_identity(Path(keys)) if keys else INSECURE, ended)
    print(json.dumps({"status_s": status_s, "failed": failed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
