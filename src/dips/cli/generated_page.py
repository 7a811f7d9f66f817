"""The command line of programs that write a page of docs/: write the page, or report that it is stale."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from dips.core.errors import ConfigError


def keep_current(description: str | None, render: Callable[[str], str]) -> int:
    """Read the arguments `[--write] FILE`, then write the page or compare it; returns the exit code.

    render: the page as it is ("" where there is none) -> as it should be; may raise ConfigError. 1: it is stale.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", action="store_true", help="write the file; else exit 1 when it is stale")
    arguments = parser.parse_args()
    text = arguments.file.read_text(encoding="utf-8") if arguments.file.exists() else ""
    try:
        fresh = render(text)
    except ConfigError as error:
        print(f"{arguments.file}: {error}", file=sys.stderr)
        return error.exit_code
    if arguments.write:
        arguments.file.write_text(fresh, encoding="utf-8")
    elif fresh != text:
        print(f"{arguments.file} is not current: run `make docs`", file=sys.stderr)
        return 1
    return 0
