"""The two ends of `dips track` for its tests: the tape of a master, and a tracker in memory."""

from __future__ import annotations

from pathlib import Path

from dips.core.observe.tape import Tape
from dips.local.tracking import Point, Target, Tracker

SECRET = "a-password"


class TrackedTape:
    """Appends rounds to the tape of a master with one cluster, a. Its first version is 1:0."""

    def __init__(self, directory: Path, run_id: str = "mine") -> None:
        self._path = directory / "master" / "master.tape.jsonl"
        self._tokens = 0
        with self._opened() as tape:
            tape.write("master-started", "-", run_id=run_id, settings={"outer_lr": 0.7})

    def _opened(self) -> Tape:
        return Tape(self._path, "master", "master")

    def rounds(self, first: int, last: int, timeline: int = 1) -> None:
        """Versions from `first` to `last`; that of number v has the loss 1 / (v + 1)."""
        with self._opened() as tape:
            for v in range(first, last + 1):
                self._round(tape, v, timeline)

    def _round(self, tape: Tape, v: int, timeline: int) -> None:
        name, version = f"r1.{v}", f"{timeline}:{v}"
        self._tokens += 1000
        push = {"push": f"a/1.1#{v}", "base": f"{timeline}:{max(0, v - 3)}", "tokens": 1000, "wire": "BF16"}
        tape.write("ticket", "-", **push)
        judged = {"accepted": ["a"], "rejected": {}, "norms": {"a": 0.5}, "scores": {"a": None}, "cosines": {}}
        tape.write("judged", "-", round=name, **judged, kappa=0.9, rho=1.0, merged_norm=0.4)
        tape.write("commit", "-", round=name, version=version, s_max=8)
        seen = {"loss": 1 / (v + 1), "tokens_per_s": 50.0, "push_bytes_per_s": None}
        tape.write("progress", "-", version=version, elems=600, clusters={"a": seen})
        tape.write("publish", "-", version=version, tokens=self._tokens)

    def end(self) -> None:
        with self._opened() as tape:
            tape.write("master-ended", "-", exit_code=0)


class Held:
    """What a tracker holds, over all openings; it fails while `away`."""

    def __init__(self) -> None:
        self.away = False
        self.points: dict[str, list[Point]] = {}
        self.settings: dict[str, object] = {}

    def open(self, target: Target) -> Tracker:
        return _Opened(self, target)

    def steps(self) -> dict[str, list[int]]:
        return {name.partition("-")[2][8:]: [point.step for point in points] for name, points in self.points.items()}


class _Opened(Tracker):
    def __init__(self, held: Held, target: Target) -> None:
        if held.away:
            raise OSError(f"no route to https://me:{SECRET}@tracker/api")
        self._held, self._mine = held, held.points.setdefault(target.name, [])
        held.settings = dict(target.settings)
        self.last = self._mine[-1].step if self._mine else -1

    def write(self, point: Point) -> None:
        if self._held.away:
            raise OSError(f"no route to https://me:{SECRET}@tracker/api")
        self._mine.append(point)
