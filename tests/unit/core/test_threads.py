"""Parts of an array shared by threads: every part once, results in order, errors kept."""

from __future__ import annotations

import threading

import pytest

from dips.core.threads import MOST_THREADS, Threads, split, usable_processors

WAIT_S = 60.0


@pytest.mark.parametrize("n_threads", [1, 2, 5])
@pytest.mark.parametrize("n_parts", [0, 1, 2, 37])
def test_every_part_is_done_once_and_results_keep_their_order(n_threads: int, n_parts: int) -> None:
    threads, seen, lock = Threads(n_threads), [], threading.Lock()

    def work(part: int) -> int:
        with lock:
            seen.append(part)
        return part * part

    assert threads.run(work, range(n_parts)) == [part * part for part in range(n_parts)]
    assert sorted(seen) == list(range(n_parts))
    threads.close()


def test_parts_run_at_the_same_time() -> None:
    """Each of three parts waits for the other two."""
    threads, together = Threads(3), threading.Barrier(3)
    names = threads.run(lambda part: (together.wait(WAIT_S), threading.get_ident())[1], range(3))
    assert len(set(names)) == 3
    threads.close()


@pytest.mark.parametrize("bad", range(4))
def test_what_a_part_raises_comes_out_and_the_threads_live_on(bad: int) -> None:
    threads = Threads(2)

    def work(part: int) -> int:
        if part == bad:
            raise ValueError(f"part {part}")
        return part

    with pytest.raises(ValueError, match=f"part {bad}"):
        threads.run(work, range(4))
    assert threads.run(lambda part: part, range(4)) == [0, 1, 2, 3]
    threads.close()


def test_by_default_there_is_a_thread_for_each_usable_processor() -> None:
    threads = Threads()
    assert threads.n == min(usable_processors(), MOST_THREADS) >= 1
    threads.close()


@pytest.mark.parametrize(("n", "parts"), [(0, 3), (1, 3), (7, 3), (9, 3), (5, 1)])
def test_split_covers_everything_once_in_nearly_equal_ranges(n: int, parts: int) -> None:
    ranges = split(n, parts)
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(n))
    assert len(ranges) == min(n, parts)
    assert {stop - start for start, stop in ranges} <= {n // parts, n // parts + 1}
