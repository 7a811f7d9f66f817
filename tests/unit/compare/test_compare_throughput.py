"""Throughput: the baselines' formulas against the paper's ratios. (Our methods: tests/slow/unit/test_throughput.py.)

The shipped set-ups `real` and `weak-scaling` have step times that were fitted to the paper's ratios; what is tested
here is that the fit is one.
"""

from __future__ import annotations

import pytest

from dips.core.errors import ConfigError
from dips.lab.compare import speed
from dips.lab.compare.methods import find_method
from dips.lab.compare.record import PushFact, RoundFact, RunRecord
from dips.lab.compare.setup import load_setup


@pytest.mark.parametrize(
    ("name", "gbps", "stated"), [("emulated", 10, 2.03), ("emulated", 1, 10.35), ("real", 10, 1.15), ("real", 1, 2.51)]
)
def test_fitted_steps_give_the_paper_s_gain_of_diloco_over_data_parallel(name: str, gbps: float, stated: float) -> None:
    setup = speed.with_last_link(load_setup(name), gbps * 1e9)
    assert speed.ring_diloco(setup).gain_over(speed.data_parallel(setup)) == pytest.approx(stated, rel=0.03)


def test_fitted_speeds_give_the_paper_s_weak_scaling_of_synchronous_diloco() -> None:
    """Fastest with three clusters (paper 5.2), and 5.74 times behind what seven could do."""
    setup = load_setup("weak-scaling")
    parts = [speed.first_clusters(setup, n) for n in range(1, 8)]
    rates = [speed.ring_diloco(part).tokens_per_s for part in parts]
    assert max(range(7), key=rates.__getitem__) == 2
    assert setup.ideal_tokens_per_s / rates[-1] == pytest.approx(5.74, rel=0.02)
    assert speed.ring_async(setup).gain_over(speed.ring_diloco(setup)) == pytest.approx(5.6, abs=0.1)


def test_baselines_of_one_cluster_and_clusters_that_are_not_there() -> None:
    alone = speed.first_clusters(load_setup("weak-scaling"), 1)
    for baseline in (speed.data_parallel(alone), speed.ring_diloco(alone), speed.ring_async(alone)):
        assert baseline.share_of_ideal == pytest.approx(1.0)
    for n in (0, 8):
        with pytest.raises(ConfigError, match=f"{n} of them cannot be used"):
            speed.first_clusters(load_setup("weak-scaling"), n)


def test_last_links_and_rates() -> None:
    """a: 100 tokens in 10 s; b: 50 in 20 s. What was excluded, or came before a quarter of the time, counts nothing."""
    setup = speed.with_last_link(load_setup("emulated"), 2e9)
    assert setup.up_bits_per_s == setup.down_bits_per_s == (10e9, 10e9, 10e9, 2e9)
    events = [(20.0, "a", 900), (30.0, "a", 7), (40.0, "a", 100), (50.0, "a", 100), (32.0, "b", 7), (52.0, "b", 50)]
    rounds = [round_of(at_s, cluster, tokens, "APPLIED") for at_s, cluster, tokens in events]
    rounds.append(round_of(60.0, "a", 999, "EXCLUDED"))
    record = RunRecord("dips", 1, "", 0, "finished", None, 100.0, 0, 0, judged=tuple(rounds))
    rates = {name: speed.rate_of(pushes) for name, pushes in speed.steady_pushes(record).items()}
    assert rates == {"a": 100 / 10, "b": 50 / 20}


def round_of(at_s: float, cluster: str, tokens: int, verdict: str) -> RoundFact:
    push = PushFact(cluster, "p", verdict, "", tokens, 0, None, None, None, False)
    return RoundFact("1:1", at_s, 1.0, 1.0, 1.0, (push,))


def test_too_few_rounds_and_methods_without_servers_are_refused() -> None:
    with pytest.raises(ConfigError, match="give at least 6"):
        speed.measure(load_setup("small"), find_method("dips"), rounds=5)
    with pytest.raises(ConfigError, match="has no servers"):
        speed.measure(load_setup("small"), find_method("dp"))


def test_what_gains_are_compared_with() -> None:
    found = speed.compare_speeds(load_setup("emulated"), [find_method("dynamic")], rounds=6)
    both = [found.of("diloco"), found.of("ring-diloco")]
    assert found.synchronous == found.of("ring-diloco") == max(both, key=lambda item: item.tokens_per_s)
    assert [item.method for item in found.baselines] == ["dp", "ring-diloco", "diloco", "ring-async"]
    fast, slow = speed.Throughput("x", 300.0, 400.0), speed.Throughput("y", 100.0, 400.0)
    assert (fast.share_of_ideal, fast.gain_over(slow)) == (0.75, 3.0)
