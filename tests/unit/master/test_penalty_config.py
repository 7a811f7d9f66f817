"""Presets by name, and a sentence for every value that cannot be."""

from __future__ import annotations

import math

import pytest

from dips.core.errors import ConfigError
from dips.master.state.penalty_types import PenaltyConfig, dynamic_local_steps_of


def test_who_names_a_bound_means_it_for_the_whole_run() -> None:
    assert PenaltyConfig.of("dynamic", beta=4.0).clip_scope == "auto"
    assert PenaltyConfig.of("dynamic", clip_norm=0.3).clip_scope == "global"
    assert PenaltyConfig.of("dynamic", clip_norm=0.3, clip_scope="auto").clip_scope == "auto"


@pytest.mark.parametrize(
    ("knobs", "complaint"),
    [
        ({"clip_nrom": 1.0}, "did you mean 'clip_norm'"),
        ({"clip_scope": "slave"}, "not available in this release: use 'global'"),
        ({"clip_scope": "layer"}, "not available in this release: use 'global'"),
        ({"clip_scope": "globl"}, "did you mean 'global'"),
        ({"detector": "none"}, "one of score, literal, edit, off"),
        ({"weighting": "equal"}, "one of tokens, softmax"),
        ({"momentum_scaling": "token"}, "did you mean 'tokens'"),
        ({"outer_optimizer": "heavyball"}, "did you mean 'heavy-ball'"),
        ({"delay_rounds": 2, "outer_optimizer": "nesterov"}, "delay_rounds belongs to .* 'delayed-nesterov'"),
        ({"delay_rounds": 0, "outer_optimizer": "delayed-nesterov"}, "delay_rounds is 0"),
        ({"outer_momentum": 0.1, "outer_optimizer": "averaging"}, "'averaging' has no momentum"),
        ({"momentum_scaling": "tokens", "outer_optimizer": "delayed-nesterov"}, "made for outer_optimizer 'nesterov'"),
        ({"alpha": 1.5}, "between .* and 1"),
        *(({name: value}, f"{name} is {value}") for name, value in (
            ("outer_momentum", 1.0), ("outer_momentum", -0.1), ("clip_norm", 0.0), ("clip_norm", math.nan),
            ("alpha", 0.0), ("beta", 0.5), ("hard_gate", 0.5), ("warm_up_pushes", 0), ("window_pushes", 0),
            ("clear_after_voids", -1), ("cosine_alarm", -2.0),
        )),
    ],
)  # fmt: skip
def test_impossible_values_are_a_config_error(knobs: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        PenaltyConfig.of("safe", **knobs)


@pytest.mark.parametrize("make", [PenaltyConfig.of, lambda name: PenaltyConfig(preset=name), dynamic_local_steps_of])
def test_an_unknown_preset_is_a_config_error(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=r"preset 'save' is not known; .*did you mean 'safe'"):
        make("save")
