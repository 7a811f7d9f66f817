"""Runs the `dips` command, as its script does and as `python -m dips.cli`: so a launcher starts its children, whatever
the PATH says. ctrl-C while the command is still imported ends it as later: with its exit code, and without a trace."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Imports the command and runs it."""
    try:
        from dips.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
