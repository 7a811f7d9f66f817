"""What happened in all runs with faults: counts by kind and by phase of the round, and how long it took."""

from __future__ import annotations

import statistics
import threading
from collections import Counter
from collections.abc import Iterator

from support.fault_run import Recovery

from dips.master.state.tables import RoundPhase

SLOWEST = 5
PHASES = tuple(phase.value for phase in RoundPhase)


class Tally:
    """Faults that happened and were judged. Safe for several threads."""

    def __init__(self) -> None:
        self.recoveries: list[tuple[str, Recovery]] = []
        self.others: Counter[str] = Counter()
        """Faults before the first round or at the end of a run, by kind."""
        self._lock = threading.Lock()
        self._slowest: list[tuple[float, str]] = []
        self.judgements = 0
        self.versions = 0

    def add(self, kind: str, recovery: Recovery, what: str) -> None:
        with self._lock:
            self.recoveries.append((kind, recovery))
            self._slowest = sorted([*self._slowest, (recovery.healed_after_s, what)], reverse=True)[:SLOWEST]

    def judged(self, versions: int) -> None:
        """One `dips verify --replay`, which made so many versions anew."""
        with self._lock:
            self.judgements += 1
            self.versions += versions

    def born(self, kind: str, count: int) -> None:
        with self._lock:
            self.others[kind] += count

    def ended(self, kind: str) -> None:
        with self._lock:
            self.others[kind] += 1

    @property
    def fired(self) -> int:
        return len(self.recoveries) + self.others.total()

    def missing_phases(self) -> list[str]:
        fell = {recovery.phase for _, recovery in self.recoveries}
        return [phase for phase in PHASES if phase not in fell]

    def table(self) -> Iterator[str]:
        """Lines for people."""
        kinds = sorted({kind for kind, _ in self.recoveries} | set(self.others))
        width = max(map(len, kinds), default=4)
        yield f"{self.fired} faults fired and survived; {self.judgements} times judged by dips verify --replay, which "
        yield f"made {self.versions} versions anew, bit for bit"
        yield ""
        yield f"{'fault':<{width}} {'fired':>6} {'outside':>8} " + " ".join(f"{phase:>8}" for phase in PHASES)
        for kind in kinds:
            fell = Counter(recovery.phase for name, recovery in self.recoveries if name == kind)
            others = self.others[kind]
            row = " ".join(f"{fell[phase]:>8}" for phase in PHASES)
            yield f"{kind:<{width}} {fell.total() + others:>6} {others:>8} {row}"
        yield ""
        back, published = "all back: median", "published: median"
        yield f"{'seconds to':<{width}} {back:>17} {'max':>6}   {published:>17} {'max':>6}   rounds"
        for kind in kinds:
            mine = [recovery for name, recovery in self.recoveries if name == kind]
            if mine:
                yield f"{kind:<{width}} {_times(mine)}"
        yield ""
        yield "slowest: " + "; ".join(f"{what}: {after_s:.1f} s" for after_s, what in self._slowest)


def _times(recoveries: list[Recovery]) -> str:
    healed = [recovery.healed_after_s for recovery in recoveries]
    published = [recovery.published_after_s for recovery in recoveries]
    return (
        f"{statistics.median(healed):>17.1f} {max(healed):>6.1f}   {statistics.median(published):>17.1f} "
        f"{max(published):>6.1f}   {max(recovery.rounds for recovery in recoveries)}"
    )


TALLY = Tally()
"""Of this test run."""
