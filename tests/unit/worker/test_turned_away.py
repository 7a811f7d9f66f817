"""A slave that does not let a transfer connect: short pauses, then the master is asked."""

from __future__ import annotations

import itertools

import pytest

from dips.core.chunks import Chunk
from dips.core.errors import RefusalCode
from dips.core.layout import Layout, Parameter
from dips.core.messages import PlacementSpec, Refusal, SlaveAddress
from dips.core.net.transfer import (
    TURNED_AWAY_S,
    PullTransfer,
    PushTransfer,
    Reconnect,
    SlaveRequest,
    Transfer,
    TransferSettings,
    chunks_by_slave,
)

LAYOUT = Layout(tuple(Parameter(f"layers.{i}.w", (10,), "float32", f"layers.{i}") for i in range(2)))
PLACEMENT = PlacementSpec((SlaveAddress("s0", "a"), SlaveAddress("s1", "b")), (0, 1), b"")
SETTINGS = TransferSettings(16, 3, silence_s=2.0, stall_s=60.0)
WHY = "slave s0 does not know this key"


def shares() -> dict[str, list[Chunk]]:
    return chunks_by_slave(LAYOUT, PLACEMENT, (0, 1), 16)


@pytest.fixture(params=["push", "pull"])
def transfer(request: pytest.FixtureRequest) -> Transfer:
    if request.param == "push":
        return PushTransfer(shares(), SETTINGS, 0.0)
    return PullTransfer(shares(), {}, SETTINGS, 0.0)


def asked(transfer: Transfer, now_s: float) -> tuple[list[str], list[str]]:
    """The slaves that are to be connected again, and those that something is asked of."""
    actions = transfer.actions(now_s)
    again = [action.slave for action in actions if isinstance(action, Reconnect)]
    return again, sorted({action.slave for action in actions if isinstance(action, SlaveRequest)})


def test_what_was_asked_is_asked_again_over_a_new_connection(transfer: Transfer) -> None:
    assert asked(transfer, 0.0) == ([], ["s0", "s1"])
    transfer.turned_away("s0", WHY, 0.1)
    pause_s = transfer.next_deadline_s() - 0.1
    assert 0 < pause_s < 0.1
    again, asks = asked(transfer, 0.1)
    assert (again, "s0" in asks) == ([], False)
    again, asks = asked(transfer, 0.1 + pause_s)
    assert (again, "s0" in asks) == (["s0"], True)
    assert asked(transfer, 0.1 + pause_s)[0] == [], "once for each time"


def test_the_other_slaves_go_on(transfer: Transfer) -> None:
    asked(transfer, 0.0)
    windows = transfer.columns.flow.windows
    in_flight = windows.n_in_flight[1]
    assert in_flight
    transfer.turned_away("s0", WHY, 0.1)
    assert (windows.n_in_flight[0], windows.n_in_flight[1]) == (0, in_flight)


def test_pauses_grow_and_after_a_second_the_master_is_asked(transfer: Transfer) -> None:
    now_s, times = 0.0, []
    while not transfer.failure:
        transfer.actions(now_s)
        transfer.turned_away("s0", WHY, now_s)
        times.append(now_s)
        assert now_s <= 3 * TURNED_AWAY_S
        now_s = max(transfer.next_deadline_s(), transfer.columns.lanes.resume_at_s[0])
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert pauses == sorted(pauses)
    assert TURNED_AWAY_S <= times[-1] <= 3 * TURNED_AWAY_S
    assert transfer.failure == WHY


def test_an_answer_ends_the_count(transfer: Transfer) -> None:
    asked(transfer, 0.0)
    transfer.turned_away("s0", WHY, 0.1)
    again_s = transfer.next_deadline_s()
    request = next(a.request for a in transfer.actions(again_s) if isinstance(a, SlaveRequest) and a.slave == "s0")
    transfer.refused("s0", request, Refusal(RefusalCode.BUSY, "starting", 0.1), again_s)
    transfer.turned_away("s0", WHY, again_s + 2 * TURNED_AWAY_S)
    assert not transfer.failure


def test_a_push_of_somebody_else_is_for_the_master_to_settle(transfer: Transfer) -> None:
    request = next(a.request for a in transfer.actions(0.0) if isinstance(a, SlaveRequest))
    transfer.refused("s0", request, Refusal(RefusalCode.KEY, "not yours"), 0.1)
    assert "not yours" in transfer.failure
