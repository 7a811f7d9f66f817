"""Lands one chunk from a frame in its staging row: checks, decodes and measures it while its bytes are in the cache.

Touches bytes, never a table: the data thread (slave/data_port.py) admits the chunk before and notes the result
afterwards. So landings of different chunks may run on several threads at once; everything that takes time here releases
the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dips.core.chunks import Buffer as Bytes
from dips.core.errors import RefusalCode, Refused
from dips.core.math import outer_numba as kernels
from dips.core.math import wire_numba
from dips.core.net.data_header import DataHeader
from dips.core.wire import Codec
from dips.slave.state.staging import Landing, Staging

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Companion:
    """Another push that has the same chunk: its row of staging memory, its values, and the place of the products."""

    row: int
    values: F32
    products: F64


@dataclass(slots=True)
class LandingJob:
    """A chunk that was admitted. Shapes: m elements of the chunk, p pieces of it.

    row: (m,), where it lands. theta: (m,) of the current version, and squared (p,) for the sums against it; both None
    when there is no version or chunks are not whole pieces. base: (m,) of the version that differences are relative to.
    """

    header: DataHeader
    staging: Staging
    landing: Landing
    payload: memoryview
    checksum: Callable[[Bytes], int]
    row: F32
    base: F32 | None = None
    theta: F32 | None = None
    squared: F64 | None = None
    theta_number: int = 0
    companions: list[Companion] = field(default_factory=list)
    bad: int = 0

    def run(self) -> None:
        """Land the chunk and count its non-finite elements.

        Raises Refused(CHUNK) for damaged bytes; then none has landed.
        """
        found = self.checksum(self.payload)
        if found != self.header.checksum:
            header = self.header
            raise Refused(
                RefusalCode.CHUNK,
                f"block {header.block}, offset {header.offset_bytes} of push {header.push}: the payload's checksum "
                f"is {found:016x}, its header says {header.checksum:016x}; send it again",
            )
        self.bad = self._parameters() if self.staging.wire is Codec.F32 else self._differences()
        if not self.companions:
            return
        assert self.theta is not None, "products are taken with a theta"
        # A landed row bypassed the caches; the frame's bytes are still in them.
        values = np.frombuffer(self.payload, np.float32) if self.staging.wire is Codec.F32 else self.row
        for companion in self.companions:
            kernels.products(self.theta, values, companion.values, companion.products)

    def _parameters(self) -> int:
        values = np.frombuffer(self.payload, np.float32)
        if self.theta is None or self.squared is None:
            return kernels.land(self.row, values)
        return kernels.land_measured(self.row, values, self.theta, self.squared)

    def _differences(self) -> int:
        assert self.base is not None, "differences are admitted only while their base is in memory"
        wire_numba.decode(self.staging.wire, self.base, np.frombuffer(self.payload, np.uint8), self.row)
        if self.theta is None or self.squared is None:
            return kernels.land(self.row, self.row)
        return kernels.measure_landed(self.row, self.theta, self.squared)
