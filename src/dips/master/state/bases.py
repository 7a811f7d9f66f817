"""Base versions of difference-coded pushes: which cluster may send differences, and which bases stay readable for it.

A slave decodes a difference with the parameters of its base. So a push may be coded in this way as long as every
slave holds its base. The base is kept until the push is sealed, and also while a cluster that sends differences trains
on it. Both count against `pinned_versions`, together with the versions that are being pulled. When a base is dropped,
its cluster only has to send the push in float32 (BASE_GONE); a base that is only trained on is dropped first.
"""

from __future__ import annotations

from dips.core.ids import Version
from dips.core.protocol import codec_capability
from dips.core.wire import DIFFERENCES, Codec
from dips.master.state.shared import SharedState


def granted(shared: SharedState, wanted_wire: Codec, base: Version | None) -> Codec:
    """The codec for a push on this base: the one that its cluster asks for, or float32."""
    if wanted_wire not in DIFFERENCES or base not in shared.kept:
        return Codec.F32
    offered = all(codec_capability(wanted_wire) in slave.capabilities for slave in shared.ready_slaves())
    return wanted_wire if offered else Codec.F32


def in_use(shared: SharedState) -> set[Version]:
    """The readable bases of the open pushes."""
    return _readable(shared, {push.request.base for push in shared.pushes() if push.needs_base})


def trained_on(shared: SharedState) -> set[Version]:
    """The readable bases that clusters train on for their next pushes."""
    return _readable(shared, {member.base for member in shared.live()})


def _readable(shared: SharedState, versions: set[Version | None]) -> set[Version]:
    return {version for version in versions if version is not None and version in shared.kept}
