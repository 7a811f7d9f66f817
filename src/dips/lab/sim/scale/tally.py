"""Counts a simulated run: each cluster's time by state, rounds, staleness. Its size is bounded for any length of run.

A cluster is in exactly one state at any time, so that its seconds add up to the run's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dips.core.ids import PushId
from dips.master.state.ledger import push_from_json

AWAY = "not scheduled"
RESTART = "restart after a failure"
JOIN = "join"
REJOIN_PULL = "pull after a failure"
TRAIN = "training"
LOST = "training that was lost"
PUSH = "push"
VERDICT = "verdict wait"
PULL = "pull"
COPIES = "copies"

UP = (TRAIN, PUSH, VERDICT, PULL, COPIES)
"""States of a cluster that is part of the run; the overhead is a share of their sum."""

OVERHEAD = (PUSH, VERDICT, PULL, COPIES)
DOWNTIME = (RESTART, JOIN, REJOIN_PULL, LOST)

MAX_CHANGES = 20_000
"""Points of a cluster's line in the picture; later ones are left out."""


class ClusterAccount:
    """One cluster's seconds by state, and the line of its presence for the picture."""

    def __init__(self, now_s: float) -> None:
        self.seconds: dict[str, float] = {}
        self.state = AWAY
        self.presence: list[tuple[float, bool]] = [(now_s, False)]
        self._since_s = now_s
        self.failures = 0
        self.rejoins = 0
        self.pushes: Counter[str] = Counter()
        self.tokens_applied = 0
        self.last_applied: PushId | None = None
        """Its newest push that is part of a version."""

        self.lost_in_steps_s = 0.0
        """Training since the last whole step, when its process was killed."""

    def enter(self, state: str, now_s: float) -> None:
        """Put the cluster into this state from now on."""
        self._add(self.state, now_s - self._since_s)
        self._since_s = now_s
        here = state in UP
        if here != (self.state in UP):
            if len(self.presence) < MAX_CHANGES:
                self.presence.append((now_s, here))
        self.state = state

    def lose(self, seconds: float) -> None:
        """Count so much of the training as lost."""
        self._add(TRAIN, -seconds)
        self._add(LOST, seconds)

    def _add(self, state: str, seconds: float) -> None:
        self.seconds[state] = self.seconds.get(state, 0.0) + seconds


class ScaleTally:
    """The counts of a run."""

    def __init__(self, clusters: Iterable[str]) -> None:
        self.clusters = {name: ClusterAccount(0.0) for name in clusters}
        self.faults: Counter[str] = Counter()
        self.rounds: Counter[str] = Counter()
        self.merged: Counter[int] = Counter()
        self.staleness: Counter[int] = Counter()
        self.alarms: Counter[str] = Counter()
        self.published = 0
        self.journal_entries = 0
        self.tokens = 0

    def record(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Count a line of the master's tape."""
        if kind == "publish":
            self.published += 1
            self.tokens = int(fields["tokens"])
        elif kind == "round" and fields["input"] in ("abort", "void"):
            self.rounds["aborted" if fields["input"] == "abort" else "void"] += 1
        elif kind == "alarm":
            self.alarms[str(fields["code"])] += 1
        elif kind == "join":
            self.clusters[fields["cluster"]].rejoins += 1

    def journal(self, record: Mapping[str, Any]) -> None:
        """Count an entry of the master's journal."""
        self.journal_entries += 1
        kind = record["kind"]
        if kind not in ("COMMIT", "VOID"):
            return
        for participant in record["participants"]:
            self.clusters[participant["push"][0]].pushes[participant["verdict"].lower()] += 1
        if kind == "COMMIT":
            self.rounds["committed"] += 1
            self._merge(record["version"], [p for p in record["participants"] if p["verdict"] == "APPLIED"])

    def _merge(self, version: Sequence[int], applied: Sequence[Mapping[str, Any]]) -> None:
        if all(participant["base"] is None for participant in applied):
            return  # the seed: it merges nothing
        self.merged[len(applied)] += 1
        for participant in applied:
            self.staleness[version[1] - 1 - participant["base"][1]] += 1
            account = self.clusters[participant["push"][0]]
            account.tokens_applied += participant["tokens"]
            account.last_applied = push_from_json(participant["push"])
