"""The executor hands events to the state one after the other and carries effects out in their order."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.manual_clock import ManualClock
from support.scripted_master_state import MemoryJournal, ScriptedMachine, command, leave, refusal, slave_message

from dips.core.errors import FatalError, LocalProtocolError, RefusalCode, Refused
from dips.core.messages import LeaveReply, StatusRequest
from dips.core.net.codec_protobuf import encode
from dips.core.observe import tape
from dips.core.observe.tape import Tape, read_tape
from dips.master.rpc import slaves_service
from dips.master.shell import LINK_COMMANDS, THREAD_NAME, JournalWriter, MasterShell
from dips.master.state import effects
from dips.master.state.effects import CloseLink, Effect, Halt, Log, Reply, ToSlave, WriteJournal
from dips.master.state.tape import MasterStoodStill, SlaveLost

TICK_S = 1000.0
"""Long enough that no real timer rings during a test; ticks are dispatched by hand."""

DONE = LeaveReply()


class Bench:
    """An executor with a scripted state, a manual clock and a journal in memory."""

    def __init__(self, tape_path: Path) -> None:
        self.machine = ScriptedMachine()
        self.journal = MemoryJournal()
        self.clock = ManualClock(monotonic_s=50.0)
        self.tape_path = tape_path
        self.tape = Tape(tape_path, "master", "demo", self.clock)
        self.executor = MasterShell(self.machine, self.journal.append_all, self.tape, self.clock, TICK_S)

    def leaving(self) -> asyncio.Task[object]:
        """A cluster's call that waits for its reply."""
        return asyncio.create_task(self.executor.call(lambda token: effects.ClusterCall(token, leave())))

    def reacts(self, react: Callable[[effects.Event], Sequence[Effect]]) -> None:
        self.machine.react = react


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path / "tape.jsonl")
    made.executor.start()
    yield made
    made.executor.stop(Halt(0, "the test is over"))
    await made.executor.close()
    made.tape.close()


class Details(NamedTuple):
    """What gRPC says of a call."""

    method: str


async def held(bench: Bench) -> tuple[asyncio.Task[object], int]:
    """A call that the state has seen and not answered."""
    task = bench.leaving()
    await bench.machine.until(effects.ClusterCall)
    return task, bench.machine.of(effects.ClusterCall)[-1].token


def answer(event: effects.Event) -> list[Effect]:
    return [Reply(event.token, DONE)] if isinstance(event, effects.ClusterCall | effects.OperatorCall) else []


# ---- calls ----


async def test_each_call_gets_the_reply_with_its_own_token_at_once_or_after_a_later_event(bench: Bench) -> None:
    task, token = await held(bench)
    bench.reacts(answer)
    for _ in range(5):
        assert await bench.leaving() == DONE
    assert not task.done()
    assert len({call.token for call in bench.machine.of(effects.ClusterCall)}) == 6
    bench.reacts(lambda event: [Reply(token, DONE)] if isinstance(event, effects.Tick) else [])
    bench.executor.dispatch(effects.Tick())
    assert await task == DONE
    assert bench.machine.of(effects.CallGone) == [], "an answered call is not gone"


async def test_the_state_is_told_once_that_a_caller_hung_up(bench: Bench) -> None:
    task, token = await held(bench)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.machine.of(effects.CallGone) == [effects.CallGone(token)]
    bench.reacts(lambda event: [Reply(token, DONE)] if isinstance(event, effects.Tick) else [])
    bench.executor.dispatch(effects.Tick())  # a reply to nobody is dropped
    assert not bench.executor.outcome.done()


# ---- order ----


async def test_effects_of_one_event_are_done_before_the_next_event_and_a_closed_link_is_not_heard(bench: Bench) -> None:
    link = bench.executor.open_link()
    order: list[str] = []

    def react(event: effects.Event) -> list[Effect]:
        order.append(type(event).__name__)
        if isinstance(event, effects.SlaveSaid):
            last = CloseLink(link.number, refusal())
            return [ToSlave(link.number, command("one")), ToSlave(link.number, command("two")), last]
        return []

    bench.reacts(react)
    bench.executor.slave_said(link, slave_message())
    bench.executor.dispatch(effects.Tick())
    bench.executor.slave_said(link, slave_message())
    assert order == ["SlaveSaid", "Tick"]
    assert [await link.next_command() for _ in range(3)] == [command("one"), command("two"), None]
    ended = await link.closed()
    assert ended is not None
    assert ended.code is RefusalCode.FENCED


# ---- slaves ----


async def test_the_end_of_a_link_is_told_once_and_it_is_never_numbered_or_commanded_again(bench: Bench) -> None:
    link = bench.executor.open_link()
    bench.executor.link_down(link)
    bench.executor.link_down(link)
    assert bench.machine.of(effects.SlaveLinkDown) == [effects.SlaveLinkDown(link.number)]
    assert bench.executor.open_link().number != link.number
    bench.reacts(lambda event: [ToSlave(link.number, command("late")), CloseLink(link.number, refusal())])
    bench.executor.dispatch(effects.Tick())
    assert not bench.executor.outcome.done()


async def test_the_end_of_a_link_is_told_when_the_call_is_cancelled_while_it_ends(bench: Bench) -> None:
    """gRPC cancels the handler once the slave is gone, which may be at its last step."""
    reads_end, first_read = asyncio.Event(), asyncio.Event()

    async def messages() -> AsyncIterator[bytes]:
        yield encode(slave_message())
        first_read.set()
        try:
            await asyncio.Event().wait()
        finally:
            reads_end.set()
            await asyncio.Event().wait()

    details = Details("/dips.v1.Slaves/Attach")
    handler: Any = slaves_service(bench.executor).service(details)  # type: ignore[arg-type]
    serving = asyncio.create_task(handler.stream_stream(messages(), None))
    await first_read.wait()
    serving.cancel()
    await reads_end.wait()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    [said] = bench.machine.of(effects.SlaveSaid)
    assert bench.machine.of(effects.SlaveLinkDown) == [effects.SlaveLinkDown(said.link)]


async def test_a_slave_that_does_not_read_is_cut_off_at_the_bound(bench: Bench) -> None:
    link = bench.executor.open_link()
    other = bench.executor.open_link()
    bench.reacts(lambda event: [ToSlave(link.number, command("x"))] * (LINK_COMMANDS + 1))
    bench.executor.dispatch(effects.Tick())
    ended = await link.closed()
    assert ended is not None
    assert ended.code is RefusalCode.BUSY
    assert str(LINK_COMMANDS) in ended.sentence
    assert not other.closing, "the others are not disturbed"


# ---- journal ----


async def test_a_journal_that_fails_ends_the_master(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.journal.fail_with = FatalError("a newer master runs")
    bench.reacts(lambda event: [WriteJournal(1, "K", "{}", "{}")] if isinstance(event, effects.Tick) else [])
    bench.executor.dispatch(effects.Tick())
    outcome = await bench.executor.outcome
    assert outcome == Halt(FatalError.exit_code, "a newer master runs")
    assert bench.machine.of(effects.JournalWritten) == [], "nothing was confirmed"
    assert "Traceback" not in caplog.text


async def test_entries_that_come_during_a_flush_share_the_next_one() -> None:
    flushing, go_on = threading.Event(), threading.Event()
    batches: list[list[int]] = []
    threads: set[str] = set()

    def append(entries: Sequence[WriteJournal]) -> None:
        threads.add(threading.current_thread().name)
        batches.append([entry.entry_id for entry in entries])
        flushing.set()
        go_on.wait()

    written: list[int] = []
    writer = JournalWriter(append, written.append, lambda error: pytest.fail(str(error)))
    writer.put(WriteJournal(1, "K", "{}", "{}"))
    await asyncio.to_thread(flushing.wait)
    for number in (2, 3, 4):
        writer.put(WriteJournal(number, "K", "{}", "{}"))
    assert written == [], "the first flush has not ended"
    go_on.set()
    await writer.close()
    assert batches == [[1], [2, 3, 4]]
    assert written == [1, 2, 3, 4]
    assert all(name.startswith(THREAD_NAME) for name in threads)


async def test_tidying_up_begins_when_nothing_waits_and_gives_way_to_an_entry() -> None:
    done: list[str] = []
    tidying, go_on = threading.Event(), threading.Event()

    def append(entries: Sequence[WriteJournal]) -> None:
        done.extend(f"wrote {entry.entry_id}" for entry in entries)

    def tidy() -> bool:
        done.append("tidied")
        tidying.set()
        go_on.wait()
        return True  # there is always more

    writer = JournalWriter(append, lambda number: None, lambda error: pytest.fail(str(error)), tidy)
    writer.put(WriteJournal(1, "K", "{}", "{}"))
    await asyncio.to_thread(tidying.wait)
    writer.put(WriteJournal(2, "K", "{}", "{}"))
    go_on.set()
    await writer.close()
    assert done == ["wrote 1", "tidied", "wrote 2"], "and no more once the end has come"


@pytest.mark.parametrize("tidying", [False, True])
async def test_nothing_is_written_after_an_error_of_an_append_or_while_tidying_up(tidying: bool) -> None:
    attempts: list[list[int]] = []
    written: list[int] = []
    lost: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    def append(entries: Sequence[WriteJournal]) -> None:
        attempts.append([entry.entry_id for entry in entries])
        if not tidying:
            raise FatalError("the disk is full")

    def tidy() -> bool:
        if tidying:
            raise FatalError("the disk is full")
        return False

    writer = JournalWriter(append, written.append, lost.set_result, tidy)
    writer.put(WriteJournal(1, "K", "{}", "{}"))
    assert str(await lost) == "the disk is full"
    writer.put(WriteJournal(2, "K", "{}", "{}"))
    await writer.close()
    assert (attempts, written) == ([[1]], [1] if tidying else [])


# ---- time ----


async def test_each_event_gets_the_clocks_time_and_after_a_pause_a_tick_comes_first(bench: Bench) -> None:
    expected: list[tuple[effects.Event, float]] = []
    for pause_s, ticks in ((0.0, 0), (2 * TICK_S, 0), (2 * TICK_S + 1, 1)):
        bench.clock.advance(pause_s)
        bench.executor.dispatch(effects.JournalWritten(9))
        now_s = bench.clock.monotonic_s()
        expected += [*[(effects.Tick(), now_s)] * ticks, (effects.JournalWritten(9), now_s)]
        assert bench.machine.seen == expected


@pytest.mark.parametrize(
    ("deadline_s", "tick_s"),
    [(50.01, TICK_S), (None, 0.01), (1e9, 0.01), (0.0, TICK_S)],
    ids=["deadline", "tick", "tick before the deadline", "deadline long over"],
)
async def test_the_timer_rings_at_deadline_or_tick(tmp_path: Path, deadline_s: float | None, tick_s: float) -> None:
    machine, clock = ScriptedMachine(), ManualClock(50.0)
    machine.deadline_s = deadline_s
    executor = MasterShell(machine, MemoryJournal().append_all, Tape(None, "master", "demo"), clock, tick_s)
    executor.start()
    await asyncio.wait_for(machine.until(effects.Tick), 10)
    executor.stop(Halt(0, ""))
    await executor.close()


async def test_an_event_that_brings_a_deadline_nearer_rearms_the_timer(bench: Bench) -> None:
    def react(event: effects.Event) -> list[Effect]:
        bench.machine.deadline_s = 50.01 if isinstance(event, effects.JournalWritten) else None
        return []

    bench.reacts(react)
    bench.executor.dispatch(effects.JournalWritten(1))
    await asyncio.wait_for(bench.machine.until(effects.Tick), 10)


# ---- people ----


async def test_a_log_effect_is_written_when_its_sentence_changes(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    sentences = iter(["waiting for slave b", "waiting for slave b", "all there"])
    bench.reacts(lambda event: [Log(logging.WARNING, "waiting", next(sentences))])
    for _ in range(3):
        bench.executor.dispatch(effects.Tick())
    assert [record.getMessage() for record in caplog.records] == ["waiting for slave b", "all there"]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    bench.reacts(lambda event: [SlaveLost("c7", slave="s1", reason="it broke")])
    bench.executor.dispatch(effects.Tick())
    bench.executor.note_refusal("Join", Refused(RefusalCode.MALFORMED, "a JoinRequest cannot be parsed"))
    assert "refused a Join: a JoinRequest cannot be parsed" in caplog.text
    lost, refused = read_tape(bench.tape_path)
    assert (lost["kind"], lost["cause"], lost["slave"], lost["reason"]) == ("slave_lost", "c7", "s1", "it broke")
    assert (refused["kind"], refused["method"], refused["code"]) == ("refused", "Join", "MALFORMED")


async def test_a_tape_that_cannot_be_written_ends_the_master(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: object, lines: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tape, "_append", full)
    bench.reacts(lambda event: [MasterStoodStill("-", gap_s=2.0)])
    bench.executor.dispatch(effects.Tick())
    outcome = await bench.executor.outcome
    assert isinstance(outcome, Halt)
    assert outcome.exit_code == FatalError.exit_code
    assert "No space left on device" in outcome.sentence


# ---- the end ----


async def test_halt_ends_the_master_after_its_effects_and_what_was_decided_is_written(bench: Bench) -> None:
    link, entry = bench.executor.open_link(), WriteJournal(1, "COMMIT", "{}", '"s"')
    task, token = await held(bench)
    bench.reacts(
        lambda event: [entry, Halt(0, "the run is over"), Reply(token, DONE), ToSlave(link.number, command("stop"))]
    )
    bench.executor.dispatch(effects.Tick())
    assert await bench.executor.outcome == Halt(0, "the run is over")
    assert await task == DONE
    assert await link.next_command() == command("stop")
    assert await link.next_command() is None
    await bench.executor.close()
    assert bench.journal.batches == [[entry]]


async def test_nothing_is_handled_after_the_end(bench: Bench) -> None:
    bench.executor.stop(Halt(0, "first"))
    bench.executor.stop(Halt(70, "second"))
    bench.executor.dispatch(effects.Tick())
    with pytest.raises(Refused):
        await bench.executor.call(lambda token: effects.OperatorCall(token, StatusRequest()))
    assert bench.executor.open_link().closing
    assert bench.machine.seen == []
    assert await bench.executor.outcome == Halt(0, "first")


@pytest.mark.parametrize("error", [LocalProtocolError("no transition"), KeyError("x"), AssertionError()])
async def test_a_bug_ends_the_process_with_70(bench: Bench, caplog: pytest.LogCaptureFixture, error: Exception) -> None:
    def react(event: effects.Event) -> list[Effect]:
        if isinstance(event, effects.ClusterCall):
            raise error
        return []

    bench.reacts(react)
    bench.executor.dispatch(effects.JournalWritten(41))
    task = bench.leaving()
    outcome = await bench.executor.outcome
    assert isinstance(outcome, Halt)
    assert outcome.exit_code == LocalProtocolError.exit_code == 70
    assert type(error).__name__ in outcome.sentence
    with pytest.raises(Refused):
        await task
    assert "JournalWritten 41" in caplog.text
    assert "LeaveRequest of a" in caplog.text
    assert "[c1]" in caplog.text
    assert any(record.exc_info for record in caplog.records), "the place of the bug is in the log"


async def test_a_bug_at_the_start_ends_the_process_too(tmp_path: Path) -> None:
    class Broken(ScriptedMachine):
        def start(self, now_s: float) -> Sequence[Effect]:
            raise LocalProtocolError("the snapshot contradicts itself")

    executor = MasterShell(Broken(), MemoryJournal().append_all, Tape(None, "master", "demo"), ManualClock(), TICK_S)
    executor.start()
    outcome = await executor.outcome
    assert isinstance(outcome, Halt)
    assert (outcome.exit_code, "the snapshot contradicts itself" in outcome.sentence) == (70, True)
    await executor.close()
