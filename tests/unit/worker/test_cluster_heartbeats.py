"""Heartbeats: what is told flows to the master, its news are delivered once, and a fence is heard."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from support.failed_call import FailedCall
from support.manual_clock import ManualClock
from support.run_for_workers import RefuseCall

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import Incarnation, Version
from dips.core.messages import Caller, HeartbeatReply, HeartbeatRequest, Settings
from dips.core.net.addresses import MasterAddresses
from dips.core.net.codec_protobuf import from_message, to_message
from dips.core.net.security import INSECURE
from dips.worker.control import Heartbeat
from dips.worker.state.effects import Beat

SETTINGS = Settings(heartbeat_s=2**-10, evict_after_beats=5)


class Master:
    """Answers beats by a script: with a reply, a refusal, silence of so many seconds; None ends the stream."""

    def __init__(self, *script: HeartbeatReply | RefuseCall | Exception | float | None) -> None:
        self.clock, self.script = ManualClock(50.0), list(script)
        self.streams: list[int] = []
        """How many beats were heard before each began."""
        self.heard: list[HeartbeatRequest] = []
        self.hung_up = 0

    def ClustersStub(self, channel: object) -> Any:
        return SimpleNamespace(Heartbeat=self.stream)

    def stream(self, requests: Iterator[Any], timeout: float) -> Any:
        self.streams.append(len(self.heard))

        class Stream:
            cancelled = False

            def __iter__(stream) -> Iterator[Any]:
                for message in requests:
                    self.heard.append(from_message(message, HeartbeatRequest))
                    match self.script.pop(0) if self.script else None:
                        case None:
                            raise FailedCall(grpc.StatusCode.UNAVAILABLE)
                        case RefuseCall() as refused:
                            raise FailedCall.refused(grpc.StatusCode.ABORTED, refused.refusal)
                        case Exception() as error:
                            raise error
                        case float() as silent_s:
                            self.clock.advance(silent_s)
                        case reply:
                            yield to_message(reply)
                if stream.cancelled:
                    raise FailedCall(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")

            def cancel(stream) -> None:
                stream.cancelled = True
                self.hung_up += 1

        return Stream()


def reply(tokens: int) -> HeartbeatReply:
    return HeartbeatReply(1, Version(1, 0), tokens, 4, False, "IDLE")


def facts(n: int, steps: int = 0) -> HeartbeatRequest:
    return HeartbeatRequest(Caller("run", 1, "a", Incarnation(1, n), "a/1"), phase="TRAINING", steps=steps, loss=2.0)


Beating = Callable[..., AbstractContextManager[Heartbeat]]


@pytest.fixture
def told() -> queue.SimpleQueue[Beat]:
    return queue.SimpleQueue()


@pytest.fixture
def beating(told: queue.SimpleQueue[Beat], monkeypatch: pytest.MonkeyPatch) -> Beating:
    """Beats to this master, and at the first what is given."""
    monkeypatch.setattr("dips.worker.control.channel_to", lambda address, security: nullcontext())
    for name in ("FIRST_PAUSE_S", "MAX_PAUSE_S"):
        monkeypatch.setattr(f"dips.worker.control.{name}", 0.001)

    @contextmanager
    def begun(master: Master, steps: int = 0, late_ranks: Sequence[int] = ()) -> Iterator[Heartbeat]:
        monkeypatch.setattr("dips.worker.control.clusters_pb2_grpc", master)
        with closing(Heartbeat(MasterAddresses("m:1"), INSECURE, told.put, master.clock)) as beats:  # type: ignore[arg-type]
            beats.late_ranks = late_ranks
            beats.tell(facts(1, steps), SETTINGS)
            yield beats

    return begun


def test_news_are_delivered_once_and_a_fenced_incarnation_beats_no_more(
    beating: Beating, told: queue.SimpleQueue[Beat]
) -> None:
    master = Master(
        reply(1), reply(1), reply(2), None, reply(2), reply(3), 0.01, RefuseCall(RefusalCode.FENCED, "evicted"),
        reply(3),
    )  # fmt: skip
    with beating(master, steps=7) as beats:
        got = [told.get(timeout=60) for _ in range(4)]
        answers = [(beat.incarnation.n, getattr(beat.answer, "tokens", None)) for beat in got]
        assert answers == [(1, 1), (1, 2), (1, 3), (1, None)]
        refused = got[-1].answer
        assert isinstance(refused, Refused)
        assert (refused.code, refused.sentence) == (RefusalCode.FENCED, "evicted")
        assert (beats.answered_s, master.heard[0]) == (50.0, facts(1, steps=7))
        n_heard = len(master.heard)
        beats.tell(facts(2), SETTINGS)
        assert told.get(timeout=60) == Beat(Incarnation(1, 2), reply(3))
        assert {each.caller.incarnation for each in master.heard[:n_heard]} == {Incarnation(1, 1)}
        beats.close()
    assert told.empty()


@pytest.mark.parametrize("error", [OSError("no route"), Refused(RefusalCode.BUSY, "no message of ours")])
def test_what_fails_in_a_stream_is_told_and_another_one_is_begun(
    beating: Beating, told: queue.SimpleQueue[Beat], caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    master = Master(reply(1), error, reply(2))
    with beating(master):
        assert [told.get(timeout=60).answer for _ in range(2)] == [reply(1), reply(2)]
    assert str(error) in caplog.text


def test_late_ranks_are_named_while_the_training_thread_tells_nothing(
    beating: Beating, told: queue.SimpleQueue[Beat]
) -> None:
    master = Master(reply(1), 1e-6, reply(2))
    with beating(master, late_ranks=[1, 3]):
        told.get(timeout=60)
    assert master.heard[0].late_ranks == (1, 3)


def test_a_master_that_is_silent_for_as_long_as_it_would_evict_is_hung_up_on(
    beating: Beating, told: queue.SimpleQueue[Beat]
) -> None:
    silent_s = SETTINGS.heartbeat_s * SETTINGS.evict_after_beats
    master = Master(reply(1), silent_s, 1e-6, reply(2))
    with beating(master):
        assert [told.get(timeout=60).answer for _ in range(2)] == [reply(1), reply(2)]
        assert (master.hung_up, master.streams[:2]) == (1, [0, 3]), "not a moment earlier"


def test_renewed_keys_are_used_from_another_stream_on_without_a_word(
    beating: Beating, told: queue.SimpleQueue[Beat], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    master = Master(reply(1), reply(2))
    renewed = iter([False, True])  # of the keys of the thread's making, and of the first stream
    monkeypatch.setattr("dips.worker.control.UsedKeys", lambda security: SimpleNamespace(renewed=next(renewed, False)))
    with beating(master):
        assert [told.get(timeout=60).answer for _ in range(2)] == [reply(1), reply(2)]
        assert (master.hung_up, master.streams[:2]) == (1, [0, 1])
    assert "CANCELLED" not in caplog.text
