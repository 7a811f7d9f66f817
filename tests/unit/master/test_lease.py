"""Who holds the lease, takes it and lets it go, with a store in memory and a clock of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from support.manual_clock import ManualClock

from dips.core.errors import ConfigError, RetryLater
from dips.master import lease
from dips.master.lease import Held, Lease, store_of
from dips.master.shell import MasterShell
from dips.master.state.effects import Halt, ReplicaNews
from dips.master.state.slaves import NEWER_EPOCH_EXIT

LIMIT_S = 15.0


class InMemory:
    """A store; `down`: it does not answer."""

    name = "a store"

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.held: Held | None = None
        self.down = False
        self.calls = self.left = 0
        self.enough: asyncio.Event | None = None

    def read(self) -> Held | None:
        self._called()
        return self.held

    def write(self, holder: str, instead_of: Held | None) -> Held | None:
        self._called()
        if instead_of != self.held:
            return None
        self.held = Held(holder, str(self.calls))
        return self.held

    def written_by(self, holder: str) -> None:
        assert self.write(holder, self.held)

    def _called(self) -> None:
        self.calls += 1
        self.left -= 1
        if self.left == 0 and self.enough is not None:
            self.loop.call_soon_threadsafe(self.enough.set)
        if self.down:
            raise RetryLater("it does not answer")


class Told:
    """What a master's shell is told."""

    def __init__(self) -> None:
        self.halt: Halt | None = None
        self.news: list[ReplicaNews] = []

    def stop(self, halt: Halt) -> None:
        self.halt = halt

    def dispatch(self, news: ReplicaNews) -> None:
        self.news.append(news)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "WRITES", 1e9)


@pytest.fixture
async def store() -> InMemory:
    return InMemory(asyncio.get_running_loop())


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


async def some_turns(store: InMemory) -> None:
    """Until the store was called a few times more."""
    store.left, store.enough = 6, asyncio.Event()
    await store.enough.wait()


@contextlib.asynccontextmanager
async def going_on(work: Any) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_standby_takes_a_lease_that_is_not_renewed_and_none_that_is(store: InMemory, clock: ManualClock) -> None:
    store.written_by("a")
    ours, lost = Lease(store, "b", LIMIT_S, clock), [math.inf]
    async with going_on(ours.take(lambda: lost[0])) as taking:
        await some_turns(store)
        clock.advance(100.0)
        store.written_by("a")
        await some_turns(store)
        lost[0] = clock.monotonic_s()
        clock.advance(LIMIT_S - 1)
        await some_turns(store)
        store.written_by("a")  # the master lives, and cannot be reached from here
        await some_turns(store)
        clock.advance(LIMIT_S - 1)
        await some_turns(store)
        assert not taking.done()
        assert getattr(store.held, "holder", "") == "a"
        clock.advance(1)
        await taking
    assert getattr(store.held, "holder", "") == "b"


@pytest.mark.parametrize(
    "why", ["followed", "not since its start", "renewed without it", "never written", "only made", "down"]
)
async def test_standby_does_not_take_over_by_itself(store: InMemory, clock: ManualClock, why: str) -> None:
    lost_s = {"followed": math.inf, "not since its start": -math.inf}.get(why, 0.0)
    if why != "never written":
        store.written_by("" if why == "only made" else "a")
    before = store.held
    async with going_on(Lease(store, "b", LIMIT_S, clock).take(lambda: lost_s)) as taking:
        await some_turns(store)
        if why == "renewed without it":
            clock.advance(LIMIT_S + 1)
            store.written_by("a")
            before = store.held
            await some_turns(store)
        store.down = why == "down"
        clock.advance(10 * LIMIT_S)
        await some_turns(store)
        assert not taking.done()
    assert store.held == before


async def test_master_waits_for_a_lease_until_it_is_let_go(store: InMemory, clock: ManualClock) -> None:
    store.written_by("a")
    async with going_on(Lease(store, "b", LIMIT_S, clock).claim(by_person=False)) as claiming:
        await some_turns(store)
        assert not claiming.done()
        clock.advance(LIMIT_S)
        await claiming
    assert getattr(store.held, "holder", "") == "b"


async def test_master_is_not_started_while_another_one_renews_the_lease(store: InMemory, clock: ManualClock) -> None:
    store.written_by("a")
    ours = Lease(store, "b", LIMIT_S, clock)
    async with going_on(ours.claim(by_person=False)) as claiming:
        await some_turns(store)
        store.written_by("a")
        with pytest.raises(ConfigError, match="held by a"):
            await claiming
    await ours.claim(by_person=True)
    assert getattr(store.held, "holder", "") == "b"


async def test_master_takes_its_own_lease_at_once_and_serves_without_a_store(
    store: InMemory, clock: ManualClock
) -> None:
    for _ in range(2):
        await Lease(store, "a", LIMIT_S, clock).claim(by_person=False)
    store.down = True
    await Lease(store, "b", LIMIT_S, clock).claim(by_person=False)
    assert getattr(store.held, "holder", "") == "a"


async def test_master_says_while_it_cannot_renew_and_goes_on(store: InMemory, clock: ManualClock) -> None:
    """Also after a write whose answer was lost."""
    ours, told = Lease(store, "a", LIMIT_S, clock), Told()
    await ours.claim(by_person=False)
    async with going_on(ours.keep(cast(MasterShell, told))) as keeping:
        await some_turns(store)
        assert told.news == []
        store.down = True
        await some_turns(store)
        store.down = False
        store.written_by("a")
        await some_turns(store)
        assert not keeping.done()
    assert [(bool(news.trouble), news.of_lease) for news in told.news] == [(True, True), (False, True)]


async def test_master_ends_where_another_process_has_taken_the_lease(store: InMemory, clock: ManualClock) -> None:
    ours, told = Lease(store, "a", LIMIT_S, clock), Told()
    await ours.claim(by_person=False)
    async with going_on(ours.keep(cast(MasterShell, told))) as keeping:
        await some_turns(store)
        store.written_by("b")
        await keeping
    assert told.halt is not None
    assert told.halt.exit_code == NEWER_EPOCH_EXIT
    assert getattr(store.held, "holder", "") == "b"


@pytest.mark.parametrize("is_alive", [True, False])
async def test_master_that_began_without_its_store_ends_only_where_another_one_serves(
    store: InMemory, clock: ManualClock, is_alive: bool
) -> None:
    """The lease of the master that it replaces may stand there yet."""
    store.written_by("a")
    store.down = True
    ours, told = Lease(store, "b", LIMIT_S, clock), Told()
    await ours.claim(by_person=False)
    async with going_on(ours.keep(cast(MasterShell, told))) as keeping:
        store.down = False
        await some_turns(store)
        if is_alive:
            store.written_by("a")
            await keeping
        else:
            clock.advance(LIMIT_S)
            await some_turns(store)
    assert (told.halt is not None) == is_alive
    assert getattr(store.held, "holder", "") == ("a" if is_alive else "b")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("consul:https://10.0.0.1", "etcd:https://HOST:PORT or kubernetes:NAMESPACE/NAME"),
        ("etcd:10.0.0.1:2379", "endpoint"),
        ("etcd:http://10.0.0.1:2379", "encryption"),
        ("kubernetes:runs", "NAMESPACE/NAME"),
        ("kubernetes:runs/demo", "in no pod"),
    ],
)
def test_place_that_cannot_hold_a_lease_is_refused(text: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match=what):
        store_of(text, "demo", LIMIT_S)


async def test_standby_does_not_take_over_a_run_that_is_over(store: InMemory, clock: ManualClock) -> None:
    """And a master that is started once more has its lease again."""
    masters = Lease(store, "a", LIMIT_S, clock)
    await masters.claim(by_person=False)
    async with going_on(masters.keep(cast(MasterShell, Told()))):
        await some_turns(store)
    await masters.end()
    clock.advance(10 * LIMIT_S)
    assert not await Lease(store, "b", LIMIT_S, clock).take(lambda: 0.0)
    await Lease(store, "a", LIMIT_S, clock).claim(by_person=False)
    assert getattr(store.held, "holder", "") == "a"
