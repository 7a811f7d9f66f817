"""Pushes and pulls as differences: what the cluster asks for, what it is told, what becomes of what rounding lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.cluster_bench import LEASED, SETTINGS, TICKET, ClusterBench, LeasedClusterBench, session_config

from dips.core import messages
from dips.core.errors import RefusalCode
from dips.core.ids import ClusterId, Incarnation, PushId, Version
from dips.core.messages import BeginPullRequest, PullGrant
from dips.core.wire import Codec
from dips.worker.state import effects
from dips.worker.state.shared import SessionPhase


class WireLife(LeasedClusterBench):
    """A cluster that would like to send differences, before a master that lets it unless told otherwise."""

    def __init__(self, wire: Codec = Codec.INT8) -> None:
        super().__init__(session_config(data_plan=LEASED, wire=wire))
        self.wire = wire

    def ticket(self, attempt: int = 1, wire: Codec | None = None) -> tuple[int, effects.SendPush]:
        granted = self.wire if wire is None else wire
        self.answer(messages.BeginPushRequest, messages.BeginPushReply(replace(TICKET, attempt=attempt, wire=granted)))
        return self.job(effects.SendPush)

    def residual_effects(self) -> list[effects.Effect]:
        return [effect for effect in self.every if isinstance(effect, effects.KeepResidual | effects.ClearResidual)]


@pytest.fixture
def life() -> WireLife:
    life = WireLife()
    life.begin()
    return life


@pytest.fixture
def owing(life: WireLife) -> WireLife:
    life.whole_round()
    assert life.session.shared.residual
    life.every.clear()
    return life


@pytest.mark.parametrize("wire", [wire for wire in Codec if wire is not Codec.NONE])
@pytest.mark.parametrize("granted", [None, Codec.F32, Codec.NONE])
def test_a_push_asks_for_the_clusters_codec_and_is_sent_as_the_ticket_says(wire: Codec, granted: Codec | None) -> None:
    """A master of an earlier release says nothing (NONE), which means float32. A later push asks again."""
    life = WireLife(wire)
    life.begin()
    for _ in range(2):
        assert life.push_begun().wire is wire
        sending = life.ticket(wire=granted)
        assert sending[1].ticket.wire is (wire if granted is None else Codec.F32)
        life.sent(sending)
        life.admitted()
        life.decide(messages.VerdictKind.APPLIED)
        life.pulled()
    differences = granted is None and wire is not Codec.F32
    assert life.residual_effects() == ([effects.KeepResidual(wire)] * 2 if differences else [])
    assert life.session.shared.residual is differences


def test_a_codec_that_was_not_offered_ends_the_session(life: WireLife) -> None:
    life.push_begun()
    life.answer(messages.BeginPushRequest, messages.BeginPushReply(replace(TICKET, wire=Codec.INT4)))
    assert life.phase is SessionPhase.LEAVING
    failed = [effect for effect in life.every if isinstance(effect, effects.Record) and effect.kind == "failed"]
    assert "INT4" in str(failed[0].fields["reason"])


def test_seeds_and_donations_are_float32(owing: WireLife) -> None:
    life = WireLife()
    life.published = None
    life.say(effects.Started())
    life.join(seed=True)
    assert life.job(messages.BeginPushRequest)[1].wire is Codec.F32
    owing.donate()
    assert owing.job(messages.BeginPushRequest)[1].wire is Codec.F32


@pytest.mark.parametrize(
    ("first", "base_gone", "second"),
    [(Codec.INT8, True, Codec.F32), (Codec.INT8, False, Codec.INT8), (Codec.F32, False, Codec.F32)],
)
def test_a_transfer_that_failed_is_written_as_before_unless_its_base_is_gone(
    life: WireLife, first: Codec, base_gone: bool, second: Codec
) -> None:
    """The slaves' chunks are of that codec: another one would send everything again."""
    life.push_begun()
    life.say(effects.Failed(life.ticket(wire=first)[0], "why", base_gone=base_gone))
    life.pass_s(1.0)
    assert life.asked(messages.BeginPushRequest).wire is second
    _, sending = life.ticket(attempt=2, wire=second)
    assert (sending.push, sending.ticket.wire) == (life.push_id, second)


def test_applied_keeps_what_rounding_lost_before_anything_is_overwritten(life: WireLife) -> None:
    life.whole_round()
    steps = [e.command if isinstance(e, effects.Run) else e for e in life.every]
    wanted = (effects.SendPush, effects.KeepResidual, messages.PullGrant, effects.Install)
    order = [step for step in steps if isinstance(step, (effects.CopyParameters, *wanted))]
    assert [type(step) for step in order[-4:]] == [*wanted]
    assert order[-3] == effects.KeepResidual(Codec.INT8)
    assert life.session.shared.residual


def decided(kind: messages.VerdictKind, wire: Codec | None = None) -> Callable[[WireLife], None]:
    def told(life: WireLife) -> None:
        life.push_begun()
        life.sent(life.ticket(wire=wire))
        life.admitted()
        life.decide(kind)

    return told


def stale(kind: messages.StaleKind) -> Callable[[WireLife], None]:
    def told(life: WireLife) -> None:
        life.push_begun()
        life.answer(messages.BeginPushRequest, messages.BeginPushReply(messages.Stale(kind, "not your base")))
        life.grant()
        life.pull_ends()

    return told


def joined(kind: messages.VerdictKind | None, fences: int = 0) -> Callable[[WireLife], None]:
    def told(life: WireLife) -> None:
        life.awaiting()
        life.fenced()
        life.fence += fences
        life.join(None if kind is None else life.verdict(kind))

    return told


def refused(life: WireLife) -> None:
    life.push_begun()
    life.refuse(messages.BeginPushRequest, RefusalCode.RANGES)


def rolled_back_since(life: WireLife) -> None:
    life.exchanged()
    life.published = Version(2, 1)
    life.grant()
    life.pull_ends()


def donated(life: WireLife) -> None:
    donation = life.donate()
    life.sent(life.ticket(wire=Codec.F32))
    life.judged("finish", life.verdict(messages.VerdictKind.APPLIED, donation))


KEPT, CLEARED = effects.KeepResidual(Codec.INT8), effects.ClearResidual()


@pytest.mark.parametrize(("what", "wanted"), [
    (decided(messages.VerdictKind.APPLIED), [KEPT]), (decided(messages.VerdictKind.APPLIED, Codec.F32), []),
    (decided(messages.VerdictKind.ABORTED), []), (decided(messages.VerdictKind.EXCLUDED), [CLEARED]),
    (decided(messages.VerdictKind.ROLLED_BACK), [CLEARED]), (stale(messages.StaleKind.VERSIONS), []),
    (stale(messages.StaleKind.FENCE), [CLEARED]), (stale(messages.StaleKind.TIMELINE), [CLEARED]), (refused, [CLEARED]),
    (rolled_back_since, [KEPT, CLEARED]), (donated, [CLEARED]), (joined(None, fences=3), [CLEARED]),
    (joined(messages.VerdictKind.ABORTED), []), (lambda life: life.say(effects.Done(999, None, 0.1)), []),
    (joined(messages.VerdictKind.APPLIED), [KEPT]),
])  # fmt: skip
def test_the_residual_advances_stays_or_is_cleared(
    owing: WireLife, what: Callable[[WireLife], None], wanted: list[effects.Effect]
) -> None:
    what(owing)
    assert owing.residual_effects() == wanted
    assert owing.session.shared.residual is (CLEARED not in wanted)


def resumed(life: WireLife, wire: Codec = Codec.INT8) -> WireLife:
    """A process that goes on from what this one could have saved."""
    saved = life.session.saved()
    assert saved is not None
    second = WireLife(wire)
    second.n, second.fence, second.published = life.n, life.fence, life.published
    second.session.resume(saved, saved.push)
    second.say(effects.Started())
    return second


@pytest.mark.parametrize(
    ("kind", "wanted", "stands"),
    [(messages.VerdictKind.ABORTED, [], True), (messages.VerdictKind.APPLIED, [effects.ClearResidual()], False)],
)
def test_a_push_of_a_life_that_ended(
    owing: WireLife, kind: messages.VerdictKind, wanted: list[effects.Effect], stands: bool
) -> None:
    """In which codec its last ticket had it written, the checkpoint may not know: nothing wrong is carried on."""
    owing.awaiting()
    push = owing.push_id
    second = resumed(owing)
    second.join(second.verdict(kind, push))
    assert second.residual_effects() == wanted
    assert second.session.shared.residual is stands


def test_a_life_that_sends_float32_drops_the_residual_and_says_so(owing: WireLife) -> None:
    second = resumed(owing, Codec.F32)
    assert not second.session.shared.residual
    assert any(isinstance(effect, effects.Log) and effect.key == "residual" for effect in second.every)


def test_a_push_of_an_earlier_life_that_was_applied_clears_what_a_fresh_process_cannot_have(life: WireLife) -> None:
    """A process without memory has no residual: a foreign verdict asks for a pull and nothing else."""
    second = WireLife()
    second.say(effects.Started())
    foreign = PushId(ClusterId("a"), Incarnation(1, 1), 1)
    second.join(messages.Verdict(foreign, messages.VerdictKind.APPLIED, Version(1, 5)))
    assert second.asks(messages.BeginPullRequest)
    assert not second.residual_effects()


def life_of(pull_wire: str = "int8", **config: Any) -> ClusterBench:
    """A cluster that has installed version 5, and whose push was applied to version 6."""
    life = ClusterBench(session_config(**config), replace(SETTINGS, pull_wire=pull_wire))
    life.begin()
    life.exchanged()
    return life


BASE = Version(1, 5)
INT8: dict[str, Any] = {"wire": Codec.INT8, "base": BASE}


def installed(life: ClusterBench) -> list[str]:
    return [str(e.fields["wire"]) for e in life.every if isinstance(e, effects.Record) and e.kind == "installed"]


@pytest.mark.parametrize(("granted", "then"), [(INT8, "INT8"), ({}, "F32")])
def test_the_first_pull_asks_for_parameters_and_the_next_names_the_base(granted: dict[str, Any], then: str) -> None:
    """A master of an earlier release says nothing of the codec, and means float32."""
    life = life_of()
    assert installed(life) == ["F32"]
    assert life.asked(BeginPullRequest).base == Version(1, 5)
    life.grant(**granted)
    life.pull_ends()
    assert installed(life) == ["F32", then]


@pytest.mark.parametrize(("pull_wire", "config"), [("float32", {}), ("int8", {"takes_differences": False})])
def test_where_none_are_to_be_had_no_base_is_named(pull_wire: str, config: dict[str, Any]) -> None:
    assert life_of(pull_wire, **config).asked(BeginPullRequest).base is None


def test_differences_that_are_gone_are_followed_by_parameters_at_once_and_then_by_differences_again() -> None:
    life = life_of()
    life.grant(**INT8)
    life.say(effects.Failed(life.job(PullGrant)[0], "the differences are gone", base_gone=True))
    life.pass_s(0.0)
    assert life.asked(BeginPullRequest).base is None
    life.grant(wire=Codec.F32)
    life.pull_ends()
    assert installed(life) == ["F32", "F32"]
    life.exchanged()
    assert life.asked(BeginPullRequest).base == Version(1, 6)


def test_a_pull_that_fails_otherwise_asks_for_differences_again() -> None:
    life = life_of()
    life.grant(**INT8)
    life.say(effects.Failed(life.job(PullGrant)[0], "the slave is silent"))
    life.pass_s(1.0)
    assert life.asked(BeginPullRequest).base == Version(1, 5)


@pytest.mark.parametrize("base", [None, Version(1, 4), Version(1, 6), Version(2, 5)])
def test_differences_to_what_is_not_here_end_the_session(base: Version | None) -> None:
    life = life_of()
    life.grant(wire=Codec.INT8, base=base)
    assert life.phase is SessionPhase.LEAVING
