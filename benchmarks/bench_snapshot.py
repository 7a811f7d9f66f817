"""What a slave's snapshot costs: against a plain overwrite, and to the round that goes on meanwhile.

The floor is an overwrite of a file of as many bytes that is there already, 4 MiB at a time from the same memory, and
one fsync. A snapshot is that and its checksums, the manifest that it replaces, its own, and their fsyncs: once as a
round writes it that waits for it (durability "sync"), once as it is written during the rounds ("async": past the page
cache). All turn by turn, since a disk's pace moves.

The second table has a whole slave (its engine, without a network) go through rounds of one push: quiet ones, with no
snapshot under way; ones that begin while the snapshot of the version before is being written (durability "async"); and
ones that write their own before they are decided ("sync"). stall: what a round takes longer than a quiet one.
Nothing here judges a number.

    python benchmarks/bench_snapshot.py [--elems N] [--repeats R] [--directory DIR] [--quick] [--json]

ratio_to_overwrite = time of the floor / time of the snapshot.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dips.core.allocator import zeros
from dips.core.clock import SystemClock
from dips.core.ids import ClusterId, Incarnation, PushId, RoundId, SlaveId, Version
from dips.core.layout import Layout, Parameter
from dips.core.messages import (
    CommandBody,
    Commit,
    Configure,
    Flipped,
    Hello,
    OpenStaging,
    PlacementSpec,
    Prepare,
    Prepared,
    Promised,
    Ready,
    Settings,
    SlaveAddress,
    SlaveBody,
    SlaveCommand,
    SlaveMessage,
    SnapshotInfo,
    Staged,
    StagedPush,
    Welcome,
)
from dips.core.observe.tape import Tape
from dips.core.placement import Placement, shard_bytes_needed
from dips.core.protocol import PROTOCOL_MIN, PROTOCOL_VERSION
from dips.slave.data_server import DataServer
from dips.slave.ring import Ring, SnapshotStore
from dips.slave.shell import SlaveShell
from dips.slave.snapshot_files import file_bytes
from dips.slave.state import effects
from dips.slave.state.slave import SlaveMachine
from dips.slave.state.staging import Slot

F32 = NDArray[np.float32]
PLAIN_PIECE_BYTES = 4 << 20
KEPT = 2
PINS = 2
WARM_UP = KEPT + 2
"""Until every file of the ring was written once: one that is only claimed is slower to write."""

RUN, SLAVE = "bench", "s0"
PUSH = "a"
WAIT_S = 300.0


@dataclass(frozen=True)
class Written:
    """Medians. spread: (slowest - fastest) / median of the repeats' times. cpu_s_per_gb: of this process."""

    name: str
    n_bytes: int
    median_s: float
    spread: float
    gbytes_per_s: float
    cpu_s_per_gb: float
    ratio_to_overwrite: float


@dataclass(frozen=True)
class Rounds:
    """PREPARE to PREPARED and COMMIT to FLIPPED of one round, seconds; stall_s: beyond what a quiet round takes."""

    name: str
    prepare_s: float
    commit_s: float
    spread: float
    stall_s: float


class Clocked:
    """Wall and processor time of each call, by name."""

    def __init__(self) -> None:
        self.wall_s: dict[str, list[float]] = {}
        self.cpu_s: dict[str, list[float]] = {}

    def time(self, name: str, work: Callable[[], object]) -> None:
        wall_s, cpu_s = time.perf_counter(), _cpu_s()
        work()
        self.wall_s.setdefault(name, []).append(time.perf_counter() - wall_s)
        self.cpu_s.setdefault(name, []).append(_cpu_s() - cpu_s)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def filled(n_elems: int) -> F32:
    """(n,) float32 in pages as a slave's memory has them."""
    array = zeros(n_elems)
    array[:] = np.random.default_rng(0).standard_normal(n_elems, np.float32)
    return array


def written(n_elems: int, repeats: int, directory: Path) -> list[Written]:
    """Snapshots of n_elems parameters and plain overwrites of as many bytes, turn by turn."""
    n_bytes, clocked = file_bytes(n_elems), Clocked()
    arrays = (filled(n_elems), filled(n_elems))
    plain = directory / "plain"
    with plain.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, n_bytes)
    with closing(SnapshotStore(directory, RUN, SLAVE, KEPT)) as store:
        store.scan()
        store.ring.make(n_elems)
        for n in range(repeats + WARM_UP):
            clocked.time("overwrite + fsync", partial(_overwrite, plain, arrays))
            clocked.time("snapshot, sync", partial(_in_a_round, store.ring, _info(2 * n), arrays))
            clocked.time("snapshot, async", partial(store.ring.write_committed, _info(2 * n + 1), *arrays, b"{}"))
    plain.unlink()
    return _compared(clocked, n_bytes)


def _info(v: int) -> SnapshotInfo:
    return SnapshotInfo(Version(1, v), RoundId(1, v + 1), b"l", b"p", b"d", True, b"h")


def _in_a_round(ring: Ring, info: SnapshotInfo, arrays: tuple[F32, F32]) -> None:
    ring.write_shadow(info, *arrays)
    ring.commit(info, b"h", b"{}")


def _overwrite(path: Path, arrays: tuple[F32, F32]) -> None:
    handle = os.open(path, os.O_WRONLY)
    at = file_bytes(0)
    try:
        for array in arrays:
            data = array.view(np.uint8).data
            while data:
                done = os.pwrite(handle, data[:PLAIN_PIECE_BYTES], at)
                at, data = at + done, data[done:]
        os.fsync(handle)
    finally:
        os.close(handle)


def _compared(clocked: Clocked, n_bytes: int) -> list[Written]:
    out: list[Written] = []
    floor_s = statistics.median(clocked.wall_s["overwrite + fsync"][WARM_UP:])
    for name, times in clocked.wall_s.items():
        times_s, cpu_s = times[WARM_UP:], statistics.median(clocked.cpu_s[name][WARM_UP:])
        median_s = statistics.median(times_s)
        spread = (max(times_s) - min(times_s)) / median_s
        rate = n_bytes / median_s / 1e9
        out.append(Written(name, n_bytes, median_s, spread, rate, cpu_s / n_bytes * 1e9, floor_s / median_s))
    return out


class Slave:
    """A slave's engine on its own: commands go in, and what it says comes out of a queue."""

    def __init__(self, directory: Path, layout: Layout, durability: str) -> None:
        self._layout = layout
        self._settings = Settings(durability=durability)
        self._store = SnapshotStore(directory, RUN, SLAVE, KEPT)
        self._store.scan()
        self._said: asyncio.Queue[SlaveBody] = asyncio.Queue()
        self._data = DataServer("127.0.0.1", 0, RUN, self._settings.chunk_bytes, lambda event: None, self._crashed)
        room = shard_bytes_needed((block.n_elems for block in layout.blocks), self._settings.chunk_bytes, 1, PINS)
        limits = (room, self._settings.chunk_bytes, self._store.promise.epoch, self._store.ring.infos())
        state = SlaveMachine(RUN, SLAVE, self._data.endpoint, *limits)
        self._tape = Tape(None, "slave", SLAVE)
        self._engine = SlaveShell(state, SLAVE, room, self._store, self._data, self._tape, SystemClock())
        self._engine.send = self._heard
        self.v = -1

    def _heard(self, message: SlaveMessage) -> None:
        self._said.put_nowait(message.body)

    def _crashed(self, error: BaseException) -> None:
        self._engine._loop.call_soon_threadsafe(self._engine.fail, error)

    async def start(self) -> None:
        """Attached, configured, and once around its ring."""
        await self._engine.warm_up()
        self._data.start()
        self._engine.handle(effects.Linked())
        await self._said.get()
        self._tell(Welcome(Hello(PROTOCOL_MIN, PROTOCOL_VERSION), self._settings))
        await self._expect(Promised)
        placement = Placement((SlaveId(SLAVE),), tuple(0 for _ in self._layout.blocks))
        spec = PlacementSpec(
            (SlaveAddress(SLAVE, self._data.endpoint),), placement.slave_of_block, placement.placement_hash
        )
        self._tell(Configure(self._layout, self._layout.layout_hash, spec, 1, pinned_versions=PINS))
        await self._expect(Ready)
        for _ in range(WARM_UP):
            await self.round()
            await self.saved()

    async def close(self) -> None:
        self._data.stop()
        await self._engine.close()
        self._tape.close()
        self._store.close()

    async def round(self) -> tuple[float, float]:
        """One round of one push; its bytes are what is in staging. Returns seconds of PREPARE and of COMMIT."""
        self.v += 1
        push = PushId(ClusterId(PUSH), Incarnation(1, 1), self.v + 1)
        self._tell(OpenStaging(push, 1, 0, None, fence=0, tokens=1))
        self._engine.handle(effects.PushStaged(Slot(push, 1, 0, opening=self.v + 1), b"digest"))
        await self._expect(Staged)
        before = Version(1, self.v - 1) if self.v else None
        round_id, version = RoundId(1, self.v + 1), Version(1, self.v)
        began_s = time.perf_counter()
        self._tell(
            Prepare(round_id, before, version, (StagedPush(push, 1),), (1.0,), 1.0, 0.7, 0.8, 0.8, gradient_weight=1.0)
        )
        await self._expect(Prepared)
        prepared_s = time.perf_counter()
        self._tell(Commit(round_id, version, b"hash", b"{}"))
        await self._expect(Flipped)
        return prepared_s - began_s, time.perf_counter() - prepared_s

    async def saved(self) -> None:
        """Wait until the newest version is on disk."""
        async with asyncio.timeout(WAIT_S):
            while self.saving:  # noqa: ASYNC110  # the state machine is asked from outside: it knows no waiter
                await asyncio.sleep(0.002)

    @property
    def saving(self) -> bool:
        return self._engine.state.shard.saving.durable != Version(1, self.v)

    def _tell(self, body: CommandBody) -> None:
        command = SlaveCommand(RUN, 1, Incarnation(1, 1), "bench", body)
        self._engine.handle(command)

    async def _expect(self, kind: type[SlaveBody]) -> None:
        body = await asyncio.wait_for(self._said.get(), WAIT_S)
        if not isinstance(body, kind):
            raise RuntimeError(f"the slave was to say {kind.__name__}, it says {body}")


async def rounds(n_elems: int, repeats: int, directory: Path) -> list[Rounds]:
    """Quiet rounds and rounds during a snapshot turn by turn, then rounds that wait for their own."""
    layout = Layout((Parameter("w", (n_elems,), "float32", "w"),))
    times: dict[str, list[tuple[float, float]]] = {"quiet": [], "during a snapshot": [], "sync": []}
    slave = Slave(directory / "async", layout, "async")
    await slave.start()
    for _ in range(repeats):
        await slave.saved()
        times["quiet"].append(await slave.round())
        if not slave.saving:
            raise RuntimeError("the snapshot was written before a round could begin: give more --elems")
        times["during a snapshot"].append(await slave.round())
    await slave.saved()
    await slave.close()
    slave = Slave(directory / "sync", layout, "sync")
    await slave.start()
    for _ in range(repeats):
        times["sync"].append(await slave.round())
    await slave.close()
    quiet_s = statistics.median(map(sum, times["quiet"]))
    return [_rounds(name, found, quiet_s) for name, found in times.items()]


def _rounds(name: str, times_s: list[tuple[float, float]], quiet_s: float) -> Rounds:
    prepare_s, commit_s = (statistics.median(column) for column in zip(*times_s, strict=True))
    whole_s = [sum(pair) for pair in times_s]
    median_s = statistics.median(whole_s)
    return Rounds(name, prepare_s, commit_s, (max(whole_s) - min(whole_s)) / median_s, median_s - quiet_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elems", type=int, default=50_000_000, help="parameters of the slave (default 50 million)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure; default: a temporary one")
    parser.add_argument("--quick", action="store_true", help="8 million parameters, 2 repeats")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    n_elems, repeats = (8_000_000, 2) if arguments.quick else (arguments.elems, arguments.repeats)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        files = written(n_elems, repeats, Path(folder))
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        turns = asyncio.run(rounds(n_elems, repeats, Path(folder)))
    setting = {"elems": n_elems, "repeats": repeats, "cpus": os.cpu_count(), "machine": platform.machine()}
    if arguments.json:
        found = {"setting": setting, "files": [asdict(r) for r in files], "rounds": [asdict(r) for r in turns]}
        print(json.dumps(found, indent=2))
        return 0
    print(", ".join(f"{key} {value}" for key, value in setting.items()))
    print(f"{'file':<26}{'MB':>7}{'ms':>8}{'spread':>8}{'GB/s':>7}{'CPU s/GB':>10}{'ratio_to_overwrite':>20}")
    for f in files:
        cost = f"{f.gbytes_per_s:>7.2f}{f.cpu_s_per_gb:>10.3f}{f.ratio_to_overwrite:>20.2f}"
        print(f"{f.name:<26}{f.n_bytes / 1e6:>7.0f}{1e3 * f.median_s:>8.0f}{f.spread:>8.0%}{cost}")
    print(f"{'round':<26}{'prepare ms':>12}{'commit ms':>12}{'spread':>8}{'stall ms':>12}")
    for r in turns:
        parts = f"{1e3 * r.prepare_s:>12.1f}{1e3 * r.commit_s:>12.1f}{r.spread:>8.0%}{1e3 * r.stall_s:>12.1f}"
        print(f"{r.name:<26}{parts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
