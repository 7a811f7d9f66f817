"""The hosts at scale: steps in one event, copies that take time, an account that fits what the hosts do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.scale_setup import write_setup

from dips.lab.sim.kernel import SimulatedProcess
from dips.lab.sim.scale import rates, tally
from dips.lab.sim.scale.run import Failures, layout_of
from dips.lab.sim.scale.scenario import load_scenario
from dips.lab.sim.scale.world import ScaleWorld


def world_of(folder: Path, **lines: str) -> ScaleWorld:
    scenario = load_scenario(write_setup(folder, **lines))
    world = ScaleWorld(scenario, layout_of(scenario))
    Failures(world)
    return world


def test_many_steps_in_one_event_change_nothing(tmp_path: Path) -> None:
    many, single = world_of(tmp_path), world_of(tmp_path)
    single.plan = replace(single.plan, steps_at_once=1)
    for world in (many, single):
        world.kernel.run(3600.0)
        world.close()
    assert (many.tally.tokens, many.tally.merged) == (single.tally.tokens, single.tally.merged)
    assert many.kernel.handled < single.kernel.handled
    for name, cluster in many.clusters.items():
        assert cluster.trained_until_now_s == pytest.approx(single.clusters[name].trained_until_now_s, abs=2.0)
        # Each step draws from the generator, so that the delays of calls are others.
        assert many.tally.clusters[name].seconds == pytest.approx(single.tally.clusters[name].seconds, abs=2.0)


def test_steps_end_at_the_step_in_which_something_arrives(tmp_path: Path) -> None:
    world = world_of(tmp_path)
    cluster = world.clusters["a"]
    while not (cluster.training and cluster.session is not None and cluster.session.shared.base is not None):
        world.kernel.step()
    begun_s, made = world.kernel.now_s, cluster.steps
    world.kernel.run(begun_s + 2.5 * cluster.step_s)
    cluster.stop_soon("an operator asks for it")
    world.kernel.run(begun_s + 3.001 * cluster.step_s)
    assert cluster.steps == made + 3
    assert cluster.copying, "it copies the parameters for its last push at once"


def test_a_copy_holds_up_all_that_follows_it(tmp_path: Path) -> None:
    world = world_of(tmp_path)
    cluster = world.clusters["b"]
    while not cluster.copying:
        world.kernel.step()
    begun_s, copy_s = world.kernel.now_s, world.copy_s("b")
    assert copy_s == pytest.approx(0.4)
    while cluster.copying:
        world.kernel.step()
    assert world.kernel.now_s == pytest.approx(begun_s + copy_s, abs=1e-3)
    world.close()
    assert world.tally.clusters["b"].seconds[tally.JOIN] > copy_s, "the first version belongs to the join"


def test_a_push_takes_its_connection_slow_start_and_bytes(tmp_path: Path) -> None:
    """A query goes before the chunks, and the last one is acknowledged: a round trip each."""
    far = 'network = "25 Gbps"\nround_trip = "50 ms"'
    world = world_of(tmp_path, network=far)
    taken_s: list[float] = []
    tape = world.tape

    def watch(role: str, process: SimulatedProcess, kind: str, cause: str, fields: Mapping[str, Any]) -> None:
        if (role, process.name, kind) == ("worker", "a", "push_sent"):
            taken_s.append(fields["transfer_s"])
        tape(role, process, kind, cause, fields)

    world.tape = watch  # type: ignore[method-assign]
    while len(taken_s) < 3:
        world.kernel.step()
    line_s = 4e9 * 8 / 10e9
    overhead_s = rates.connect_s(0.05, world.plan.config.encrypted) + rates.ramp_s(5e9, 0.05) + 2 * 0.05
    assert taken_s[-1] == pytest.approx(line_s + overhead_s, abs=1e-3)


def test_a_round_of_one_cluster_takes_the_paper_s_update_time() -> None:
    share = 100_000_000_000 // 16
    update_s = rates.measure_s(share, 1, 1.9e9) + rates.outer_step_s(share, 1, 1.9e9) + rates.snapshot_s(share, 3e9)
    assert update_s == pytest.approx(110.0, rel=0.02)  # Table 2 of the Di-PS paper


def test_connections_and_slow_start() -> None:
    """100 Mbit/s over 50 ms hold 625 kB: six windows of ten segments, doubled each time, until they are full."""
    assert rates.connect_s(0.05, encrypted=False) == pytest.approx(0.15)
    assert rates.connect_s(0.05, encrypted=True) == pytest.approx(0.25)
    carried_bytes = 14_480 * (1 + 2 + 4 + 8 + 16 + 32)
    assert rates.ramp_s(100e6, 0.05) == pytest.approx(6 * 0.05 - carried_bytes / 12.5e6)
    assert rates.ramp_s(1e6, 0.02) == 0.0
    assert rates.ramp_s(10e9, 0.0) == 0.0
