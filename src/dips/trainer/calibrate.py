"""Measures how fast this machine trains, with a few seconds of inner steps. `python -m dips.trainer.calibrate`.

Counts whole steps as in the training loop, without the wait of an emulated gap.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from dips.core.config import load
from dips.core.errors import ConfigError, DipsError
from dips.trainer.config import SECTION, TrainConfig
from dips.trainer.corpus import all_ranges
from dips.trainer.data import LeasedBatches
from dips.trainer.train import InnerTrainer

WARM_UP_STEPS = 5
"""The first steps make the optimizer's state and allocate memory; they are slower than all others."""


def measure_tokens_per_s(train: TrainConfig, seconds: float) -> float:
    """Tokens a second over at least `seconds` of computing, and at least one step. Raises ConfigError."""
    if not seconds > 0:
        raise ConfigError(f"a speed cannot be measured in {seconds} s: give more than 0")
    if train.parallel:
        raise ConfigError("the speed of one process is measured: leave --parallel out")
    inner = InnerTrainer(train)
    batches = LeasedBatches(inner.text, train.batch_size, train.sequence_tokens)
    source = all_ranges(inner.text.plan)

    def step() -> int:
        while batches.held_tokens < train.step_tokens:
            batches.add([next(source)])
        batch = batches.next()
        inner.step(batch, train.lr)
        return batch.tokens

    for _ in range(WARM_UP_STEPS):
        step()
    begin_s, tokens, elapsed_s = time.perf_counter(), 0, 0.0
    while elapsed_s < seconds:
        tokens += step()
        elapsed_s = time.perf_counter() - begin_s
    return tokens / elapsed_s


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; settings of the trainer are options of the same names as those of `dips train`."""
    parser = argparse.ArgumentParser(prog="dips.trainer.calibrate", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to measure")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    for name, field in TrainConfig.model_fields.items():
        several = isinstance(field.default, tuple)
        text = (field.description or "").replace("%", "%%")
        parser.add_argument(f"--{name.replace('_', '-')}", action="append" if several else "store", help=text)
    given = vars(parser.parse_args(arguments))
    seconds, as_json = given.pop("seconds"), given.pop("json")
    try:
        # The caller has read the environment already; settings that it leaves out are defaults.
        train = load(TrainConfig, SECTION, environment={}, overrides=given).value
        speed = measure_tokens_per_s(train, seconds)
    except DipsError as error:
        print(f"dips: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps({"tokens_per_s": speed}) if as_json else f"{speed:.0f} tokens/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
