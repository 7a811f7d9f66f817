"""Optimizations that bench_ablation.py switches off in a process, by putting the plain way in their place.

Each switch names what it replaces and fails when that is not there any more, so that no row silently measures nothing.
As a program: `python switches.py NAME dips-arguments...` is `dips` with that switched off.
"""

from __future__ import annotations

import mmap
import sys
from typing import Any

ROWS = {
    "large pages": "4 KiB pages, and malloc gives every freed frame back to the kernel",
    "receipts": "squared norms and products in a pass of their own, when the window has closed",
    "answers without copy": "every chunk of a version is copied into its message",
    "short switches": "Python's usual 5 ms between two threads of a busy process",
}
"""Name of a switch -> what is done in its absence."""


def switch_off(name: str) -> None:
    """Before the role runs. Raises KeyError for an unknown name, AttributeError for a switch that is gone."""
    {
        "large pages": _small_pages,
        "receipts": _no_receipts,
        "answers without copy": _copied_answers,
        "short switches": _long_switches,
    }[name]()


def _small_pages() -> None:
    from dips.slave import process as slave_main

    _replace(slave_main, "keep_freed_memory", lambda: False)
    del mmap.MADV_HUGEPAGE


def _no_receipts() -> None:
    from dips.slave.data_port import DataPort

    _replace(DataPort, "known", lambda port, version: None)


def _copied_answers() -> None:
    from dips.slave import data_server

    _replace(data_server, "COPIED_BYTES", sys.maxsize)


def _long_switches() -> None:
    from dips.slave import process as slave_main

    _replace(slave_main, "SWITCH_INTERVAL_S", sys.getswitchinterval())


def _replace(owner: Any, name: str, value: Any) -> None:
    getattr(owner, name)
    setattr(owner, name, value)


if __name__ == "__main__":
    switch_off(sys.argv[1])
    from dips.cli.main import main

    del sys.argv[1]
    main()
