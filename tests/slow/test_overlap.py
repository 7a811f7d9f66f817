"""Training through exchanges, with real processes and sockets: nothing is lost or counted twice; rebases are exact."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from support.run_for_workers import FlatModel, RunForWorkers
from support.waiting import NO_LIMIT_S, until

from dips.core.errors import RefusalCode
from dips.core.messages import DataMode, DataPlan, Refusal, VerdictKind
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.observe.failpoints import armed, fired
from dips.worker.config import ClientConfig
from dips.worker.shell import ClusterShell
from dips.worker.state.effects import Tick

OWN = DataPlan(DataMode.OWN)
TOKENS = 100


@pytest.fixture
def fake() -> Iterator[RunForWorkers]:
    run = RunForWorkers(theta=FlatModel(7).theta)
    yield run
    run.close()


def driver(run: RunForWorkers, model: FlatModel, plan: DataPlan = OWN, **knobs: object) -> ClusterShell:
    given: dict[str, object] = {
        "master": run.address, "cluster_id": "a", "data_silence_s": 0.3, "call_deadline_s": 5.0, "retry_max_s": 0.3,
        "connect_wait_s": 60.0, "leave_wait_s": 30.0,
        "insecure": True,
    }  # fmt: skip
    return ClusterShell(ClientConfig.model_validate(given | knobs), model, model.layout(), plan)


def train(client: ClusterShell, model: FlatModel, steps: int) -> None:
    """Each step adds 1 to every parameter, so that rebasing can be checked by counting."""
    for _ in range(steps):
        model.theta += 1
        client.step(TOKENS, loss=2.0)


def settle(client: ClusterShell, done: Callable[[], bool]) -> None:
    """Step boundaries without steps, until it is so."""

    def look() -> bool:
        client._settle(Tick())
        return done()

    until(look, "the exchange does not end")


def test_data_is_not_handed_out_for_a_step_on_parameters_that_are_to_be_dropped(fake: RunForWorkers) -> None:
    """The verdict comes while the loop waits for data: it goes on only once its parameters are replaced."""
    fake.settings = replace(fake.settings, overlap="full", verdict_wait_s=1000.0)
    asked, pulls, calls = threading.Event(), threading.Event(), Counter[str]()
    fake.decide = lambda push: VerdictKind.EXCLUDED if asked.is_set() else None

    def hook(method: str, request: object) -> None:
        calls[method] += 1
        if method == "BeginPull" and asked.is_set():
            pulls.set()
        if method == "LeaseData" and calls[method] == 5:
            asked.set()
            assert pulls.wait(NO_LIMIT_S), "the verdict is not acted on"

    model = FlatModel(1)
    plan = DataPlan(DataMode.LEASED, b"d", 100_000, 1000)
    client = driver(fake, model, plan)

    def until_data_is_there(header: DataHeader) -> Refusal | None:
        if header.op is not DataOp.GET_CHUNK or not asked.is_set() or client.held_ranges:
            return None
        return Refusal(RefusalCode.BUSY, "the test holds it up", 0.05)

    with client:
        fake.hook = hook
        for slave in fake.slaves:
            slave.hook = until_data_is_there
        for _ in range(4):
            (lent,) = client.lease(TOKENS)
            model.theta += 1
            client.step(lent.tokens, [lent])
        assert client.lease(TOKENS)
        assert client.last_verdict is not None
        assert client.last_verdict.kind is VerdictKind.EXCLUDED
        assert np.array_equal(model.theta, FlatModel(7).theta), "the version was pulled before"
        assert client.progress == 0


@pytest.mark.parametrize("fails", ["before", "after"])
def test_data_of_steps_that_are_dropped_goes_back_also_where_the_call_fails(fake: RunForWorkers, fails: str) -> None:
    """Steps after a push that is excluded: their data is free again, and another cluster may train on it."""
    fake.settings = replace(fake.settings, overlap="full", verdict_wait_s=1000.0)
    judged = threading.Event()
    fake.decide = lambda push: VerdictKind.EXCLUDED if judged.is_set() else None
    model = FlatModel(1)
    client = driver(fake, model, DataPlan(DataMode.LEASED, b"d", 100_000, 1000))
    made = []
    with client, armed(f"worker.rpc.{fails}_ReturnData=1*error"):
        for _ in range(6):
            (lent,) = client.lease(TOKENS)
            model.theta += 1
            client.step(lent.tokens, [lent])
            made.append(lent)
        judged.set()
        settle(client, lambda: bool(fake.returned))
        assert fired() == {f"worker.rpc.{fails}_ReturnData": {"error": 1}}
    later = {(item.chunk, token) for item in made[4:] for token in range(item.begin_tokens, item.end_tokens)}
    back = {(item.chunk, token) for item in fake.returned for token in range(item.begin_tokens, item.end_tokens)}
    assert back == later
