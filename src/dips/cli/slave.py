"""`dips slave`: runs a slave's process, with each of its settings as an option."""

from __future__ import annotations

from typing import Any

from dips.local.options import ConfigFile, role_settings, with_knobs
from dips.slave.config import SlaveConfig


@with_knobs(SlaveConfig)
def slave(config: ConfigFile = None, **given: Any) -> int:
    """Run a slave: it holds blocks of the model, stages pushes and computes the outer step. It needs no
    torch.

    Settings: the options below, else the environment (DIPS_SLAVE_<NAME>), else table [slave] of --config.
    DIPS_MASTER is the same as --master.
    """
    loaded = role_settings(SlaveConfig, "slave", config, given)
    from dips.slave.process import run  # compiled code and sockets: not for --help or a wrong setting

    return run(loaded.value, loaded)
