"""benchmarks/bench_transfer.py: which samples count, and what a row is compared with."""

from __future__ import annotations

from bench_transfer import Sample, counts_quiet, summaries
from quiet import Gate

GATE = Gate(wait_s=0.0, limit=0.3)
GB = 10**9


def sample(wall_s: float, foreign: float = 0.0, cpu_s: float = 1.0) -> Sample:
    return Sample(wall_s, cpu_s, 2 * cpu_s, foreign)


def test_samples_with_much_other_work_are_left_out() -> None:
    samples = {
        "tcp": [sample(1.0), sample(9.0, 0.8), sample(1.0)],
        "push": [sample(2.0), sample(2.0), sample(8.0, 1.0)],
    }
    results = summaries(samples, GB, GATE)
    assert (results["tcp"].gbytes_per_s, results["push"].gbytes_per_s) == (1.0, 0.5)
    assert (results["push"].samples, results["push"].quiet, results["push"].spread) == (3, 2, 0.0)
    assert results["push"].of_tcp == 0.5


def test_all_samples_count_where_a_row_would_keep_less_than_half() -> None:
    """Else a row of a quiet moment would be compared with one of a busy hour."""
    samples = {
        "tcp": [sample(1.0), sample(1.0), sample(1.0)],
        "push": [sample(2.0), sample(4.0, 1.0), sample(6.0, 1.0)],
    }
    assert not counts_quiet(samples, GATE)
    assert summaries(samples, GB, GATE)["push"].gbytes_per_s == 0.25


def test_a_pair_counts_if_both_of_it_are_quiet() -> None:
    samples = {
        "tcp": [sample(1.0), sample(1.0), sample(1.0, 0.9)],
        "push": [sample(2.0), sample(9.0, 0.9), sample(5.0)],
    }
    assert summaries(samples, GB, GATE)["push"].paired == 0.5


def test_a_push_with_the_copy_is_compared_with_tcp_with_the_copy() -> None:
    samples = {
        "tcp": [sample(1.0)], "tcp_pinned": [sample(1.25, cpu_s=0.5)], "tcp_copy": [sample(2.0)],
        "tcp_copy_pinned": [sample(2.5, cpu_s=0.25)], "push": [sample(5.0)], "push_copy": [sample(5.0)],
    }  # fmt: skip
    results = summaries(samples, GB, GATE)
    copied, plain = results["push_copy"], results["push"]
    assert (copied.of_tcp, copied.of_tcp_pinned, copied.receiver_cpu_of_floor) == (0.4, 0.5, 4.0)
    assert (plain.of_tcp, plain.of_tcp_pinned, plain.receiver_cpu_of_floor) == (0.2, 0.25, 2.0)


def test_without_two_processors_the_floor_is_where_the_system_puts_it() -> None:
    found = summaries({"tcp": [sample(1.0, cpu_s=0.5)], "push": [sample(2.0)]}, GB, GATE)["push"]
    assert (found.of_tcp, found.of_tcp_pinned, found.receiver_cpu_of_floor) == (0.5, None, 2.0)
