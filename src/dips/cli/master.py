"""`dips master`: runs the master's process, with each of its settings as an option."""

from __future__ import annotations

from typing import Any

from dips.local.options import ConfigFile, role_settings, with_knobs
from dips.master.config import MasterConfig


@with_knobs(MasterConfig)
def master(config: ConfigFile = None, **given: Any) -> int:
    """Run the master of a run: it keeps members, rounds and the journal.

    It serves the address that --listen gives (by default this machine only), and beyond loopback only with --keys.

    Settings: the options below, else the environment (DIPS_MASTER_<NAME>), else table [master] of --config.
    """
    loaded = role_settings(MasterConfig, "master", config, given)
    from dips.master.process import run  # the servers: not for --help or a wrong setting

    return run(loaded.value, loaded)
