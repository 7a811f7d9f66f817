"""Transfers over slow, unequal and far links: real processes in network namespaces, shaped by the kernel.

    python benchmarks/bench_links.py [--mbit N] [--delay-ms D] [--mib N] [--repeats R] [--parts far,slow,narrow,mixed]
                                     [--quick] [--json]

far    one cluster and one slave, 25 ms each way: a push and a pull, and one TCP stream that carries as many bytes over
       the same link in the same run.
slow   four clusters, one with a link ten times slower, four slaves: each fast transfer alone, and all at once: as
       scheduled, as a free-for-all (everybody to all slaves at once, equal windows), in the naive order (everybody to
       one slave after the other).
narrow four clusters with equal links and one slave, whose link all share: when they end, as scheduled and free-for-all.
mixed  the paper's Figures 2a, 9 and 11: the same four clusters with the fourth link at 1, 1/2, 1/5 and 1/10 of the
       others', push and pull against a ring all-reduce among the clusters, which is what systems without servers do.

Rates are what this machine can shape, so only ratios say something. Each transfer opens its own connections. Nothing
here judges a number. Needs root, for the namespaces; without, it says so and exits with code 2.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from flows.cast import Cast
from flows.simulated import TransferMethod
from shaped import Cable, NotPossible, ShapedNet

from dips.master.state.schedule import Way

MIB = 1 << 20
FRAME_BYTES, FRAME_PAYLOAD_BYTES = 1514, 1448
"""Ethernet with an MTU of 1500; TCP with time stamps. The rate counts whole frames."""

SLOW_PART = 0.1
MIXED_PARTS = (1.0, 0.5, 0.2, 0.1)
FAST = ("a", "b", "c")
FOURTH = "d"
N_SLAVES = 4
LAN_DELAY_MS = 1.0
GAPS = (0.0, 0.16, 0.33, 0.5)
"""How much slower than the first each cluster computes: the paper's second configuration (Figure 9b)."""

COMPUTE_FACTOR = 4.0
"""The fastest cluster's inner steps of a round take so many times as long as its push and pull when all links are
equal; the paper does not say, and the share of communication grows as this falls."""


@dataclass(frozen=True)
class Options:
    """Rates in bit/s."""

    bits_per_s: float
    far_bits_per_s: float
    delay_ms: float
    n_bytes: int
    far_bytes: int
    repeats: int
    congestion: str


@dataclass(frozen=True)
class Row:
    """seconds: by cluster, medians of the repeats. spread: the largest (slowest - fastest) / median among them."""

    part: str
    what: str
    seconds: Mapping[str, float]
    spread: float
    ratios: Mapping[str, float]


# ---- the cast ----


@contextmanager
def stage(
    cables: Mapping[str, Cable], clusters: Sequence[str], slaves: Sequence[str], n_bytes: int, options: Options
) -> Iterator[tuple[ShapedNet, Cast]]:
    with ShapedNet(cables, f"dips{os.getpid()}", options.congestion) as net:
        cast = Cast(net, clusters, slaves, n_bytes)
        try:
            yield net, cast
        finally:
            cast.close()


def _medians(runs: Sequence[Mapping[str, float]]) -> tuple[dict[str, float], float]:
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    spans = [(max(run[n] for run in runs) - min(run[n] for run in runs)) / medians[n] for n in medians]
    return medians, max(spans)


# ---- parts ----


def far(options: Options) -> list[Row]:
    """One cluster over a long way."""
    rate = options.far_bits_per_s
    cables = {"a": Cable(rate, rate, options.delay_ms), "s0": Cable(4 * rate, 4 * rate)}
    least_s = 8 * options.far_bytes / rate
    runs: dict[str, list[Mapping[str, float]]] = {"tcp": [], "push": [], "pull": []}
    with stage(cables, ["a"], ["s0"], options.far_bytes, options) as (_, cast):
        for _ in range(options.repeats):
            runs["tcp"].append({"a": cast.tcp("a", "s0", options.far_bytes)})
            for way in Way:
                runs[way.value].append(cast.race(["a"], way, TransferMethod.SCHEDULED))
    found = {what: _medians(of) for what, of in runs.items()}
    tcp_s = found["tcp"][0]["a"]
    rows = []
    for what, (seconds, spread) in found.items():
        payload = least_s / seconds["a"]
        used = payload * FRAME_BYTES / FRAME_PAYLOAD_BYTES
        ratios = {"of_the_link": used, "payload_of_the_link": payload, "to_tcp": tcp_s / seconds["a"]}
        rows.append(Row("far", what, seconds, spread, ratios))
    return rows


def _cables(options: Options, fourth_part: float) -> dict[str, Cable]:
    rate = options.bits_per_s
    fourth = Cable(fourth_part * rate, fourth_part * rate, LAN_DELAY_MS)
    clusters = {**dict.fromkeys(FAST, Cable(rate, rate, LAN_DELAY_MS)), FOURTH: fourth}
    return clusters | {f"s{i}": Cable(rate, rate) for i in range(N_SLAVES)}


def slow(options: Options) -> list[Row]:
    """One slow link among four: the fast ones' times over what they take alone."""
    slaves = [f"s{i}" for i in range(N_SLAVES)]
    clusters = [*FAST, FOURTH]
    rows = []
    with stage(_cables(options, SLOW_PART), clusters, slaves, options.n_bytes, options) as (_, cast):
        for way in Way:
            alone_runs: list[dict[str, float]] = []
            together: dict[TransferMethod, list[dict[str, float]]] = {method: [] for method in TransferMethod}
            for _ in range(options.repeats):
                alone_runs.append({name: cast.race([name], way, TransferMethod.SCHEDULED)[name] for name in FAST})
                for method in TransferMethod:
                    together[method].append(cast.race(clusters, way, method))
            alone, spread = _medians(alone_runs)
            rows.append(Row("slow", f"{way.value} alone", alone, spread, {}))
            for method, runs in together.items():
                seconds, spread = _medians(runs)
                slowdowns = [seconds[name] / alone[name] for name in FAST]
                ratios = {"fast_mean": statistics.mean(slowdowns), "fast_max": max(slowdowns)}
                rows.append(Row("slow", f"{way.value} {method.value}", seconds, spread, ratios))
    return rows


def narrow(options: Options) -> list[Row]:
    """One slave's link shared by four: no one can end sooner than the sum allows, but three can end before the last."""
    clusters = [*FAST, FOURTH]
    cables = {name: cable for name, cable in _cables(options, 1.0).items() if name in (*clusters, "s0")}
    least_s = 8 * len(clusters) * options.n_bytes / options.bits_per_s
    rows = []
    with stage(cables, clusters, ["s0"], options.n_bytes, options) as (_, cast):
        for way in Way:
            for method in (TransferMethod.SCHEDULED, TransferMethod.FREE):
                runs = [cast.race(clusters, way, method) for _ in range(options.repeats)]
                seconds, spread = _medians(runs)
                # Clusters are alike, so who ends first may change from run to run: only mean and last say something.
                means, lasts = [statistics.mean(run.values()) for run in runs], [max(run.values()) for run in runs]
                ratios = {"mean": statistics.median(means) / least_s, "last": statistics.median(lasts) / least_s}
                rows.append(Row("narrow", f"{way.value} {method.value}", seconds, spread, ratios))
    return rows


def mixed(options: Options) -> list[Row]:
    """The paper's comparison with systems without servers, at four rates of the fourth link."""
    slaves = [f"s{i}" for i in range(N_SLAVES)]
    clusters = [*FAST, FOURTH]
    rows: list[Row] = []
    compute_s = 0.0
    with stage(_cables(options, 1.0), clusters, slaves, options.n_bytes, options) as (net, cast):
        for part in MIXED_PARTS:
            net.set_rate(FOURTH, _cables(options, part)[FOURTH])
            served, rings = [], []
            for _ in range(options.repeats):
                push = cast.race(clusters, Way.PUSH, TransferMethod.SCHEDULED)
                pull = cast.race(clusters, Way.PULL, TransferMethod.SCHEDULED)
                served.append({name: push[name] + pull[name] for name in clusters})
                rings.append(cast.ring())
            (ours, spread), (ring, ring_spread) = _medians(served), _medians(rings)
            compute_s = compute_s or COMPUTE_FACTOR * ours[FAST[0]]
            ratios = _paper(ours, ring, compute_s)
            rows.append(Row("mixed", f"push + pull, fourth link {part:g}", ours, spread, ratios))
            rows.append(Row("mixed", f"ring all-reduce, fourth link {part:g}", ring, ring_spread, {}))
    return rows


def _paper(ours: Mapping[str, float], ring: Mapping[str, float], compute_s: float) -> dict[str, float]:
    """Figure 2a: the mean time of a communication. Figures 9 and 11 follow from the measured times by arithmetic:
    throughput with timed stand-ins for inner steps, and communication summed over the rounds of one hour.
    """
    names = list(ours)
    step_s = {name: compute_s * (1 + gap) for name, gap in zip(names, GAPS, strict=True)}
    ring_s = max(ring.values())
    together = len(names) / (max(step_s.values()) + ring_s)
    alone = sum(1 / (step_s[name] + ring_s) for name in names)
    di_ps = sum(1 / (step_s[name] + ours[name]) for name in names)
    spent_ring = sum(ring_s / (step_s[name] + ring_s) for name in names)
    spent_ours = sum(ours[name] / (step_s[name] + ours[name]) for name in names)
    return {
        "figure_2a_ring_over_dips": ring_s / statistics.mean(ours.values()),
        "figure_9_over_sync": di_ps / together,
        "figure_9_over_async": di_ps / alone,
        "figure_11_async_over_dips": spent_ring / spent_ours,
    }


PARTS = {"far": far, "slow": slow, "narrow": narrow, "mixed": mixed}


# ---- the command ----


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=200.0, help="rate of a fast link; the sum of all is 8 times it")
    parser.add_argument("--far-mbit", type=float, default=400.0, help="rate of the long link")
    parser.add_argument("--delay-ms", type=float, default=25.0, help="of the long link, each way")
    parser.add_argument("--mib", type=int, default=64, help="model of a transfer")
    parser.add_argument("--far-mib", type=int, default=512, help="model of the transfer over the long link")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", default=",".join(PARTS), help="which of these, in this order")
    parser.add_argument("--congestion", default="", help="TCP's algorithm; empty: the system's own")
    parser.add_argument(
        "--quick", action="store_true", help="a sixth of the bytes, once: whether it works, not how well"
    )
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def _options(given: argparse.Namespace) -> Options:
    n_mib, far_mib, repeats = given.mib, given.far_mib, given.repeats
    if given.quick:
        n_mib, far_mib, repeats = max(N_SLAVES, n_mib // 6), far_mib // 6, 1
    n_bytes = n_mib // N_SLAVES * N_SLAVES * MIB
    return Options(
        given.mbit * 1e6, given.far_mbit * 1e6, given.delay_ms, n_bytes, far_mib * MIB, repeats, given.congestion
    )


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parsed(arguments)
    options = _options(given)
    rows: list[Row] = []
    unknown = [part for part in given.parts.split(",") if part not in PARTS]
    if unknown:
        print(f"bench_links has no part {unknown[0]!r}: it has {', '.join(PARTS)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the namespaces go, too
    try:
        for part in given.parts.split(","):
            rows += PARTS[part](options)
    except NotPossible as why:
        print(f"bench_links cannot run here: {why}", file=sys.stderr)
        return 2
    if given.json:
        print(
            json.dumps(
                {"options": asdict(options), "system_congestion": _congestion(), "rows": [asdict(r) for r in rows]}
            )
        )
    else:
        print(_table(rows))
    return 0


def _congestion() -> str:
    with open("/proc/sys/net/ipv4/tcp_congestion_control") as file:
        return file.read().strip()


def _table(rows: Sequence[Row]) -> str:
    lines = [f"{'part':6} {'what':36} {'seconds by cluster':40} {'spread':>6}  ratios"]
    for row in rows:
        seconds = "  ".join(f"{name} {value:.2f}" for name, value in row.seconds.items())
        ratios = "  ".join(f"{name} {value:.2f}" for name, value in row.ratios.items())
        lines.append(f"{row.part:6} {row.what:36} {seconds:40} {row.spread:6.2f}  {ratios}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
