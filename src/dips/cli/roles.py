"""`dips master`, `dips slave` and `dips train`: run one process of a run, with each of its settings as an option.

What a role runs on is imported by its function: not for --help or a wrong setting, and a slave's host needs no torch.
"""

from __future__ import annotations

import logging
from typing import Any

from dips.core.observe.logs import configure_logging
from dips.local.options import ConfigFile, role_settings, with_knobs
from dips.master.config import MasterConfig
from dips.slave.config import SlaveConfig
from dips.trainer.config import ALONE, TrainConfig, check_settings, settings_of_rank
from dips.trainer.config import SECTION as TRAIN_SECTION
from dips.trainer.parallelism import place_here
from dips.worker.config import SECTION as CLIENT_SECTION
from dips.worker.config import ClientConfig


@with_knobs(MasterConfig)
def master(config: ConfigFile = None, **given: Any) -> int:
    """Run the master of a run: it keeps members, rounds and the journal.

    It serves the address that --listen gives (by default this machine only), and beyond loopback only with --keys.

    Settings: the options below, else the environment (DIPS_MASTER_<NAME>), else table [master] of --config.
    """
    loaded = role_settings(MasterConfig, "master", config, given)
    from dips.master.process import run

    return run(loaded.value, loaded)


@with_knobs(SlaveConfig)
def slave(config: ConfigFile = None, **given: Any) -> int:
    """Run a slave: it holds blocks of the model, stages pushes and computes the outer step. It needs no
    torch.

    Settings: the options below, else the environment (DIPS_SLAVE_<NAME>), else table [slave] of --config.
    DIPS_MASTER is the same as --master.
    """
    loaded = role_settings(SlaveConfig, "slave", config, given)
    from dips.slave.process import run

    return run(loaded.value, loaded)


@with_knobs(TrainConfig, ClientConfig)
def train(config: ConfigFile = None, **given: Any) -> int:
    """Train a LLaMA-style byte-level language model on text files, as one cluster of a run.

    Without a master it is ordinary training of the same model for --steps steps.
    Several processes are one cluster under torchrun, with --parallel: each holds and pushes its part of the model.
    Settings: the options below, else the environment (DIPS_TRAIN_<NAME>, DIPS_WORKER_<NAME>), else tables [train] and
    [worker] of --config. DIPS_MASTER is the same as --master, DIPS_CLUSTER as --cluster-id.
    """
    trainer = role_settings(TrainConfig, TRAIN_SECTION, config, given)
    client = role_settings(ClientConfig, CLIENT_SECTION, config, given)
    place = place_here(trainer.value.parallelism)
    own = settings_of_rank(client.value, place)
    configure_logging("worker", own.cluster_id or ALONE, own.log_level, own.log_format)
    logging.getLogger("dips").info("settings:\n%s\n%s", trainer.describe(), client.describe())
    check_settings(trainer.value, own)
    if own.master:
        from dips.core.net.keys import security_of

        security_of(own, f"cluster {own.cluster_id}")
    from dips.trainer.train import run

    return run(trainer.value, own)
