"""Measures how fast this machine trains, by running the trainer itself in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from dips.core.errors import ConfigError, FatalError
from dips.local.child import wrapped
from dips.local.supervisor import how_it_ended

_ENDS_WITHIN_S = 120.0


def measure_tokens_per_s(options: Sequence[str], seconds: float, at_once: int) -> float:
    """The mean speed of `at_once` trainers that run side by side for some seconds, in tokens a second of
    each.

    `options` are those of `dips train`. Raises ConfigError with the trainer's own sentence when it refuses
    its settings (a data path that does not exist, for one), and FatalError when it cannot be measured.
    """
    command = [sys.executable, "-m", "dips.trainer.calibrate", "--json", "--seconds", str(seconds), *options]
    trainers = [_start(command) for _ in range(at_once)]
    try:
        speeds = [_speed(trainer) for trainer in trainers]
    finally:
        for trainer in trainers:
            if trainer.poll() is None:
                trainer.kill()
                trainer.communicate()
    return sum(speeds) / len(speeds)


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        wrapped(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _speed(trainer: subprocess.Popen[str]) -> float:
    try:
        out, errors = trainer.communicate(timeout=_ENDS_WITHIN_S)
    except subprocess.TimeoutExpired as error:
        raise FatalError(f"measuring the speed of this machine took over {_ENDS_WITHIN_S:g} s") from error
    if trainer.returncode == ConfigError.exit_code:
        raise ConfigError(_last_line(errors).removeprefix("dips: "))
    if trainer.returncode != 0:
        raise FatalError(f"the trainer {how_it_ended(trainer.returncode)} while its speed was measured: {errors}")
    return float(json.loads(_last_line(out))["tokens_per_s"])


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "(no output)"
