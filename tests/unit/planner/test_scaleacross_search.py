"""ScaleAcross Explorer's search: what it tries, and what it says about its choice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.scaleacross import best_of_all, read, small

from dips.core.errors import ConfigError
from dips.planner.scaleacross import search
from dips.planner.scaleacross.iteration import Outermost, Sharding, Split
from dips.planner.scaleacross.topology import Present


def test_a_small_problem_has_the_best_of_all(tmp_path: Path) -> None:
    topology = small(tmp_path, layers=4)
    found = search.explore(topology, links=True)
    none = topology.search.model_copy(update={"variations": 0})
    assert search.explore(replace(topology, search=none), links=True).n_divisions < found.n_divisions
    assert found.best[0].links_s == pytest.approx(best_of_all(topology, True))
    assert found.n_cases >= found.n_played > 0
    # A bound that is not near would let all cases be played.
    assert all(search.lower_bound_s(topology, choice.case) > 0.7 * choice.links_s for choice in found.best)


def test_what_is_tried(tmp_path: Path) -> None:
    """Microbatches together: as many as stages, twice as many, all; each placement with both schedules."""
    assert (search.togethers(2, 16), search.togethers(8, 16), search.togethers(8, 4)) == ([2, 4, 16], [8, 16], [4])
    assert (search.even(10, 4), search.even(9, 2), search.even(11, 4)) == ([2, 3, 3, 2], [5, 4], [3, 3, 3, 2])
    topology = small(tmp_path, layers=4)
    split = Split(4, 1, 1, 2, 2, 2)
    cases = list(search.cases_of(topology, split))
    assert {case.kind[:2] for case in cases} == {
        (Outermost.DP, Sharding.FSDP), (Outermost.DP, Sharding.HSDP), (Outermost.PP, Sharding.FSDP),
    }  # fmt: skip
    assert sorted({(case.chunks, case.together) for case in cases}) == [(1, 2), (1, 4), (2, 2), (2, 4)]
    assert len(cases) == 3 * 2 * 4
    assert search.counts_of_chunks(17, 2) == list(range(1, 9))
    assert search.counts_of_chunks(36, 2) == [1, 2, 3, 4, 5, 6, 9, 18], "18 layers in chunks of 1, 2, 3, ... layers"
    found = list(search.splits(topology))
    assert len(found) == len(set(found)) == 23
    assert {one.context for one in found} == {1, 2, 4}
    for one in found:
        assert one.tensor * one.context * one.pipeline * one.data == 16
        assert 16 % (one.data * one.microbatch_sequences) == 0


def test_divisions_that_are_tried() -> None:
    """The even one, a lighter end, and random ones; then up to three layers move."""
    assert search.valid(np.array([[1, 3], [0, 4], [1, 4], [1, 3], [2, 2]]), 3.0).tolist() == [[1, 3], [2, 2]]
    dice = np.random.default_rng(1)
    found = search.sampled(40, 4, 3.0, 20, dice)
    assert {(10, 10, 10, 10), (10, 11, 10, 9), (9, 10, 11, 10)} < set(map(tuple, found.tolist()))
    assert (found.sum(axis=1) == 40).all()
    assert 10 < len(found) <= 23
    base = np.array([[5, 5, 5, 5]])
    other = search.varied(base, 3.0, 200, dice)
    moved = np.abs(other - base).sum(axis=1) // 2
    assert (set(other.sum(axis=1)), set(moved)) == ({20}, {0, 1, 2, 3})
    assert (other < 5).any(axis=0).all()
    assert (other > 5).any(axis=0).all()
    assert len(search.varied(np.array([[7]]), 3.0, 9, dice)) == len(search.varied(base, 3.0, 0, dice)) == 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data": 4}, "tensor x context x pipeline x data = 32, there are 16 accelerators: correct it"),
        ({"microbatch_sequences": 16}, "16 sequences are no whole microbatches of 16 for each of 2 replicas"),
        ({"chunk_layers": 1}, "10 chunks for 9 layers: give larger chunks or fewer stages"),
    ],
)
def test_the_configuration_in_use(tmp_path: Path, changes: dict[str, int], sentence: str) -> None:
    given = {"tensor": 4, "pipeline": 2, "data": 2, "microbatch_sequences": 1, "chunk_layers": 2}
    topology = small(tmp_path)
    case, division = search.present_case(replace(topology, present=Present(**given, source="a test")))
    assert (case.split, case.n_chunks, division) == (Split(4, 1, 1, 2, 2, 1), 6, [1, 2, 2, 2, 1, 1])
    with pytest.raises(ConfigError, match=sentence):
        search.present_case(replace(topology, present=Present(**(given | changes), source="a test")))


def test_one_building_and_too_little_memory(tmp_path: Path) -> None:
    topology = small(tmp_path)
    zone = topology.zones[0].model_copy(update={"accelerators": 16})
    alone = replace(topology, buildings=topology.buildings[:1], routes=(), zones=(zone,))
    assert {choice.case.kind[:2] for choice in search.explore(alone).best} == {(Outermost.DP, Sharding.FSDP)}
    with pytest.raises(ConfigError, match=r"no configuration of .* fits in memory_gib = 1 and in the buildings"):
        search.explore(small(tmp_path, memory_gib=1))


def test_degrees_are_the_default_ones(tmp_path: Path) -> None:
    """TP is the accelerators of a server; a part of a sequence has 2,048 tokens at least."""
    found = list(search.splits(read(tmp_path)))
    assert {split.tensor for split in found} == {8}
    assert {split.context for split in found} == {1, 2, 4}
    assert {split.expert for split in found} == {1}
    assert Split(8, 1, 1, 2, 4, 2) in found


def test_the_bandwidth_at_which_another_is_as_fast(tmp_path: Path) -> None:
    """Narrow ways between buildings suit one placement, wide ones the other."""
    topology = small(tmp_path, oversubscription=200)
    best, *others = search.explore(topology, links=True).best
    for other in others:
        found = search.catches_up(topology, best, other, links=True)
        if found is None:
            continue
        factor, more = found
        changed = topology.with_bandwidth(factor if more else 1 / factor)
        a, b = (search.choice_of(changed, one.case, one.division).links_s for one in (best, other))
        assert b <= a
    slowest = max(others, key=lambda choice: choice.links_s)
    assert search.catches_up(topology, slowest, best, links=True) == (search.FACTORS[0], True)
