"""What the state machines need to know of the operator's settings; master/config.py makes it and checks it."""

from __future__ import annotations

from dataclasses import dataclass, field

from dips.core.messages import Settings
from dips.master.state.penalty_config import PenaltyConfig


@dataclass(frozen=True)
class RunConfig:
    """One run's settings. grace_s None means: 10 % of the fastest cluster's round, at least 1 s."""

    run_id: str
    n_slaves: int
    settings: Settings = field(default_factory=Settings)
    penalty: PenaltyConfig = field(default_factory=PenaltyConfig)
    max_clusters: int = 8
    min_clusters: int = 1
    grace_s: float | None = None
    round_timeout_s: float = 30.0
    lease_ttl_s: float = 6 * 3600.0
    ticket_ttl_s: float = 60.0
    pinned_versions: int = 2
    linger_s: float = 30.0

    @property
    def evict_after_s(self) -> float:
        return self.settings.heartbeat_s * self.settings.evict_after_beats
