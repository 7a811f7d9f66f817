"""A storm of kills over a whole run of real processes, and what is asked of the run afterwards.

Who dies how often is the paper's Table 1: of its nine clusters in 33 days one failed 31 times and others hardly ever.
A storm plays the four single clusters and the servers (4 failures, 4.2) within minutes, in these proportions. Kills are
planned by the share of so many tokens that is applied; the run is stopped once it has as many, and every kill came.
"""

from __future__ import annotations

import bisect
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.dips_command import operator_of

from dips.core.errors import Refused, RetryLater
from dips.core.observe.tape import read_tape
from dips.local.local_run import LocalRun
from dips.local.supervisor import POLL_S
from dips.master.directory import TAPE_NAME
from dips.master.page.history import HeldoutPoint

TABLE_1 = (1, 2, 4, 31)
"""Failures of clusters B, D, C and E in 33 days."""

SERVER_FAILURES = 4
"""Of Di-PS itself, in the same time."""

FIRST_SHARE, LAST_SHARE = 0.04, 0.9
"""Of the run's tokens: the first kill meets a version, and the last victim is back before the end."""

RESTART_DELAY_S = 0.5
WITHIN_NATS = 0.05
"""How much worse than the calm run's the held-out loss may be, at equal tokens."""


@dataclass(frozen=True)
class Kill:
    at_share: float
    victim: str


@dataclass(frozen=True)
class Death:
    victim: str
    phase: str


@dataclass(frozen=True)
class ClusterNumbers:
    """The three numbers. live: share of the time, from the first round on, in which the master counted it in;
    participating: share of the merged rounds that its push was part of; tokens: of its pushes that were applied."""

    live: float
    participating: float
    tokens: int


@dataclass
class Storm:
    kills: list[Kill] = field(default_factory=list)
    deaths: list[Death] = field(default_factory=list)
    clusters: dict[str, ClusterNumbers] = field(default_factory=dict)
    seconds: float = 0.0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)


def planned(clusters: Sequence[str], servers: Sequence[str], n: int, rng: random.Random) -> list[Kill]:
    """About n kills with Table 1's spread over the last of these clusters and the servers; each dies at least once."""
    weights = dict(zip(reversed(clusters), reversed(TABLE_1), strict=False))
    total = sum(weights.values()) + SERVER_FAILURES
    counts = {name: max(1, round(n * weight / total)) for name, weight in weights.items()}
    counts |= {name: max(1, round(n * SERVER_FAILURES / total / len(servers))) for name in servers}
    victims = [name for name, count in counts.items() for _ in range(count)]
    rng.shuffle(victims)
    shares = sorted(rng.uniform(FIRST_SHARE, LAST_SHARE) for _ in victims)
    return [Kill(share, victim) for share, victim in zip(shares, victims, strict=True)]


def play(local: LocalRun, kills: Iterable[Kill], tokens: int, tell: Callable[[str], None]) -> Storm:
    """Run to so many tokens and kill on the way; the run must be started. Raises FatalError when it cannot go on."""
    storm, waiting = Storm(kills=list(kills)), list(kills)
    seen, live, stopped = 0, Counter[str](), False
    begin_s = time.monotonic()
    while not local.finished:
        status = local.tick()
        if status is not None and not (status.stopping or status.stopped):
            if status.tokens:  # before the first round no cluster has come, and it is no fault
                seen += 1
                live.update(cluster.cluster_id for cluster in status.clusters if cluster.alive)
            share = status.tokens / tokens
            due = [kill for kill in waiting if kill.at_share <= share]
            for kill in due:
                if local.supervisor.kill(kill.victim, RESTART_DELAY_S) is not None:
                    waiting.remove(kill)
                    storm.deaths.append(Death(kill.victim, status.phase))
                    tell(f"{kill.victim} is killed at {share:.0%} of the tokens, in {status.phase}")
            if share >= 1 and not waiting and not stopped:
                with contextlib.suppress(Refused, RetryLater), operator_of(local.directory.path) as operator:
                    operator.stop("the storm is over")
                    stopped = True
        time.sleep(POLL_S)  # between two looks
    storm.seconds = time.monotonic() - begin_s
    local.finish()
    assert local.status is not None, "a run that has finished was asked"
    storm.tokens = local.status.tokens
    merged = merged_rounds(local.directory.path)
    for cluster in local.status.clusters:
        name = cluster.cluster_id
        took_part = sum(name in accepted for accepted in merged) / max(1, len(merged))
        storm.clusters[name] = ClusterNumbers(live[name] / max(1, seen), took_part, cluster.tokens_applied)
    storm.wrong = miscounted(storm, tokens)
    codes = {name: code for name, code in local.exit_codes().items() if code}
    storm.wrong += [f"{name} ended with exit code {code}" for name, code in codes.items()]
    return storm


def merged_rounds(run_dir: Path) -> list[frozenset[str]]:
    judged: dict[str, frozenset[str]] = {}
    committed: list[frozenset[str]] = []
    for record in read_tape(run_dir / "master" / TAPE_NAME):
        if record["kind"] == "judged":
            judged[record["round"]] = frozenset(record["accepted"])
        elif record["kind"] == "round" and record["phase"] == "COMMIT" and record["round"] in judged:
            committed.append(judged[record["round"]])
    return committed


def miscounted(storm: Storm, at_least: int) -> list[str]:
    counted = sum(numbers.tokens for numbers in storm.clusters.values())
    wrong = []
    if counted != storm.tokens:
        wrong.append(f"the clusters' tokens add up to {counted}, the run's are {storm.tokens}")
    if storm.tokens < at_least:
        wrong.append(f"the run ended at {storm.tokens} of {at_least} tokens")
    return wrong


def loss_at(points: Sequence[HeldoutPoint], tokens: int) -> float:
    """The held-out loss at so many tokens, between the versions before and after; beyond the last one, the last one's.

    Raises ValueError when there is no point.
    """
    if not points:
        raise ValueError("no held-out loss was measured")
    after = bisect.bisect_left(points, tokens, key=lambda point: point.tokens)
    if after == 0 or after == len(points):
        return points[min(after, len(points) - 1)].loss
    a, b = points[after - 1], points[after]
    return a.loss + (b.loss - a.loss) * (tokens - a.tokens) / (b.tokens - a.tokens)


def compared(calm: Sequence[HeldoutPoint], storm: Sequence[HeldoutPoint]) -> tuple[int, float, float]:
    """(tokens, calm loss, loss in the storm) at the most tokens that both have reached."""
    tokens = min(calm[-1].tokens, storm[-1].tokens)
    return tokens, loss_at(calm, tokens), loss_at(storm, tokens)


def worse_than_calm(calm: Sequence[HeldoutPoint], storm: Sequence[HeldoutPoint]) -> list[str]:
    tokens, calm_loss, storm_loss = compared(calm, storm)
    if storm_loss <= calm_loss + WITHIN_NATS:
        return []
    return [f"at {tokens} tokens the held-out loss is {storm_loss:.3f}, more than {WITHIN_NATS} above {calm_loss:.3f}"]


def table(clusters: Mapping[str, ClusterNumbers], deaths: Sequence[Death]) -> list[str]:
    kills = Counter(death.victim for death in deaths)
    lines = [f"{'cluster':<9}{'kills':>6}{'live':>7}{'participating':>15}{'tokens committed':>18}"]
    for name, n in sorted(clusters.items()):
        lines.append(f"{name:<9}{kills[name]:>6}{n.live:>7.0%}{n.participating:>15.0%}{n.tokens:>18}")
    return lines
