"""Every arrow of the session's transition table is taken by some life, and no life takes another."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from support.cluster_bench import LEASED, ClusterBench, session_config

from dips.core.errors import LocalProtocolError, RefusalCode
from dips.core.ids import Incarnation, PushId, Version
from dips.core.messages import (
    AwaitVerdictRequest,
    BeginPullRequest,
    BeginPushReply,
    BeginPushRequest,
    Busy,
    FinishPushReply,
    FinishPushRequest,
    Stale,
    StaleKind,
    VerdictKind,
)
from dips.worker.state.effects import Failed, Started, StopWanted
from dips.worker.state.shared import SESSION_TABLE, SessionPhase

Arrow = tuple[SessionPhase, str, SessionPhase]
_MOVE = re.compile(r"(\w+) -> (\w+) upon ([a-z ]+)")


def training() -> ClusterBench:
    life = ClusterBench()
    life.begin()
    return life


def beginning() -> ClusterBench:
    life = training()
    life.push_begun()
    return life


def transferring() -> ClusterBench:
    life = beginning()
    life.ticket()
    return life


def finishing() -> ClusterBench:
    life = beginning()
    life.sent(life.ticket())
    return life


def awaiting() -> ClusterBench:
    life = training()
    life.awaiting()
    return life


def pulling() -> ClusterBench:
    life = awaiting()
    life.decide(VerdictKind.APPLIED)
    return life


def seeding(to: Callable[[ClusterBench], None]) -> ClusterBench:
    life = ClusterBench()
    life.published = None
    life.say(Started())
    life.join(seed=True)
    to(life)
    return life


def joining() -> ClusterBench:
    life = ClusterBench()
    life.say(Started())
    return life


PRESENT = (training, beginning, transferring, finishing, awaiting, pulling)


def lives() -> list[ClusterBench]:
    """A life for every arrow; many take more than one."""
    made = [make() for make in PRESENT]
    for make in PRESENT:
        life = make()
        life.leaves_at_once()
        life.left()
        made.append(life)
        life = make()
        life.beat(epoch=2)
        life.join()
        made.append(life)
    made += [joined_undecided(), stopped_before_join(), stopped_while_joining_again()]
    made += [pulled_to_the_end(), *pushes_answered(), *seeds(), *donations()]
    return made


def joined_undecided() -> ClusterBench:
    life = awaiting()
    life.refuse(AwaitVerdictRequest, RefusalCode.FENCED)
    life.join(life.push_id)
    return life


def stopped_before_join() -> ClusterBench:
    life = joining()
    life.say(StopWanted("enough"))
    return life


def stopped_while_joining_again() -> ClusterBench:
    life = training()
    life.beat(epoch=2)
    life.say(StopWanted("enough"))
    return life


def pulled_to_the_end() -> ClusterBench:
    life = pulling()
    life.pulled()
    life.run_ends()
    return life


def pushes_answered() -> list[ClusterBench]:
    made = []
    answers = [
        BeginPushReply(Stale(StaleKind.FENCE, "stale")),
        BeginPushReply(PushId(session_config().cluster_id, Incarnation(1, 1), 77)),
    ]
    for answer in answers:
        life = beginning()
        life.answer(BeginPushRequest, answer)
        made.append(life)
    calls = ((beginning, BeginPushRequest, BeginPushReply), (finishing, FinishPushRequest, FinishPushReply))
    for make, kind, reply in calls:
        for verdict in (VerdictKind.APPLIED, VerdictKind.ABORTED):
            life = make()
            life.answer(kind, reply(life.verdict(verdict)))
            made.append(life)
        for code in (RefusalCode.RANGES, RefusalCode.SEQ):
            life = make()
            life.refuse(kind, code)
            made.append(life)
    for make in (beginning, transferring):
        life = make()
        life.run_ends()
        made.append(life)
    life = beginning()
    life.say(Failed(life.ticket()[0], "lost"))
    made.append(life)
    life = finishing()
    life.answer(FinishPushRequest, FinishPushReply(Busy(0.2, "not all")))
    made.append(life)
    life = finishing()
    life.refuse(FinishPushRequest, RefusalCode.DIGEST)
    made.append(life)
    life = awaiting()
    life.decide(VerdictKind.ABORTED)
    made.append(life)
    return made


def seeds() -> list[ClusterBench]:
    def aborted_at_begin(life: ClusterBench) -> None:
        life.answer(BeginPushRequest, BeginPushReply(life.verdict(VerdictKind.ABORTED)))

    def aborted_at_finish(life: ClusterBench) -> None:
        life.sent(life.ticket())
        life.answer(FinishPushRequest, FinishPushReply(life.verdict(VerdictKind.ABORTED)))

    def aborted_in_the_round(life: ClusterBench) -> None:
        life.sent(life.ticket())
        life.admitted()
        life.decide(VerdictKind.ABORTED)

    return [seeding(aborted_at_begin), seeding(aborted_at_finish), seeding(aborted_in_the_round)]


def donations() -> list[ClusterBench]:
    """A donation comes to nothing in each of the phases of a push, whatever it interrupted."""

    def at_begin(life: ClusterBench, push: PushId) -> None:
        life.answer(BeginPushRequest, BeginPushReply(life.verdict(VerdictKind.ABORTED, push)))

    def at_finish(life: ClusterBench, push: PushId) -> None:
        life.sent(life.ticket())
        life.answer(FinishPushRequest, FinishPushReply(life.verdict(VerdictKind.ABORTED, push)))

    def in_the_round(life: ClusterBench, push: PushId) -> None:
        life.sent(life.ticket())
        life.admitted()
        life.decide(VerdictKind.ABORTED)

    made = []
    for make in (training, awaiting, pulling):
        for end in (at_begin, at_finish, in_the_round):
            life = make()
            end(life, life.donate())
            made.append(life)
    return made


def arrows_of(life: ClusterBench) -> set[Arrow]:
    moves = [_MOVE.search(line.text) for line in life.session.shared.story.lines()]
    return {(SessionPhase(m[1]), m[3].strip(), SessionPhase(m[2])) for m in moves if m}


def test_every_arrow_is_taken_and_no_other() -> None:
    taken = set().union(*map(arrows_of, lives()))
    assert taken == set(SESSION_TABLE.arrows())


def test_an_arrow_that_is_not_there_raises_with_the_story() -> None:
    life = training()
    with pytest.raises(LocalProtocolError, match="TRAINING to LEFT upon left"):
        life.session.shared.move("left", SessionPhase.LEFT)
    assert life.phase is SessionPhase.TRAINING


def test_every_phase_can_be_left() -> None:
    for phase in SessionPhase:
        if phase is not SessionPhase.LEFT:
            assert any(start is phase for start, _, _ in SESSION_TABLE.arrows())


def test_versions_of_another_life_do_not_confuse_a_new_process() -> None:
    """A new process under an old name: the verdict of its predecessor says nothing about its parameters."""
    for kind in VerdictKind:
        life = ClusterBench(session_config(data_plan=LEASED))
        life.published = Version(1, 8)
        life.say(Started())
        life.join(life.verdict(kind, PushId(session_config().cluster_id, Incarnation(1, 7), 3)))
        assert life.asked(BeginPullRequest)
        life.pulled()
        assert life.phase is SessionPhase.TRAINING
