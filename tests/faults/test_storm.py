"""A small storm of kills over a run of real processes, with keys, without torch: the short form of tests/soak.py."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path

import pytest
from support.repository import ROOT
from support.storm import Kill, play

from dips.judge.verify import verify_or_say

TOKENS = 100_000
KILLS = [Kill(0.1, victim) for victim in ("s0", "b", "master")]


def test_a_storm_is_survived_with_every_token_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    recovery = importlib.import_module("recovery.run")
    master = {"heartbeat_s": 0.5, "sync_every": 16, "linger_s": 1.0}
    shape = recovery.Shape(n_elems=20_000, slaves=1, steps_s=(0.05, 0.06), master=master)
    told: list[str] = []
    with recovery.Watched(tmp_path / "run", shape) as run:
        storm = play(run.local, KILLS, TOKENS, told.append)
    assert not storm.wrong
    assert Counter(death.victim for death in storm.deaths) == Counter(kill.victim for kill in KILLS)
    assert len(told) == len(KILLS)
    for numbers in storm.clusters.values():
        assert 0 < numbers.live <= 1
        assert 0 < numbers.participating <= 1
        assert numbers.tokens > 0
    assert verify_or_say(tmp_path / "run")["verify"] == "ok"
