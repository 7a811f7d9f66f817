"""A snapshot file that is written piece by piece for a RESHARD: durable when it is sealed, no trace of it before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.slave_disk import CrashDisk, PowerLossError

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import RoundId, Version
from dips.core.messages import SnapshotInfo
from dips.slave.memory import bytes_of
from dips.slave.ring import Ring

KEPT = 2
OLD = SnapshotInfo(Version(1, 3), RoundId(1, 4), b"layout", b"old place", b"old digest", committed=False)
NEW = SnapshotInfo(Version(1, 4), RoundId(1, 5), b"layout", b"new place", b"new digest", committed=False)


def arrays(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal(n).astype(np.float32), rng.standard_normal(n).astype(np.float32)


def ring_on(disk: CrashDisk) -> Ring:
    ring = Ring(disk, "run", "s0", KEPT)
    ring.scan()
    return ring


def start(ring: Ring, n: int = 4) -> None:
    ring.make(n)
    for what in (replace(OLD, version=Version(1, 2), round=RoundId(1, 3)), OLD):
        ring.write_shadow(what, *arrays(n, what.round.n))
        ring.commit(what, b"hash", b"record")


def stream(ring: Ring, n: int) -> None:
    opened = ring.begin_stream(NEW, n)
    for tensor in arrays(n, 9):
        data = bytes_of(tensor)
        opened.write(data[:8])
        opened.write(data[8:])
    ring.seal_stream(opened, NEW)


@pytest.mark.parametrize("n", [3, 4, 7])
def test_what_was_streamed_is_read_back_whatever_size_files_had(n: int) -> None:
    disk = CrashDisk()
    ring = ring_on(disk)
    start(ring)
    stream(ring, n)
    for found in (ring, ring_on(CrashDisk({name: disk.open(name).read() for name in disk.names()}))):
        assert found.infos()[0] == NEW
        theta, momentum = np.empty(n, np.float32), np.empty(n, np.float32)
        found.load(NEW, theta, momentum)
        np.testing.assert_array_equal((theta, momentum), arrays(n, 9))


@pytest.mark.parametrize("n", [3, 4, 7])
def test_a_loss_of_power_at_any_step_leaves_the_old_versions_and_a_sealed_file(n: int) -> None:
    whole = CrashDisk()
    ring = ring_on(whole)
    start(ring)
    before = len(whole.log)
    stream(ring, n)
    n_images = 0
    for steps in range(before, len(whole.log) + 1):
        disk, sealed = CrashDisk(None, steps), False
        try:
            ring = ring_on(disk)
            start(ring)
            stream(ring, n)
            sealed = True
        except PowerLossError:
            assert steps < len(whole.log)
        for image in disk.images():
            n_images += 1
            here = {(info.version, info.committed) for info in ring_on(CrashDisk(image)).infos()}
            assert (OLD.version, True) in here
            assert not sealed or (NEW.version, False) in here
    assert n_images > 20


def test_nothing_else_takes_the_place_of_a_stream_or_of_what_it_sealed() -> None:
    ring = ring_on(CrashDisk())
    start(ring)
    opened = ring.begin_stream(NEW, 4)
    other = replace(OLD, version=Version(1, 5), round=RoundId(1, 6))
    with pytest.raises(Refused, match="all 3 snapshot files"):
        ring.write_shadow(other, *arrays(4, 1))
    for tensor in arrays(4, 9):
        opened.write(bytes_of(tensor))
    ring.seal_stream(opened, NEW)
    with pytest.raises(Refused, match="all 3 snapshot files"):
        ring.write_shadow(other, *arrays(4, 1))
    ring.drop_shadow(NEW)
    ring.write_shadow(other, *arrays(4, 1))


def test_room_for_a_whole_ring_is_asked_for_first() -> None:
    disk = CrashDisk()
    ring = ring_on(disk)
    start(ring)
    steps = len(disk.log)
    with pytest.raises(Refused, match=r"3 snapshot files of .* and 12345 are free") as refused:
        ring.begin_stream(NEW, 5000)
    assert refused.value.code is RefusalCode.DISK
    assert len(disk.log) == steps, "nothing was touched"
