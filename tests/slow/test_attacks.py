"""Real processes under each attack of `make fuzz`, once, while a cluster trains."""

from __future__ import annotations

from pathlib import Path

from fuzz import live


def test_a_run_under_attack_answers_counts_and_trains_on(tmp_path: Path) -> None:
    found, scene = live.attack(tmp_path / "run", seed=1, seconds=0.0, attacks=live.ATTACKS)
    assert found == []
    assert len(scene.inputs) == len(live.ATTACKS)
    assert scene.answers["spoofed identity: the owner alone is answered"] == 1
    assert scene.answers["stolen incarnation: refused FENCED"] > 0
