"""Versions that differences stand on: which cluster may send its push as differences, and what stays readable for it.

A slave reads a difference beside the parameters of its base. So a push may be written in that way as long as every
slave holds its base, and the base stays where it is until the push is sealed; before that, while its cluster trains on
it, if the cluster sends differences. Both as far as `pinned_versions` go, beside what is being pulled: a base that
gives way costs its cluster nothing but the bytes of a push in float32 (BASE_GONE), and one that is only trained on goes
first.
"""

from __future__ import annotations

from dips.core.ids import Version
from dips.core.protocol import codec_capability
from dips.core.wire import DIFFERENCES, Codec
from dips.master.state.shared import SharedState


def granted(shared: SharedState, wanted_wire: Codec, base: Version | None) -> Codec:
    """How a push on this base is to be written: as its cluster wishes, or in float32."""
    if wanted_wire not in DIFFERENCES or base not in shared.kept:
        return Codec.F32
    offered = all(codec_capability(wanted_wire) in slave.capabilities for slave in shared.ready_slaves())
    return wanted_wire if offered else Codec.F32


def in_use(shared: SharedState) -> set[Version]:
    """Bases of the pushes that are on their way, of those that are readable."""
    return _readable(shared, {push.request.base for push in shared.pushes() if push.needs_base})


def trained_on(shared: SharedState) -> set[Version]:
    """Likewise those of the pushes to come."""
    return _readable(shared, {member.base for member in shared.live()})


def _readable(shared: SharedState, versions: set[Version | None]) -> set[Version]:
    return {version for version in versions if version is not None and version in shared.kept}
