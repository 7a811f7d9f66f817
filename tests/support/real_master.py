"""The real master in a process of its own: `python -m support.real_master DIRECTORY [KNOB=VALUE ...]`."""

from __future__ import annotations

import logging
import sys

from dips.core.config import load
from dips.core.errors import DipsError
from dips.master.config import MasterConfig
from dips.master.main import run


def main(directory: str, *knobs: str) -> int:
    given = dict(knob.split("=", 1) for knob in knobs)
    overrides = {"run_id": "demo", "directory": directory, "insecure": True, **given}
    try:
        loaded = load(MasterConfig, "master", environment={}, overrides=overrides)
        return run(loaded.value, loaded)
    except DipsError as error:
        logging.critical("%s", error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
