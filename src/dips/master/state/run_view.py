"""The part of the status page that is not in StatusReply: open pushes, links, slaves' troubles, the planned window.

Read from the state between two events. It must never change the state, nor hold a reference that could.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dips.core.messages import StatusReply
from dips.core.wire import encoded_bytes
from dips.master.state.link_rates import LinkRate
from dips.master.state.records import Push
from dips.master.state.shared import SharedState
from dips.master.state.status import status


@dataclass(frozen=True)
class OpenPushView:
    """An undecided push. landed: the share of its bytes that slaves report as received, 0 to 1."""

    cluster: str
    phase: str
    landed: float
    age_s: float


@dataclass(frozen=True)
class RunView:
    """A run at one moment. as_of_s: the monotonic time of the state's last event, from which all ages are counted.

    since_publish_s: since the newest version was published in this epoch; None when none was.
    slave_troubles: by slave, why it is not ready. Times are None where there is no such moment.
    """

    status: StatusReply
    as_of_s: float
    planned_window_in_s: float | None = None
    since_publish_s: float | None = None
    publish_interval_s: float = 0.0
    evict_after_s: float = 0.0
    links: tuple[LinkRate, ...] = ()
    pushes: tuple[OpenPushView, ...] = ()
    slave_troubles: Mapping[str, str] = field(default_factory=dict)


def look(shared: SharedState) -> RunView:
    """Makes the view of the run as it is now."""
    planned_s, published_s = shared.planned_window_s, shared.published_s
    return RunView(
        status(shared),
        shared.now_s,
        planned_s - shared.now_s if planned_s is not None else None,
        shared.now_s - published_s if published_s is not None else None,
        shared.publish_interval_s,
        shared.config.evict_after_s,
        shared.link_rates.links(shared.members, shared.ledger.layout, shared.ledger.placement, shared.now_s),
        tuple(_open(shared, push) for push in shared.pushes()),
        {slave.id: slave.trouble for slave in shared.slaves.values() if slave.trouble},
    )


def _open(shared: SharedState, push: Push) -> OpenPushView:
    layout = shared.ledger.layout
    whole_bytes = encoded_bytes(push.wire, layout.n_elems) if layout is not None else 0
    staged = len(push.digest_of_slave) / max(1, len(shared.slaves_expected()))
    landed = sum(push.landed_bytes.values()) / whole_bytes if whole_bytes else 0.0
    return OpenPushView(push.cluster, push.phase.now.value, min(1.0, max(staged, landed)), shared.now_s - push.began_s)
