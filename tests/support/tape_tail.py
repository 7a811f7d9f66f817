"""The master's tape as it grows: phases of the round, and when versions were published."""

from __future__ import annotations

import json
from bisect import bisect_right
from pathlib import Path

from dips.master.state.tables import RoundPhase

BEGINS = frozenset({RoundPhase.WINDOW.value, RoundPhase.SEALED.value})


class TapeTail:
    """Reads what was added since the last look. Times are the master's wall clock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0
        self._phases: list[tuple[float, str]] = [(0.0, RoundPhase.IDLE.value)]
        self._published: list[float] = []
        self._versions: set[str] = set()
        """A master that starts again publishes once more what stands: that is no new version."""
        self._rounds: list[tuple[float, str]] = []
        """When a round left IDLE, and its name."""

    def phase_at(self, wall_s: float) -> str:
        self._look()
        at = bisect_right(self._phases, (wall_s, "~"))
        return self._phases[at - 1][1]

    def published_since(self, wall_s: float) -> bool:
        self._look()
        return bool(self._published) and self._published[-1] >= wall_s

    def first_published(self, since_s: float) -> float:
        """When the first version after this was published. To be called once there is one."""
        self._look()
        return next(at_s for at_s in self._published if at_s >= since_s)

    def rounds_until_published(self, since_s: float) -> int:
        """How many rounds began from here to the next published version, the one that made it among them; one that was
        under way already is no new one."""
        end_s = self.first_published(since_s)
        return len({name for at_s, name in self._rounds if since_s <= at_s <= end_s})

    def _look(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            added = file.read()
        whole = added[: added.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.splitlines():
            self._take(json.loads(line))

    def _take(self, event: dict[str, object]) -> None:
        at_s = event["wall_s"]
        assert isinstance(at_s, float)
        if event["kind"] == "epoch":
            self._phases.append((at_s, RoundPhase.IDLE.value))
        elif event["kind"] == "round":
            phase = str(event["phase"])
            if phase in BEGINS and self._phases[-1][1] == RoundPhase.IDLE.value:
                self._rounds.append((at_s, str(event["round"])))
            self._phases.append((at_s, phase))
        elif event["kind"] == "publish" and str(event["version"]) not in self._versions:
            self._versions.add(str(event["version"]))
            self._published.append(at_s)
