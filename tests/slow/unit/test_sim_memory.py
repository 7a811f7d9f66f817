"""A long simulated run: no machine remembers more after many rounds than after some (I16)."""

from __future__ import annotations

import gc
from dataclasses import replace
from random import Random
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import pytest

from dips.core.ids import Version
from dips.core.layout import Layout, Parameter
from dips.core.messages import DataMode, DataPlan, Settings
from dips.lab.compare.engine import Course
from dips.lab.sim.run_plan import CHUNK_BYTES, SimulatedRunPlan, make_plan
from dips.master.state.shared import RunConfig

ROUNDS = 240
SOME = 120
"""By then every bounded log is full."""

SLACK = 1.05
CODE = (ModuleType, type, FunctionType, BuiltinFunctionType, MethodType)


def n_objects(root: object) -> int:
    """How many objects `root` keeps alive, but for code."""
    seen: dict[int, object] = {}
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if id(item) not in seen and not isinstance(item, CODE):
            seen[id(item)] = item
            waiting.extend(gc.get_referents(item))
    return len(seen)


def plan_of(overlap: str) -> SimulatedRunPlan:
    """Two clusters on lent data and one slave; a push each two steps."""
    settings = Settings(sync_every_steps=2, overlap=overlap, chunk_bytes=CHUNK_BYTES, tk_max_tokens=ROUNDS * 2 * 2 * 10)
    return replace(
        make_plan(Random(1)),
        clusters=("a", "b"),
        slaves=("s0",),
        layout=Layout((Parameter("w", (8,), "float32", "w"),)),
        data=DataPlan(DataMode.LEASED, b"corpus", 100_000, 50),
        config=RunConfig("sim", 1, settings, max_clusters=2, min_clusters=2, grace_s=0.1),
        step_s=(0.2, 0.2),
        tokens_per_step=10,
        checkpoints=False,
        delay_s=0.001,
        flush_s=0.001,
        work_s=0.001,
    )


class Watched(Course):
    """The size of each machine after SOME and after ROUNDS versions."""

    def __init__(self, overlap: str) -> None:
        super().__init__(1, plan_of(overlap))
        self.versions = 0
        self.sizes: list[dict[str, int]] = []

    def appeared(self, version: Version) -> None:
        self.versions += 1
        if self.versions in (SOME, ROUNDS):
            hosts = {name: host.session for name, host in self.clusters.items()}
            machines = {"master": self.masters[0].state, **hosts, "s0": self.slaves["s0"].state}
            self.sizes.append({name: n_objects(machine) for name, machine in machines.items()})


@pytest.mark.parametrize("overlap", ["none", "full"])
def test_machines_do_not_grow_with_rounds(overlap: str) -> None:
    watched = Watched(overlap)
    watched.run_through(lambda: len(watched.sizes) == 2, 1e6)
    some, many = watched.sizes
    assert min(some.values()) > 100
    assert {name: n for name, n in many.items() if n > SLACK * some[name]} == {}, f"{some} became {many}"
