"""Collects a run's record from its tapes and journal. It decides nothing and computes no time of its own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from dips.compare.record import PushFact, RoundFact
from dips.core.ids import RoundId, Version
from dips.sim.checks import push_of, version_of
from dips.sim.kernel import SimulatedProcess


class RunTally:
    """Counts one run. began_s: when the first version was published; all times here count from it."""

    def __init__(self) -> None:
        self.began_s = math.nan
        self.tokens: dict[Version, int] = {}
        """Tokens applied up to each version."""

        self.rounds = 0
        self.voids = 0
        self.voids_in_a_row = 0
        self.locked_out = False
        """Whether the last void round refused pushes that are finite."""

        self.facts: list[RoundFact] = []
        self.alarms: list[tuple[float, str]] = []
        self.cluster_tokens: Counter[str] = Counter()
        self.bad: set[str] = set()
        """Injected pushes."""

        self._judged: dict[str, Mapping[str, Any]] = {}
        self._version: Version | None = None

    def watch(self, process: SimulatedProcess, kind: str, fields: Mapping[str, Any]) -> None:
        """Take a line of the master's tape."""
        if kind == "judged":
            self._judged = {fields["round"]: fields}
        elif kind == "alarm":
            self.alarms.append((process.kernel.now_s - self.began_s, fields["sentence"]))

    def journal(self, record: Mapping[str, Any], now_s: float) -> None:
        """Take a durable record of the journal."""
        if record["kind"] == "COMMIT":
            self._committed(record, now_s)
        elif record["kind"] == "VOID":
            self.voids, self.voids_in_a_row = self.voids + 1, self.voids_in_a_row + 1
            fact = self._fact(record, self._version, now_s)
            rejected = self._judged[_round_of(record)]["rejected"]
            self.locked_out = any(push.cluster in rejected and push.norm is not None for push in fact.pushes)
            self.facts.append(fact)

    def _committed(self, record: Mapping[str, Any], now_s: float) -> None:
        version = version_of(record["version"])
        assert version is not None, "a COMMIT names its version"
        self.tokens[version] = record["tokens"]
        if record["judgement"] is not None:
            self.rounds, self.voids_in_a_row = self.rounds + 1, 0
            self.facts.append(self._fact(record, version, now_s))
            for item in record["participants"]:
                if item["verdict"] == "APPLIED":
                    self.cluster_tokens[push_of(item["push"]).cluster] += item["tokens"]
        self._version = version

    def _fact(self, record: Mapping[str, Any], version: Version | None, now_s: float) -> RoundFact:
        judged = self._judged[_round_of(record)]
        merged = record["kind"] == "COMMIT"
        return RoundFact(
            str(version),
            now_s - self.began_s,
            judged["kappa"] if merged else None,
            judged["rho"] if merged else None,
            judged["merged_norm"] if merged else None,
            tuple(self._push(item, record, judged) for item in record["participants"]),
        )

    def _push(self, item: Mapping[str, Any], record: Mapping[str, Any], judged: Mapping[str, Any]) -> PushFact:
        push, base = push_of(item["push"]), version_of(item["base"])
        assert base is not None, "only the seed has no base"
        assert self._version is not None, "and it is merged unjudged"
        why = "merged" if item["verdict"] == "APPLIED" else judged["rejected"].get(push.cluster, record.get("reason"))
        return PushFact(
            push.cluster,
            str(push),
            item["verdict"],
            why,
            item["tokens"],
            self._version.v - base.v,
            _known(judged["norms"], push.cluster),
            _known(judged["scores"], push.cluster),
            _known(judged.get("cosines", {}), push.cluster),
            str(push) in self.bad,
        )


def _round_of(record: Mapping[str, Any]) -> str:
    return str(RoundId(*record["round"]))


def _known(values: Mapping[str, float], cluster: str) -> float | None:
    value = values.get(cluster, math.nan)
    return value if math.isfinite(value) else None
