"""The terms that the master gave this cluster: run, epoch, incarnation, and the settings that all clusters share."""

from __future__ import annotations

from dataclasses import dataclass, field

from dips.core.errors import ConfigError, RemoteProtocolError
from dips.core.ids import ClusterId, Incarnation, Version
from dips.core.layout import Layout
from dips.core.messages import Caller, DataPlan, HeartbeatReply, JoinReply, PullGrant, Settings
from dips.core.protocol import agree
from dips.core.untrained import Untrained
from dips.core.wire import Codec
from dips.worker.state.times import times_of
from dips.worker.state.waiting import RULES


@dataclass(frozen=True)
class SessionConfig:
    """The session's part of ClientConfig, the model and the data; `expect_*` None: any value is accepted.

    Times that are None follow from the master's settings (times.py).
    """

    cluster_id: ClusterId
    layout: Layout
    data_plan: DataPlan
    run_id: str = ""
    declared_tokens_per_s: float = 0.0
    connect_wait_s: float = 120.0
    call_deadline_s: float | None = None
    retry_max_s: float | None = None
    leave_wait_s: float | None = None
    data_silence_s: float | None = None
    data_stall_s: float | None = None
    durable_pushes: bool = False
    """A push's number is used only once its record is on disk (PersistPush)."""
    expect_sync_every: int | None = None
    expect_outer_lr: float | None = None
    expect_outer_momentum: float | None = None
    wire: Codec = Codec.F32
    """The codec that this cluster asks for in its pushes; each ticket says whether it may use it."""
    curve_key: bytes = b""
    """This process's public key of the data flow; empty without keys."""
    untrained: Untrained = field(default_factory=Untrained)
    """The model's tensors that the run does not train, as they were at the start."""
    process_id: bytes = b""
    """Drawn for this process: it lets the master distinguish a repeated Join from a second process of this name."""
    host: str = ""
    """The host of this process, for people."""


class Terms:
    """The master's terms, as far as they are known."""

    def __init__(self, config: SessionConfig) -> None:
        self._config = config
        self.run_id = config.run_id
        self.epoch = 0
        self.incarnation: Incarnation | None = None
        self.previous: Incarnation | None = None
        """The incarnation that a resumed process continues, until its first Join is answered."""
        self.leases_timeline: int | None = None
        """The timeline on which the master last listed this cluster's ranges."""
        self.settings = Settings()
        self.times = times_of(config, self.settings)
        self.local_steps = self.settings.sync_every_steps
        self.tokens = 0
        self.published: Version | None = None
        self.stop = False
        self.no_more_pushes = False
        """The master refused a push because the run ends."""

    def caller(self, cause: str) -> Caller:
        return Caller(self.run_id, self.epoch, self._config.cluster_id, self.incarnation, cause)

    def joined(self, reply: JoinReply) -> None:
        """Take the terms of a Join's answer. Raises ConfigError where this cluster expects another setting, Refused for
        the protocol's version, RemoteProtocolError for a setting that does not exist.
        """
        self.run_id, self.epoch, self.incarnation = reply.run_id, reply.epoch, reply.incarnation
        agree(reply.hello.protocol_min, reply.hello.protocol_max, reply.hello.capabilities, "the master")
        if reply.settings.overlap not in RULES:
            raise RemoteProtocolError(
                f"the master's overlap is {reply.settings.overlap!r}, and this release knows {', '.join(RULES)}: "
                "install the same release of dips on the master and on all clusters"
            )
        self._check_expectations(reply.settings)
        self.times = times_of(self._config, reply.settings)
        self.settings, self.tokens, self.published = reply.settings, reply.tokens, reply.published
        self.take_steps(reply.local_steps)

    def beat(self, reply: HeartbeatReply) -> None:
        self._progressed(reply.tokens, reply.published)
        self.take_steps(reply.local_steps)
        self.stop = self.stop or reply.stop

    def granted(self, grant: PullGrant) -> None:
        self._progressed(grant.tokens, grant.version)
        self.take_steps(grant.local_steps)

    @property
    def takes_pushes(self) -> bool:
        """Whether the master accepts a push after `stop`: from a drained cluster yes, at the run's end no."""
        ended = 0 < self.settings.tk_max_tokens <= self.tokens
        return not (self.no_more_pushes or ended)

    def take_steps(self, local_steps: int) -> None:
        self.local_steps = local_steps or self.settings.sync_every_steps

    def _progressed(self, tokens: int, published: Version | None) -> None:
        """Take tokens and version. A beat and a grant may overtake each other: only a new timeline lowers them."""
        if published is None:
            return
        if self.published is not None and self.published.timeline != published.timeline:
            self.tokens, self.published = tokens, published
        else:
            self.tokens, self.published = max(self.tokens, tokens), max(self.published or published, published)

    def _check_expectations(self, settings: Settings) -> None:
        config = self._config
        pairs: tuple[tuple[str, float | None, float], ...] = (
            ("sync_every", config.expect_sync_every, settings.sync_every_steps),
            ("outer_lr", config.expect_outer_lr, settings.outer_lr),
            ("outer_momentum", config.expect_outer_momentum, settings.outer_momentum),
        )
        for name, wanted, given in pairs:
            if wanted is not None and wanted != given:
                raise ConfigError(
                    f"this cluster is given {name} = {wanted:g}, the run's is {given:g}: all clusters share the "
                    f"master's setting, so leave {name} out here, or start the master with {wanted:g}"
                )
