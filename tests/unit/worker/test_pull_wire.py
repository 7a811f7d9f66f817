"""Pulls as differences: what a cluster asks for and does when they cannot be had."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.cluster_bench import DIGESTS, PLACEMENT, SETTINGS, ClusterBench, session_config

from dips.core.ids import Version
from dips.core.messages import BeginPullReply, BeginPullRequest, PullGrant, VerdictKind
from dips.core.wire import Codec
from dips.worker.state.effects import Failed, Record
from dips.worker.state.shared import SessionPhase


def life_of(pull_wire: str = "int8", **config: Any) -> ClusterBench:
    """A cluster that has installed version 5, and whose push was applied to version 6."""
    life = ClusterBench(session_config(**config), replace(SETTINGS, pull_wire=pull_wire))
    life.begin()
    life.awaiting()
    life.decide(VerdictKind.APPLIED)
    return life


BASE = Version(1, 5)


def granted(life: ClusterBench, wire: Codec = Codec.INT8, base: Version | None = BASE) -> PullGrant:
    """BeginPull is answered so; the command that fetches the version."""
    assert life.published is not None
    grant = PullGrant(
        life.published, life.fence, 7, PLACEMENT, (0, 1, 2, 3), DIGESTS, life.tokens, life.local_steps, None, 1 << 20,
        life.epoch, "run", wire, base,
    )  # fmt: skip
    life.answer(BeginPullRequest, BeginPullReply(grant))
    return grant


def installed(life: ClusterBench) -> list[str]:
    """How each version that was installed had been fetched."""
    return [str(e.fields["wire"]) for e in life.every if isinstance(e, Record) and e.kind == "installed"]


def test_the_first_pull_asks_for_parameters_and_the_next_names_the_base() -> None:
    life = life_of()
    assert installed(life) == ["F32"]
    assert life.asked(BeginPullRequest).base == Version(1, 5)
    granted(life)
    life.pull_ends()
    assert installed(life) == ["F32", "INT8"]


@pytest.mark.parametrize(("pull_wire", "config"), [("float32", {}), ("int8", {"takes_differences": False})])
def test_where_none_are_to_be_had_no_base_is_named(pull_wire: str, config: dict[str, Any]) -> None:
    assert life_of(pull_wire, **config).asked(BeginPullRequest).base is None


def test_differences_that_are_gone_are_followed_by_parameters_at_once_and_then_by_differences_again() -> None:
    life = life_of()
    granted(life)
    life.say(Failed(life.job(PullGrant)[0], "the differences are gone", base_gone=True))
    life.pass_s(0.0)
    assert life.asked(BeginPullRequest).base is None
    granted(life, Codec.F32, None)
    life.pull_ends()
    assert installed(life) == ["F32", "F32"]
    life.awaiting()
    life.decide(VerdictKind.APPLIED)
    assert life.asked(BeginPullRequest).base == Version(1, 6)


def test_a_pull_that_fails_otherwise_asks_for_differences_again() -> None:
    life = life_of()
    granted(life)
    life.say(Failed(life.job(PullGrant)[0], "the slave is silent"))
    life.pass_s(1.0)
    assert life.asked(BeginPullRequest).base == Version(1, 5)


@pytest.mark.parametrize("base", [None, Version(1, 4), Version(1, 6), Version(2, 5)])
def test_differences_to_what_is_not_here_end_the_session(base: Version | None) -> None:
    life = life_of()
    granted(life, base=base)
    assert life.phase is SessionPhase.LEAVING


def test_a_master_of_an_earlier_release_says_nothing_and_means_float32() -> None:
    life = life_of()
    granted(life, Codec.NONE, None)
    life.pull_ends()
    assert installed(life) == ["F32", "F32"]
