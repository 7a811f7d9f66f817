"""Made-up records of compared runs and throughputs, for tests of tables and pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping

from dips.lab.compare.record import CurvePoint, PushFact, RoundFact, RunRecord
from dips.lab.compare.setup import ComparisonSetup
from dips.lab.compare.speed import Throughput, ThroughputComparison

TOKENS = 12_000


def push(
    cluster: str, n: int, *, excluded: bool = False, bad: bool = False, staleness: int = 0, norm: float | None = 1.0
) -> PushFact:
    verdict, reason = ("EXCLUDED", "score") if excluded else ("APPLIED", "")
    return PushFact(cluster, f"{cluster}/1.1#{n}", verdict, reason, 1000, staleness, norm, 0.5, 0.4, bad)


def committed(n: int, *pushes: PushFact, kappa: float = 1.0) -> RoundFact:
    return RoundFact(f"1:{n}", 10.0 * n, kappa, 0.5, 1.0, pushes)


def void(n: int, *pushes: PushFact) -> RoundFact:
    return RoundFact(f"1:{n}", 10.0 * n, None, None, None, pushes)


def record(
    method: str = "dips", seed: int = 1, loss: float | None = 2.0, virtual_s: float = 100.0, **given: object
) -> RunRecord:
    rounds = (
        committed(1, push("a", 1), push("b", 1, staleness=1)),
        committed(2, push("a", 2, staleness=2), kappa=0.25),
    )
    end = loss if loss is not None else math.log(256)
    curve = tuple(CurvePoint(f"1:{n}", TOKENS * n // 4, virtual_s * n / 4, 5.5 + (end - 5.5) * n / 4) for n in range(5))
    values: dict[str, object] = {
        "method": method,
        "seed": seed,
        "inject": "",
        "tokens": TOKENS,
        "ended": "finished" if loss is not None else "diverged",
        "loss": loss,
        "virtual_s": virtual_s,
        "rounds": 2,
        "voids": 0,
        "curve": curve,
        "judged": rounds if method != "dp" else (),
        "cluster_tokens": {"a": 8000, "b": 4000},
        **given,
    }
    return RunRecord(**values)  # type: ignore[arg-type]


SHARES = {
    "dp": 0.4,
    "ring-diloco": 0.8,
    "diloco": 0.78,
    "ring-async": 0.96,
    "safe": 0.88,
    "dynamic": 0.95,
    "dynamic-push": 0.97,
    "dips": 0.99,
}
"""Of an ideal of 1000 tokens/s."""


def speed_comparison(setup: ComparisonSetup, shares: Mapping[str, float] = SHARES) -> ThroughputComparison:
    made = [Throughput(name, 1000 * share, 1000.0) for name, share in shares.items()]
    return ThroughputComparison(setup, made[1], tuple(made[:4]), tuple(made[4:]))
