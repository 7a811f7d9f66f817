"""Planted bugs that only damage on the wire, or several ranks, bring to light: the simulator finds them."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from support.mutants import Mutant, planted

from dips.lab.sim.seed_run import SeedRun

SEEDS = 150
"""Damage must fall on a pull; without the mutants these seeds are clean (test_sim_seeds.py)."""

NO_DIGEST = Mutant(
    "the digest of a pulled share is not compared",
    "core.net.transfer:PullTransfer._verify",
    "if digest == self._promised.get(slave):",
    "if digest:",
)
DAMAGE_COUNTS = Mutant(
    "a damaged chunk counts as landed",
    "core.net.transfer:PullTransfer.damaged",
    "put_last(self.columns, lane, take_answer(self.columns, slot, now_s, 0))",
    """if take_landed(self.columns, slot, 0, now_s, 0):
                self._verify(lane)""",
)


def is_noticed(words: str, *mutants: Mutant, pushers: tuple[int, ...] = ()) -> None:
    """In these words, in the first seed in which anything is; the same seed is clean without the bugs."""
    with ExitStack() as stack:
        for mutant in mutants:
            stack.enter_context(planted(mutant))
        found = ((seed, SeedRun(seed, pushers=pushers).run().violations) for seed in range(SEEDS))
        seed, (sentence, *_) = next((seed, violations) for seed, violations in found if violations)
    assert words in sentence, f"seed {seed}: {sentence}"
    assert SeedRun(seed, pushers=pushers).run().violations == ()


def test_a_torn_pull_is_noticed_when_nothing_checks_what_arrives() -> None:
    is_noticed("(I3)", NO_DIGEST, DAMAGE_COUNTS)


WHOLE_SHARE = Mutant(
    "averaged buffers move the whole way in a partial round",
    "master.state.rounds:Rounds._prepare",
    "averaged_share=rho",
    "averaged_share=1.0",
)


def test_a_wrong_share_of_averaged_buffers_is_noticed() -> None:
    is_noticed("than what was merged", WHOLE_SHARE)


OF_RANKS: dict[str, tuple[str, *tuple[Mutant, ...]]] = {
    "two owners": (
        "both own",
        Mutant(
            "two owners",
            "worker.parallel.ownership:shares_of_ranks",
            "Share(edges[firsts[owners == rank]], edges[lasts[owners == rank]])",
            "Share(edges[firsts[owners >= rank]], edges[lasts[owners >= rank]])",
        ),
    ),
    "staged after one rank's bytes": (
        "has not landed",
        Mutant(
            "half of the chunks are all",
            "slave.state.staging:note_landed",
            "of.counts[N_LANDED] == len(of.landed)",
            "of.counts[N_LANDED] == (len(of.landed) + 1) // 2",
        ),
        Mutant(
            "a digest of what has landed",
            "slave.state.staging:Staging.digest",
            "if not self.complete:",
            "if False:",
        ),
    ),
    "one rank's end is the cluster's": (
        "does not publish",
        Mutant(
            "one end is enough",
            "worker.parallel.meetings:combined",
            "if len({end.rank for end in ends}) < n_ranks:",
            "if not ends:",
        ),
    ),
}


@pytest.mark.parametrize("name", OF_RANKS)
def test_a_bug_of_several_ranks_is_noticed(name: str) -> None:
    is_noticed(*OF_RANKS[name], pushers=(2,))
