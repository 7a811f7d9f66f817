"""The settings that the state machines use; master/config.py makes and checks them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dips.core.messages import Settings
from dips.master.state.penalty_config import PenaltyConfig


@dataclass(frozen=True)
class RunConfig:
    """One run's settings. grace_s None means: 10 % of the fastest cluster's round, at least 1 s.

    round_timeout_s and ticket_ttl_s are sent to all processes in `settings`, which is made to agree with them.
    rebuild: a version that the slaves hold may be adopted although the journal knows none, and a newer epoch that they
    promised is replaced by a still newer one. async_lag_versions: how many published versions a slave's disk may be
    behind (settings.durability "async" only). encrypted: slaves accept only peers whose data key they received from
    the master, so every process brings one. token_ratio_max: a push that counts this many times the usual tokens for
    a step is refused. grace_sliding: the window starts again with each push that is admitted to it, within
    pacing.longest_window_s().
    """

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
    rebuild: bool = False
    async_lag_versions: int = 4
    encrypted: bool = False
    token_ratio_max: float = 100.0
    grace_sliding: bool = False

    def __post_init__(self) -> None:
        settings = replace(self.settings, round_timeout_s=self.round_timeout_s, ticket_ttl_s=self.ticket_ttl_s)
        object.__setattr__(self, "settings", settings)

    @property
    def evict_after_s(self) -> float:
        return self.settings.heartbeat_s * self.settings.evict_after_beats
