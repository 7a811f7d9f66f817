"""Pushes as differences: what the cluster asks for, what it is told, and what becomes of what rounding lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.cluster_bench import LEASED, TICKET, LeasedClusterBench, session_config

from dips.core.errors import RefusalCode
from dips.core.ids import ClusterId, Incarnation, PushId, Version
from dips.core.messages import (
    AwaitVerdictRequest,
    BeginPullRequest,
    BeginPushReply,
    BeginPushRequest,
    FinishPushReply,
    FinishPushRequest,
    PullGrant,
    Stale,
    StaleKind,
    Verdict,
    VerdictKind,
)
from dips.core.wire import DIFFERENCES, Codec
from dips.worker.state.effects import (
    ClearResidual,
    CopyParameters,
    Done,
    Effect,
    Failed,
    Install,
    InstallMode,
    KeepResidual,
    Log,
    Record,
    Run,
    SendPush,
    Started,
)
from dips.worker.state.shared import SessionPhase


class WireLife(LeasedClusterBench):
    """A cluster that would like to send differences, before a master that lets it unless told otherwise."""

    def __init__(self, wire: Codec = Codec.INT8) -> None:
        super().__init__(session_config(data_plan=LEASED, wire=wire))
        self.wire = wire

    def ticket(self, attempt: int = 1, wire: Codec | None = None) -> tuple[int, SendPush]:
        granted = self.wire if wire is None else wire
        self.answer(BeginPushRequest, BeginPushReply(replace(TICKET, attempt=attempt, wire=granted)))
        return self.job(SendPush)

    def residual_effects(self) -> list[Effect]:
        """Every one so far, in order."""
        return [effect for effect in self.every if isinstance(effect, KeepResidual | ClearResidual)]

    def applied(self) -> None:
        """One push from its beginning to the pull after its APPLIED."""
        self.awaiting()
        self.decide(VerdictKind.APPLIED)
        self.pulled()


@pytest.fixture
def life() -> WireLife:
    life = WireLife()
    life.begin()
    return life


@pytest.fixture
def owing() -> WireLife:
    """One push was applied as differences: a residual stands."""
    life = WireLife()
    life.begin()
    life.applied()
    assert life.session.shared.residual
    life.every.clear()
    return life


# ---- how a push is written ----


@pytest.mark.parametrize("wire", sorted(DIFFERENCES))
def test_a_push_asks_for_the_cluster_s_codec_and_is_sent_as_the_ticket_says(wire: Codec) -> None:
    life = WireLife(wire)
    life.begin()
    assert life.push_begun().wire is wire
    assert life.ticket()[1].ticket.wire is wire


def test_a_cluster_of_float32_never_speaks_of_differences() -> None:
    life = WireLife(Codec.F32)
    life.begin()
    assert life.push_begun().wire is Codec.F32
    life.sent(life.ticket())
    life.admitted()
    life.decide(VerdictKind.APPLIED)
    assert not life.residual_effects()
    assert not life.session.shared.residual


def test_a_master_that_grants_float32_is_obeyed(life: WireLife) -> None:
    life.push_begun()
    assert life.ticket(wire=Codec.F32)[1].ticket.wire is Codec.F32


def test_a_master_of_an_earlier_release_says_nothing_and_means_float32(life: WireLife) -> None:
    life.push_begun()
    assert life.ticket(wire=Codec.NONE)[1].ticket.wire is Codec.F32


def test_a_codec_that_was_not_offered_ends_the_session(life: WireLife) -> None:
    life.push_begun()
    life.answer(BeginPushRequest, BeginPushReply(replace(TICKET, wire=Codec.INT4)))
    assert life.phase is SessionPhase.LEAVING
    failed = [effect for effect in life.every if isinstance(effect, Record) and effect.kind == "failed"]
    assert "INT4, not as it was offered" in str(failed[0].fields["reason"])


def test_the_seed_is_float32() -> None:
    life = WireLife()
    life.published = None
    life.say(Started())
    life.join(seed=True)
    assert life.job(BeginPushRequest)[1].wire is Codec.F32


def test_a_donation_is_float32(owing: WireLife) -> None:
    owing.donate()
    assert owing.job(BeginPushRequest)[1].wire is Codec.F32


def test_a_base_that_is_gone_is_answered_with_a_new_attempt_in_float32(life: WireLife) -> None:
    life.push_begun()
    life.say(Failed(life.ticket()[0], "the base is gone", base_gone=True))
    life.pass_s(1.0)
    assert life.asked(BeginPushRequest).wire is Codec.F32
    _, sending = life.ticket(attempt=2, wire=Codec.F32)
    assert (sending.push, sending.ticket.wire) == (life.push_id, Codec.F32)


def test_a_transfer_that_failed_is_written_as_before(life: WireLife) -> None:
    """The slaves' chunks are of that codec: another one would send everything again."""
    life.push_begun()
    life.say(Failed(life.ticket()[0], "the slave is silent"))
    life.pass_s(1.0)
    assert life.asked(BeginPushRequest).wire is Codec.INT8
    life.say(Failed(life.ticket(attempt=2, wire=Codec.F32)[0], "the slave is silent"))
    life.pass_s(1.0)
    assert life.asked(BeginPushRequest).wire is Codec.F32


def test_the_next_push_asks_for_differences_again(life: WireLife) -> None:
    life.push_begun()
    life.sent(life.ticket(wire=Codec.F32))
    life.admitted()
    life.decide(VerdictKind.ABORTED)
    assert life.push_begun().wire is Codec.INT8


# ---- what becomes of the residual: the verdict table's last column ----


def test_applied_keeps_what_rounding_lost_before_anything_is_overwritten(life: WireLife) -> None:
    life.awaiting()
    life.decide(VerdictKind.APPLIED)
    life.pulled()
    steps = [e.command if isinstance(e, Run) else e for e in life.every]
    order = [e for e in steps if isinstance(e, CopyParameters | SendPush | KeepResidual | PullGrant | Install)]
    assert [type(effect) for effect in order[-4:]] == [SendPush, KeepResidual, PullGrant, Install]
    assert order[-3] == KeepResidual(Codec.INT8)
    assert life.session.shared.residual


def test_applied_in_float32_leaves_it_as_it_was(owing: WireLife) -> None:
    owing.push_begun()
    owing.sent(owing.ticket(wire=Codec.F32))
    owing.admitted()
    owing.decide(VerdictKind.APPLIED)
    assert not owing.residual_effects()
    assert owing.session.shared.residual


def test_aborted_leaves_it_as_it_was(owing: WireLife) -> None:
    owing.awaiting()
    owing.decide(VerdictKind.ABORTED)
    assert not owing.residual_effects()
    assert owing.session.shared.residual


def test_stale_by_versions_leaves_it_as_it_was(owing: WireLife) -> None:
    owing.push_begun()
    owing.answer(BeginPushRequest, BeginPushReply(Stale(StaleKind.VERSIONS, "too old")))
    owing.pulled()
    assert not owing.residual_effects()
    assert owing.session.shared.residual


@pytest.mark.parametrize("kind", [VerdictKind.EXCLUDED, VerdictKind.ROLLED_BACK])
def test_a_verdict_that_drops_the_steps_clears_it(owing: WireLife, kind: VerdictKind) -> None:
    owing.awaiting()
    owing.decide(kind)
    assert owing.residual_effects() == [ClearResidual()]
    assert not owing.session.shared.residual


@pytest.mark.parametrize("kind", [StaleKind.FENCE, StaleKind.TIMELINE])
def test_stale_by_fence_or_timeline_clears_it(owing: WireLife, kind: StaleKind) -> None:
    owing.push_begun()
    owing.answer(BeginPushRequest, BeginPushReply(Stale(kind, "not your base")))
    assert owing.residual_effects() == [ClearResidual()]


def test_a_refused_push_clears_it(owing: WireLife) -> None:
    owing.push_begun()
    owing.refuse(BeginPushRequest, RefusalCode.RANGES)
    assert owing.residual_effects() == [ClearResidual()]


def test_a_version_of_another_timeline_clears_it(owing: WireLife) -> None:
    owing.awaiting()
    owing.decide(VerdictKind.APPLIED)
    owing.published = Version(2, 1)
    owing.grant()
    owing.pull_ends()
    assert owing.residual_effects() == [KeepResidual(Codec.INT8), ClearResidual()]


def test_a_donation_that_is_taken_clears_it(owing: WireLife) -> None:
    donation = owing.donate()
    owing.sent(owing.ticket(wire=Codec.F32))
    owing.answer(FinishPushRequest, FinishPushReply(owing.verdict(VerdictKind.APPLIED, donation)))
    assert owing.residual_effects() == [ClearResidual()]


def test_what_is_clear_is_not_cleared_again(life: WireLife) -> None:
    life.awaiting()
    life.decide(VerdictKind.EXCLUDED)
    assert not life.residual_effects()


# ---- a new incarnation ----


def fenced(life: WireLife) -> None:
    life.refuse(AwaitVerdictRequest, RefusalCode.FENCED)
    assert life.phase is SessionPhase.JOINING


def test_a_new_incarnation_that_keeps_its_work_keeps_the_residual(owing: WireLife) -> None:
    owing.awaiting()
    fenced(owing)
    owing.join(owing.verdict(VerdictKind.ABORTED))
    assert owing.phase is SessionPhase.BEGINNING_PUSH
    assert not owing.residual_effects()
    assert owing.session.shared.residual


def test_a_new_incarnation_that_drops_its_work_clears_the_residual(owing: WireLife) -> None:
    owing.awaiting()
    fenced(owing)
    owing.fence += 3
    owing.join()
    assert owing.residual_effects() == [ClearResidual()]


def test_a_verdict_that_join_tells_advances_the_residual(owing: WireLife) -> None:
    owing.awaiting()
    fenced(owing)
    owing.join(owing.verdict(VerdictKind.APPLIED))
    assert owing.residual_effects() == [KeepResidual(Codec.INT8)]


# ---- another process ----


def resumed(life: WireLife, wire: Codec = Codec.INT8) -> WireLife:
    """A process that goes on from what this one could have saved."""
    saved = life.session.saved()
    assert saved is not None
    second = WireLife(wire)
    second.n, second.fence, second.published = life.n, life.fence, life.published
    second.session.resume(saved, saved.push)
    second.say(Started())
    return second


def test_the_residual_outlives_the_process(owing: WireLife) -> None:
    second = resumed(owing)
    second.join()
    assert second.session.shared.residual
    assert not second.residual_effects()


@pytest.mark.parametrize(
    ("kind", "effects", "stands"),
    [(VerdictKind.ABORTED, [], True), (VerdictKind.APPLIED, [ClearResidual()], False)],
)
def test_a_push_of_a_life_that_ended(owing: WireLife, kind: VerdictKind, effects: list[Effect], stands: bool) -> None:
    """In which codec its last ticket had it written, the checkpoint may not know: nothing wrong is carried on."""
    owing.awaiting()
    push = owing.push_id
    second = resumed(owing)
    second.join(second.verdict(kind, push))
    assert second.residual_effects() == effects
    assert second.session.shared.residual is stands


def test_a_life_that_sends_float32_drops_the_residual_and_says_so(owing: WireLife) -> None:
    second = resumed(owing, Codec.F32)
    assert not second.session.shared.residual
    assert any(isinstance(effect, Log) and effect.key == "residual" for effect in second.every)


def test_a_push_of_an_earlier_life_that_was_applied_clears_what_a_fresh_process_cannot_have(life: WireLife) -> None:
    """A process without memory has no residual: a foreign verdict asks for a pull and nothing else."""
    second = WireLife()
    second.say(Started())
    foreign = PushId(ClusterId("a"), Incarnation(1, 1), 1)
    second.join(Verdict(foreign, VerdictKind.APPLIED, Version(1, 5)))
    assert second.asks(BeginPullRequest)
    assert not second.residual_effects()


def test_a_pull_that_came_too_late_changes_nothing(owing: WireLife) -> None:
    owing.awaiting()
    owing.decide(VerdictKind.APPLIED)
    before = list(owing.residual_effects())
    owing.say(Done(999, None, 0.1))
    assert owing.residual_effects() == before


def test_every_difference_push_that_is_applied_advances_the_residual_once(life: WireLife) -> None:
    for _ in range(3):
        life.applied()
    assert life.residual_effects() == [KeepResidual(Codec.INT8)] * 3
    assert not [e for e in life.every if isinstance(e, Run) and isinstance(e.command, AwaitVerdictRequest)][3:]
    assert all(e.mode is InstallMode.REPLACE for e in life.every if isinstance(e, Install))
