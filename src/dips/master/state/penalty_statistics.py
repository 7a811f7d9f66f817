"""The detector's memory: a few numbers for each cluster and three short histories that all clusters share.

Every COMMIT record and every journaled VOID contains all of it. So it is immutable, holds finite floats only, orders
its clusters by id, and does not lose a bit in JSON. It must never be changed in any other way.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ClusterStatistics:
    """One cluster's statistics.

    accepted: n_j, accepted pushes since the statistics (re)started. mean, variance: mu_j and V_j of the norms
    Gn. mean_tokens: Tbar_j; None before the first accepted push and after a restart. steps: the local steps
    for which mean_tokens holds. cosines: of the last accepted pushes whose cosine was known, oldest first;
    cosine_rounds: how many there were; cosine_alarmed: the direction alarm is active. last_norm, last_score,
    last_cosine: Gn_j, z_j and the cosine of the last judged push, rejected ones too, None where not finite or not
    known; for people, nothing is decided by them.
    """

    accepted: int = 0
    mean: float = 0.0
    variance: float = 0.0
    mean_tokens: float | None = None
    steps: int = 0
    flags_in_a_row: int = 0
    score_rejections_in_a_row: int = 0
    quarantined: bool = False
    cosines: tuple[float, ...] = ()
    cosine_rounds: int = 0
    cosine_alarmed: bool = False
    last_norm: float | None = None
    last_score: float | None = None
    last_cosine: float | None = None

    @property
    def usual_cosine(self) -> float:
        """The median of the last cosines, so that a few odd rounds have little effect; NaN before the first."""
        return statistics.median(self.cosines) if self.cosines else math.nan

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "cosines": list(self.cosines)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ClusterStatistics:
        """Also reads records with an average in place of the last cosines: the cosines then start again."""
        if "cosine_mean" in data:
            data = {k: v for k, v in data.items() if k not in ("cosine_mean", "cosine_rounds", "cosine_alarmed")}
        return cls(**{**data, "cosines": tuple(data.get("cosines", ()))})

    def restarted(self) -> ClusterStatistics:
        """The statistics without norms and tokens; flags, quarantine and cosines are kept."""
        return dataclasses.replace(
            self, accepted=0, mean=0.0, variance=0.0, mean_tokens=None, steps=0, score_rejections_in_a_row=0
        )


NEW_CLUSTER = ClusterStatistics()


@dataclass(frozen=True)
class DetectorState:
    """Everything that judge() remembers between rounds; histories are oldest first.

    clusters: by cluster id. norms, scores: Gn_j and z_j of the last accepted pushes of all clusters.
    merged_norms: ||d|| of the last committed rounds, before the clip. voids_in_a_row: VOID rounds since the
    last COMMIT.
    """

    clusters: tuple[tuple[str, ClusterStatistics], ...] = ()
    norms: tuple[float, ...] = ()
    scores: tuple[float, ...] = ()
    merged_norms: tuple[float, ...] = ()
    voids_in_a_row: int = 0

    @classmethod
    def empty(cls) -> DetectorState:
        return cls()

    def of(self, cluster: str) -> ClusterStatistics:
        """The cluster's statistics; those of a new cluster if it is not known."""
        return dict(self.clusters).get(cluster, NEW_CLUSTER)

    @property
    def quarantined(self) -> frozenset[str]:
        return frozenset(cluster for cluster, statistics in self.clusters if statistics.quarantined)

    def with_clusters(self, changed: Mapping[str, ClusterStatistics]) -> DetectorState:
        """The same with some clusters' statistics replaced or added."""
        merged = {**dict(self.clusters), **changed}
        return dataclasses.replace(self, clusters=tuple(sorted(merged.items())))

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers; json.dumps writes each float so that it reads back to the same
        bits."""
        return {
            "clusters": {cluster: known.to_json() for cluster, known in self.clusters},
            "norms": list(self.norms),
            "scores": list(self.scores),
            "merged_norms": list(self.merged_norms),
            "voids_in_a_row": self.voids_in_a_row,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DetectorState:
        clusters = sorted(data["clusters"].items())
        return cls(
            clusters=tuple((cluster, ClusterStatistics.from_json(known)) for cluster, known in clusters),
            norms=tuple(data["norms"]),
            scores=tuple(data["scores"]),
            merged_norms=tuple(data["merged_norms"]),
            voids_in_a_row=data["voids_in_a_row"],
        )
