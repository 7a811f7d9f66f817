"""The master's settings: defaults that fit together, contradictions refused with a remedy, nothing dropped."""

from __future__ import annotations

import math
from operator import attrgetter
from pathlib import Path

import pytest

from dips.core.config import load
from dips.core.errors import ConfigError
from dips.master.config import MasterConfig
from dips.master.state.penalty_types import PRESET_NAMES, PRESETS, PenaltyConfig


def configured(**knobs: object) -> MasterConfig:
    given = {"run_id": "demo", "directory": "/run/dips", **knobs}
    return load(MasterConfig, "master", environment={}, overrides=given).value


def refused(**knobs: object) -> str:
    with pytest.raises(ConfigError) as caught:
        configured(**knobs)
    return str(caught.value)


def test_only_a_heartbeat_and_a_round_need_be_chosen_and_all_other_times_follow() -> None:
    run = configured(heartbeat_s=4, round_timeout_s=50).to_run_config()
    assert (run.settings.verdict_wait_s, run.settings.verdict_wait_measured) == (50.0, True)
    assert (run.settings.ticket_ttl_s, run.linger_s, run.evict_after_s) == (100.0, 60.0, 20.0)
    bound = configured(verdict_wait_s=30).to_run_config().settings
    assert (bound.verdict_wait_s, bound.verdict_wait_measured) == (30.0, False)
    slow = configured(heartbeat_s=30, round_timeout_s=60).to_run_config()
    assert slow.settings.ticket_ttl_s == 150.0, "not before an eviction"


KNOBS: list[tuple[str, object, str, object]] = [
    ("slaves", 3, "n_slaves", 3), ("max_clusters", 5, "max_clusters", 5), ("min_clusters", 4, "min_clusters", 4),
    ("min_clusters_per_round", 2, "min_clusters_per_round", 2),
    ("round_deadline_s", "10 min", "round_deadline_s", 600.0), ("sync_every", 16, "settings.sync_every_steps", 16),
    ("dynamic", True, "settings.dynamic_local_steps", True), ("tk_max", "1.5M", "settings.tk_max_tokens", 1_500_000),
    ("s_max", 12, "settings.max_staleness_versions", 12), ("heartbeat_s", "500 ms", "settings.heartbeat_s", 0.5),
    ("evict_after_beats", 6, "settings.evict_after_beats", 6), ("grace_s", "3 s", "grace_s", 3.0),
    ("round_timeout_s", "1 min", "settings.round_timeout_s", 60.0),
    ("verdict_wait_s", 20, "settings.verdict_wait_s", 20.0), ("overlap", "push", "settings.overlap", "push"),
    ("overlap_share", 0.25, "settings.overlap_share", 0.25),
    ("preset", "safe", "settings.preset penalty.preset", "safe"), ("lease_ttl_s", "2 h", "lease_ttl_s", 7200.0),
    ("ticket_ttl_s", 45, "settings.ticket_ttl_s", 45.0), ("linger_s", 5, "linger_s", 5.0),
    ("chunk_bytes", "2 MiB", "settings.chunk_bytes", 2 << 20), ("window_chunks", 8, "settings.window_chunks", 8),
    ("pinned_versions", 3, "pinned_versions", 3), ("max_message_bytes", "8 MiB", "settings.max_message_bytes", 8 << 20),
    ("outer_lr", 0.5, "settings.outer_lr", 0.5),
    ("outer_momentum", 0.9, "settings.outer_momentum penalty.outer_momentum", 0.9),
    ("durability", "async", "settings.durability", "async"),
    ("async_lag_versions", 6, "settings.async_lag_versions", 6), ("rebuild", True, "rebuild", True),
]  # fmt: skip


def test_every_setting_of_the_run_comes_from_a_knob() -> None:
    run = configured(**{name: said for name, said, *_ in KNOBS}).to_run_config()
    for name, _, places, value in KNOBS:
        assert {attrgetter(place)(run) for place in places.split()} == {value}, name


@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_a_preset_brings_its_values_and_its_name(preset: str) -> None:
    run = configured(preset=preset).to_run_config()
    assert run.penalty == PRESETS[preset]
    assert run.settings.preset == preset
    assert run.settings.outer_momentum == PRESETS[preset].outer_momentum
    assert run.settings.dynamic_local_steps is (preset in ("steady", "dynamic"))
    opposite = configured(preset=preset, dynamic=preset not in ("steady", "dynamic")).to_run_config()
    assert opposite.settings.dynamic_local_steps is (preset not in ("steady", "dynamic"))


OVERRIDES: dict[str, object] = {
    "outer_optimizer": "heavy-ball", "outer_momentum": 0.5, "clip_norm": 0.3, "clip_scope": "auto",
    "participation_scaling": True, "momentum_scaling": "tokens", "detector": "off", "beta": 2.0, "alpha": 0.1,
    "warm_up_pushes": 4, "window_pushes": 32, "hard_gate": 20.0, "quarantine_after_flags": 5,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(OVERRIDES))
def test_a_knob_replaces_that_value_of_the_preset_alone(name: str) -> None:
    penalty = configured(preset="edit", **{name: OVERRIDES[name]}).to_run_config().penalty
    assert penalty == PenaltyConfig.of("edit", **{name: OVERRIDES[name]})
    assert penalty != PRESETS["edit"]


@pytest.mark.parametrize(("optimizer", "given", "outer_lr", "momentum", "participation", "delay"), [
    ("nesterov", {}, 0.9, 0.6, True, 4), ("heavy-ball", {"outer_lr": 0.3}, 0.3, 0.6, True, 4),
    ("averaging", {}, 1.0, 0.0, True, 4), ("averaging", {"outer_lr": 0.5}, 0.5, 0.0, True, 4),
    ("delayed-nesterov", {}, 0.9, 0.6, False, 4),
    ("delayed-nesterov", {"delay_rounds": 7, "participation_scaling": True}, 0.9, 0.6, True, 7),
])  # fmt: skip
def test_an_outer_optimizer_brings_the_defaults_that_fit_it(
    optimizer: str, given: dict[str, object], outer_lr: float, momentum: float, participation: bool, delay: int
) -> None:
    run = configured(outer_optimizer=optimizer, **given).to_run_config()
    assert (run.settings.outer_lr, run.settings.outer_momentum) == (outer_lr, momentum)
    assert run.penalty.outer_optimizer == optimizer
    assert run.penalty.outer_momentum == momentum
    assert (run.penalty.participation_scaling, run.penalty.delay_rounds) == (participation, delay)


@pytest.mark.parametrize("name", ["clip_norm", "hard_gate"])
def test_infinity_switches_a_bound_off(tmp_path: Path, name: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'[master]\nrun_id = "demo"\ndirectory = "d"\n{name} = inf\n')
    config = load(MasterConfig, "master", file=file, environment={}).value
    assert getattr(config.to_run_config().penalty, name) == math.inf


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"round_timeout_s": 1, "chunk_bytes": 5, "min_clusters": 99},
         ["round_timeout_s", "chunk_bytes", "min_clusters"]),
        ({"grace": "sliding", "grace_s": 12, "verdict_wait_s": 60},
         ["a window may last 36 s", "round_timeout_s is 30 s", "lower grace_s below 10 s"]),
        ({"grace": "sliding", "grace_s": 9, "verdict_wait_s": 20}, ["may last 27 s", "verdict_wait_s is 20 s"]),
        ({"min_clusters_per_round": 3}, ["min_clusters_per_round is 3", "set round_deadline_s", "leave"]),
        ({"round_deadline_s": 60}, ["round_deadline_s is 1 min", "set min_clusters_per_round to 2 or more", "leave"]),
        ({"chunk_bytes": 4098}, ["chunk_bytes is 4098", "multiple of 4"]),
        ({"preset": "dips"}, ["preset 'dips' is no longer known", "another name of 'safe'", "default, 'steady'"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_settings_that_contradict_one_another_are_refused(knobs: dict[str, object], words: list[str]) -> None:
    sentence = refused(**knobs)
    assert [word for word in words if word not in sentence] == []


def test_times_that_just_fit_are_accepted() -> None:
    configured(heartbeat_s=1, round_timeout_s=2, grace_s=1.9, verdict_wait_s=2, lease_ttl_s=6, ticket_ttl_s=5)
    assert configured(grace="sliding", grace_s=9, verdict_wait_s=30, listen="[::1]:0").to_run_config().grace_sliding


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 0) for name in ("slaves", "max_clusters", "sync_every", "window_chunks", "outer_lr")),
        *((name, 0) for name in ("round_deadline_s", "min_clusters_per_round")),
        *(("outer_lr", "nan"), ("round_deadline_s", "nan"), ("tk_max", -1), ("pinned_versions", -1)),
        *(("grace_s", "sometimes"), ("heartbeat_s", "-2 s"), ("run_id", "Two Words"), ("run_id", "../up")),
        *(("listen", "127.0.0.1"), ("listen", "127.0.0.1:99999"), ("page_listen", "nonsense")),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(name: str, value: object) -> None:
    sentence = refused(**{name: value})
    assert name in sentence
    assert str(value) in sentence


@pytest.mark.parametrize("listen", ["0.0.0.0:4700", "192.168.1.7:0", "[::]:0", "example.org:4700"])
def test_an_address_that_others_can_reach_is_refused(listen: str) -> None:
    for knob in ("listen", "page_listen"):
        sentence = refused(**{knob: listen}, insecure=True)
        assert f"{knob} is '{listen}', which is not a loopback address" in sentence
        assert "127.0.0.1" in sentence
    assert configured(listen=listen, keys="keys/master").listen == listen
