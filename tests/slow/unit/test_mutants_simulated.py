"""Planted bugs that only damage on the wire, or several ranks, bring to light: the simulator finds them."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from search.bounds import Bounds
from support.mutants import Mutant, planted

from dips.lab.sim.seed_run import SeedRun

SEEDS = 150
"""Damage must fall on a pull; without the mutants these seeds are clean (test_sim_seeds.py)."""

NO_DIGEST = Mutant(
    "the digest of a pulled share is not compared",
    "core.net.transfer:PullTransfer._verify",
    "if digest == self._promised.get(slave):",
    "if digest:",
    ("I3",),
    Bounds(),
)
DAMAGE_COUNTS = Mutant(
    "a damaged chunk counts as landed",
    "core.net.transfer:PullTransfer.damaged",
    "put_last(self.columns, lane, take_answer(self.columns, slot, now_s, 0))",
    """if take_landed(self.columns, slot, 0, now_s, 0):
                self._verify(lane)""",
    ("I3",),
    Bounds(),
)


def _first_violation(pushers: tuple[int, ...] = ()) -> tuple[int, str] | None:
    for seed in range(SEEDS):
        violations = SeedRun(seed, pushers=pushers).run().violations
        if violations:
            return seed, violations[0]
    return None


def test_a_torn_pull_is_noticed_when_nothing_checks_what_arrives() -> None:
    with planted(NO_DIGEST), planted(DAMAGE_COUNTS):
        found = _first_violation()
    assert found is not None
    seed, sentence = found
    print(f"seed {seed}: {sentence}")
    assert sentence.endswith("(I3)"), sentence
    assert SeedRun(seed).run().violations == (), "the same seed is clean without the bugs"


WHOLE_SHARE = Mutant(
    "averaged buffers move the whole way in a partial round",
    "master.state.rounds:Rounds._prepare",
    "averaged_share=rho",
    "averaged_share=1.0",
    ("I18",),
    Bounds(),
)


def test_a_wrong_share_of_averaged_buffers_is_noticed() -> None:
    with planted(WHOLE_SHARE):
        found = _first_violation()
    assert found is not None
    seed, sentence = found
    assert sentence.endswith("than what was merged"), sentence
    assert SeedRun(seed).run().violations == (), "the same seed is clean without the bug"


def bug(name: str, target: str, old: str, new: str) -> Mutant:
    return Mutant(name, target, old, new, (), Bounds())


OF_RANKS = {
    "two owners": (
        (
            bug(
                "two owners",
                "worker.parallel.ownership:shares_of_ranks",
                "Share(edges[firsts[owners == rank]], edges[lasts[owners == rank]])",
                "Share(edges[firsts[owners >= rank]], edges[lasts[owners >= rank]])",
            ),
        ),
        "both own",
    ),
    "staged after one rank's bytes": (
        (
            bug(
                "half of the chunks are all",
                "slave.state.staging:note_landed",
                "of.counts[N_LANDED] == len(of.landed)",
                "of.counts[N_LANDED] == (len(of.landed) + 1) // 2",
            ),
            bug(
                "a digest of what has landed",
                "slave.state.staging:Staging.digest",
                "if not self.complete:",
                "if False:",
            ),
        ),
        "has not landed",
    ),
    "one rank's end is the cluster's": (
        (
            bug(
                "one end is enough",
                "worker.parallel.meetings:combined",
                "if len({end.rank for end in ends}) < n_ranks:",
                "if not ends:",
            ),
        ),
        "does not publish",
    ),
}


@pytest.mark.parametrize("name", OF_RANKS)
def test_a_bug_of_several_ranks_is_noticed(name: str) -> None:
    mutants, words = OF_RANKS[name]
    with ExitStack() as stack:
        for mutant in mutants:
            stack.enter_context(planted(mutant))
        found = _first_violation(pushers=(2,))
    assert found is not None
    seed, sentence = found
    assert words in sentence, sentence
    assert SeedRun(seed, pushers=(2,)).run().violations == (), "the same seed is clean without the bug"
