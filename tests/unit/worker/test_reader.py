"""A reader gets a whole version or says why not, and renews its pin while bytes arrive, but not for a trickle."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.run_for_workers import LAYOUT, FlatModel, RefuseCall
from support.run_in_memory import Failure, RunInMemory

from dips.core.errors import DipsError, RefusalCode, Refused, RemoteProtocolError, RetryLater
from dips.core.ids import Version
from dips.core.layout import PublishedModel
from dips.core.net.carriers import Common
from dips.core.net.security import INSECURE
from dips.core.net.transfer import LEAST_BYTES_PER_S
from dips.core.wire import Codec
from dips.worker.reader import CALL_DEADLINE_S, OLDER_PIN_S, PinRenewal, fetch_version

BEGAN_S = 1000.0


def renewals(bytes_per_s: float, pin_s: float = 60.0, for_s: int = 300, from_s: int = 0) -> list[int]:
    """The seconds in which the pin is renewed; nothing arrives before from_s."""
    renewal = PinRenewal(pin_s, BEGAN_S)
    return [s for s in range(for_s + 1) if renewal.due(int(max(0, s - from_s) * bytes_per_s), BEGAN_S + s)]


def test_a_pin_is_renewed_three_times_in_its_time_and_as_before_where_the_master_does_not_say_it() -> None:
    assert renewals(1e6) == list(range(20, 301, 20))
    assert renewals(1e6, pin_s=9.0, for_s=12) == [3, 6, 9, 12]
    assert renewals(1e6, pin_s=0.0) == renewals(1e6, pin_s=OLDER_PIN_S)


@pytest.mark.parametrize(("bytes_per_s", "times"), [(LEAST_BYTES_PER_S, 15), (LEAST_BYTES_PER_S / 10, 0), (0, 0)])
def test_who_gets_a_trickle_does_not_renew(bytes_per_s: float, times: int) -> None:
    assert len(renewals(bytes_per_s)) == times


def test_a_transfer_that_goes_on_after_a_stall_is_renewed_before_the_pin_ends() -> None:
    first, *_ = renewals(1e6, from_s=40)
    assert 40 < first < 60


def test_bytes_count_once() -> None:
    """What arrived before the last renewal does not keep the pin of a reader that stands still."""
    renewal = PinRenewal(60.0, BEGAN_S)
    assert renewal.due(1 << 30, BEGAN_S + 20.0)
    assert not any(renewal.due(1 << 30, BEGAN_S + 20.0 + s) for s in range(200))


@pytest.fixture
def run(run: RunInMemory, monkeypatch: pytest.MonkeyPatch) -> RunInMemory:
    monkeypatch.setattr("dips.worker.reader.time", SimpleNamespace(sleep=run.passes))
    run.publish(FlatModel(8).theta)
    return run


def fetch(run: RunInMemory, deadline_s: float = 10.0, **given: Any) -> PublishedModel:
    return fetch_version(run.address, "run", "eval", INSECURE, deadline_s=deadline_s, clock=run.clock, **given)


OLD, NEW, NEXT = Version(1, 0), Version(1, 1), Version(1, 2)


@pytest.mark.parametrize(
    ("given", "version", "seed"), [({}, NEW, 8), ({"version": OLD}, OLD, 7), ({"at_least": OLD}, NEW, 8)]
)
def test_the_newest_or_a_named_version_is_read_to_the_bit_and_its_pin_released(
    run: RunInMemory, given: dict[str, Any], version: Version, seed: int
) -> None:
    run.tokens = 500
    fetched = fetch(run, **given)
    assert (fetched.run_id, fetched.version, fetched.tokens, fetched.layout) == ("run", version, 500, LAYOUT)
    assert fetched.flat.tobytes() == FlatModel(seed).theta.tobytes()
    (asked,) = run.pulls
    assert (asked.reader, asked.exact, asked.at_least) == (True, "version" in given, next(iter(given.values()), None))
    assert [(each.pin_id, each.reader, each.caller.name) for each in run.released] == [(1, True, "eval")]
    assert run.deadlines == [("BeginPull", CALL_DEADLINE_S), ("FinishPull", CALL_DEADLINE_S)]


def test_a_version_to_come_a_master_that_is_away_and_a_transfer_that_fails_are_waited_for(run: RunInMemory) -> None:
    began_s, waits = run.clock.monotonic_s(), list[int]()

    def then() -> None:
        waits.append(1)
        match len(waits):
            case 3:
                run.down()
            case 5:
                run.up()
                run.publish(FlatModel(9).theta)
                run.failures = [Failure("cut")]

    run.while_waiting = then
    fetched = fetch(run, deadline_s=60.0, at_least=NEXT)
    assert fetched.flat.tobytes() == FlatModel(9).theta.tobytes()
    assert [each.pin_id for each in run.released] == [1, 2]
    assert 0.5 < run.clock.monotonic_s() - began_s < 10.0


@pytest.mark.parametrize(
    ("change", "given", "error", "says"),
    [
        ({}, {"at_least": Version(1, 5)}, RetryLater, "no such version is published"),
        ({"is_up": False}, {}, RetryLater, "does not answer"),
        ({"failures": [Failure("cut")] * 99}, {}, RetryLater, "cut"),
        ({"failures": [Failure("bad digest", corrupt=True)]}, {}, RemoteProtocolError, "bad digest"),
        ({}, {"version": NEXT}, RetryLater, "no such version"),
    ],
)
def test_what_cannot_be_read_is_said_within_the_time(
    run: RunInMemory, change: dict[str, Any], given: dict[str, Any], error: type[DipsError], says: str
) -> None:
    for name, value in change.items():
        setattr(run, name, value)
    began_s = run.clock.monotonic_s()
    with pytest.raises(error, match=says):
        fetch(run, deadline_s=4.0, **given)
    if error is RetryLater:
        assert 4.0 <= run.clock.monotonic_s() - began_s < 5.0
    assert len(run.released) == len(run.pulls)


def test_a_version_that_is_gone_is_refused_at_once(run: RunInMemory) -> None:
    del run.slaves[0].versions[OLD]
    with pytest.raises(Refused, match="not kept"):
        fetch(run, version=OLD)


@pytest.mark.parametrize("lost", [False, True])
def test_a_pin_is_renewed_while_bytes_arrive_and_the_one_that_came_last_is_released(
    run: RunInMemory, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """Of an older master, which takes each request for a new pull. lost: the request for it is not answered."""
    monkeypatch.setattr(PinRenewal, "due", lambda renewal, carried_bytes, now_s: carried_bytes > 0)

    def hook(method: str, request: Any) -> None:
        if lost and method == "BeginPull" and request.pin_id:
            raise RefuseCall(RefusalCode.BUSY, "not now", 1.0)

    run.hook = hook
    fetched = fetch(run)
    again = [(each.exact, each.at_least, each.pin_id) for each in run.pulls[1:]]
    assert again == [] if lost else [(True, fetched.version, 1)]
    assert [each.pin_id for each in run.released] == [1 if lost else 2]
    renewals = [deadline_s for method, deadline_s in run.deadlines if method == "BeginPull"][1:]
    assert renewals == [CALL_DEADLINE_S]


@pytest.mark.parametrize(("deadline_s", "stall_s"), [(0.0, 3.0), (20.0, 20.0), (600.0, 30.0)])
def test_near_its_deadline_a_reader_still_waits_for_a_chunk_over_a_slow_link(
    run: RunInMemory, monkeypatch: pytest.MonkeyPatch, deadline_s: float, stall_s: float
) -> None:
    used: list[float] = []

    def noted(context: object, common: Common, *rest: Any, **base: Any) -> Any:
        used.append(common.settings.stall_s)
        return run.carry_pull(context, common, *rest, **base)

    monkeypatch.setattr("dips.worker.reader.carry_pull", noted)
    assert fetch(run, deadline_s=deadline_s).version == NEW
    assert used == [stall_s]


@pytest.mark.parametrize(("failures", "bases"), [
    ([], [OLD]), ([Failure("the slaves began again", base_gone=True)], [OLD, None]),
    ([Failure("bad digest", corrupt=True)], [OLD, None]), ([Failure("slave s1 is silent")], [OLD, OLD]),
])  # fmt: skip
def test_a_version_that_is_here_is_the_base_until_it_is_of_no_use(
    run: RunInMemory, failures: list[Failure], bases: list[Version | None]
) -> None:
    """One slave that is slow for a moment does not cost a whole version."""
    base = fetch(run, version=OLD)
    run.pulls.clear()
    run.pull_wire, run.failures = Codec.INT4, failures
    assert fetch(run, base=base).flat.tobytes() == FlatModel(8).theta.tobytes()
    assert [asked.base for asked in run.pulls] == bases


def test_a_version_of_another_run_is_no_base(run: RunInMemory) -> None:
    """Of one that had the same name, say: its differences would lead to nothing that was ever published."""
    run.pull_wire = Codec.INT4
    fetched = fetch(run, base=replace(fetch(run, version=OLD), run_id="other"))
    assert fetched.version == NEW
    assert [asked.base for asked in run.pulls] == [None, OLD, None]


def test_a_pull_that_is_ended_here_ends_at_once(run: RunInMemory) -> None:
    ended = threading.Event()
    run.is_up, run.while_waiting = False, ended.set
    began_s = run.clock.monotonic_s()
    with pytest.raises(RetryLater, match="was ended here"):
        fetch(run, deadline_s=600.0, cancelled=ended)
    assert run.clock.monotonic_s() - began_s < 2.0
