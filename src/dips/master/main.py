"""The entry point of a master's process. It never returns before all decisions of the master are written."""

from __future__ import annotations

import asyncio
import logging

from dips.core.config import Loaded
from dips.core.file_limit import raise_file_limit
from dips.core.observe.failpoints import install
from dips.core.observe.telemetry import configure_logging
from dips.master.config import MasterConfig
from dips.master.process import serve
from dips.master.state.master import MasterMachine

_logger = logging.getLogger(__name__)


def run(config: MasterConfig, loaded: Loaded[MasterConfig] | None = None) -> int:
    """Serves the run until it ends or a signal comes; returns the exit code: 0 once the run is over, 143 or 130 for a
    signal before that.

    With `loaded` the settings are logged first, each with its source. Raises ConfigError (a directory, run id
    or port that cannot be used, or a failpoint that does not exist) and FatalError (a damaged journal) before
    anything is served.
    """
    raise_file_limit()
    configure_logging("master", config.run_id, config.log_level, config.log_format)
    install("master", enabled=config.failpoints)
    if loaded is not None:
        _logger.info("settings:\n%s", loaded.describe())
    return asyncio.run(serve(config, MasterMachine)).exit_code
