"""Several ranks of one cluster push and pull their shares over connections of their own: real sockets, real data ports.

Every rank has its carrier in a thread of its own, as its process would have it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from support.keyed_port import RUN, V0, KeyedPort, fresh_context, push_id, settle

from dips.core.clock import SystemClock
from dips.core.errors import ConfigError
from dips.core.layout import FLOAT32_BYTES, Block, Chunk, Layout, Parameter, Share, chunks_of, digest_of_array
from dips.core.messages import AllowedKey, KeyRole, PlacementSpec, PullGrant, SlaveAddress, Ticket
from dips.core.net.carriers import Common, LoopChoice, carry_pull, carry_push
from dips.core.net.payloads import F32, Difference, ParameterSource
from dips.core.net.transfer import PullTransfer, PushTransfer, Transfer, TransferSettings, chunks_by_slave
from dips.core.net.zmq_sockets import CurvePair
from dips.core.wire import Codec
from dips.slave.data_server import LoopName
from dips.worker.data import window_of_rank
from dips.worker.parallel.meetings import PartEnd, combined
from dips.worker.state.effects import Done
from dips.worker.vectors import Live

CHUNK_BYTES = 4096
SIZES = (70_000, 1_500, 33_333, 1)
LAYOUT = Layout(tuple(Parameter(f"w{i}", (n,), "float32", f"w{i}") for i, n in enumerate(SIZES)), 9_000)
"""13 blocks, 116 chunks, few of them full blocks of full chunks."""
ORDER = tuple(reversed(range(len(LAYOUT.blocks))))
SETTINGS = TransferSettings(CHUNK_BYTES, 6, silence_s=20.0, stall_s=60.0)
CLUSTER = "a"
THETA, PUSHED, RESIDUAL = np.random.default_rng(3).standard_normal((3, LAYOUT.n_elems), np.float32)


def of_blocks(flat: F32, blocks: Sequence[Block]) -> F32:
    return np.concatenate([flat[block.start_elem : block.stop_elem] for block in blocks])


def of_share(flat: F32, share: Share) -> F32:
    return np.concatenate([flat[:0], *(flat[start:stop] for start, stop in share.runs())])


def shares_of(n_ranks: int, layout: Layout = LAYOUT, chunk_bytes: int = CHUNK_BYTES) -> list[Share]:
    """Chunks dealt by chance."""
    chunks = chunks_of(layout.blocks, chunk_bytes)
    owners = np.random.default_rng(n_ranks).integers(0, n_ranks, len(chunks))

    def run(chunk: Chunk) -> tuple[int, int]:
        begin = layout.blocks[chunk.block_id].start_elem + chunk.offset_bytes // FLOAT32_BYTES
        return begin, begin + chunk.length_bytes // FLOAT32_BYTES

    return [
        Share.of_runs(run(c) for c, owner in zip(chunks, owners, strict=True) if owner == rank)
        for rank in range(n_ranks)
    ]


@dataclass
class Run:
    """Ports, and ranks with keys of their own if there are any."""

    ports: list[KeyedPort]
    curves: list[CurvePair | None]
    shares: list[Share]
    loop: LoopChoice
    layout: Layout = LAYOUT
    settings: TransferSettings = SETTINGS

    @property
    def placement(self) -> PlacementSpec:
        n = len(self.ports)
        addresses = (
            SlaveAddress(f"s{i}", port.server.endpoint, b"" if port.curve is None else port.curve.public)
            for i, port in enumerate(self.ports)
        )
        return PlacementSpec(tuple(addresses), tuple(block.block_id % n for block in self.layout.blocks), b"")

    def common(self, rank: int) -> Common:
        return Common(
            RUN, 1, "cause", self.layout, self.settings, curve=self.curves[rank], loop=self.loop,
            share=self.shares[rank], rank=rank,
        )  # fmt: skip

    def together(self, carry: Callable[[int], Transfer], ranks: Sequence[int]) -> list[Transfer]:
        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(carry, ranks))

    def push(
        self, source: Callable[[int], F32 | ParameterSource], ranks: Sequence[int], *, wire: Codec = Codec.F32,
        difference: Callable[[int], Difference] | None = None,
    ) -> list[Transfer]:  # fmt: skip
        ticket = Ticket(1, self.placement, ORDER, wire=wire)

        def carry(rank: int) -> PushTransfer:
            with fresh_context() as context:
                return carry_push(
                    context, self.common(rank), source(rank), push_id(CLUSTER), ticket, SystemClock(),
                    threading.Event(), difference=None if difference is None else difference(rank),
                )  # fmt: skip

        return self.together(carry, ranks)

    def chunks(self) -> dict[str, list[Chunk]]:
        return chunks_by_slave(self.layout, self.placement, ORDER, self.settings.chunk_bytes)

    def staged(self) -> dict[str, bytes]:
        """The digests that the ports found."""
        for port in self.ports:
            settle(port.server)
        return {f"s{i}": port.staged[push_id(CLUSTER)] for i, port in enumerate(self.ports) if port.staged}


@contextmanager
def run_of(
    n_ranks: int, n_slaves: int, loop: LoopChoice, of_slave: LoopName = "python", *, with_keys: bool = False, wire:
    Codec = Codec.F32,
) -> Iterator[Run]:  # fmt: skip
    def pair() -> CurvePair | None:
        return CurvePair.new() if with_keys else None

    with ExitStack() as stack:
        ports = [stack.enter_context(port_of(at, n_slaves, of_slave, pair())) for at in range(n_slaves)]
        run = Run(ports, [pair() for _ in range(n_ranks)], shares_of(n_ranks), loop)
        for port in ports:
            if with_keys:
                port.server.do(
                    port.server.port.set_allowed,
                    [AllowedKey(KeyRole.CLUSTER, CLUSTER, curve.public) for curve in run.curves if curve is not None],
                )
            port.open(CLUSTER, wire)
        yield run


def port_of(at: int, n_slaves: int, of_slave: LoopName, curve: CurvePair | None = None) -> KeyedPort:
    blocks = [block for block in LAYOUT.blocks if block.block_id % n_slaves == at]
    return KeyedPort(curve, loop=of_slave, blocks=blocks, theta=of_blocks(THETA, blocks), chunk_bytes=CHUNK_BYTES)


def whole_digests(flat: F32, n_slaves: int) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for at in range(n_slaves):
        blocks = [block for block in LAYOUT.blocks if block.block_id % n_slaves == at]
        found[f"s{at}"] = digest_of_array(of_blocks(flat, blocks), blocks, CHUNK_BYTES)
    return found


def ends_of(transfers: Sequence[Transfer]) -> list[PartEnd]:
    return [PartEnd(1, rank, transfer.failure, checksums=transfer.known()) for rank, transfer in enumerate(transfers)]


loops = pytest.mark.parametrize(("loop", "of_slave"), [("python", "python"), ("compiled", "compiled")])


@loops
@pytest.mark.parametrize(("n_ranks", "n_slaves"), [(2, 1), (3, 2), (4, 3)])
@pytest.mark.parametrize("with_keys", [False, True])
def test_push_and_pull(loop: LoopChoice, of_slave: LoopName, n_ranks: int, n_slaves: int, with_keys: bool) -> None:
    with run_of(n_ranks, n_slaves, loop, of_slave, with_keys=with_keys) as run:
        pushed = run.push(lambda rank: of_share(PUSHED, run.shares[rank]), range(n_ranks))
        expected = whole_digests(PUSHED, n_slaves)
        assert [transfer.failure for transfer in pushed] == [""] * n_ranks
        assert run.staged() == expected
        end = combined(ends_of(pushed), n_ranks, run.chunks())
        assert isinstance(end, Done)
        assert isinstance(end.result, tuple)
        assert dict(end.result) == expected
        for rank, transfer in enumerate(pushed):
            carried = sum(slave.carried_bytes for slave in transfer.moved().values())
            assert carried == FLOAT32_BYTES * run.shares[rank].n_elems, "and nothing twice"

        promised = whole_digests(THETA, n_slaves)
        grant = PullGrant(V0, 1, 1, run.placement, ORDER, tuple(promised.items()), 0, 1, None, CHUNK_BYTES, 1, RUN)
        into = [np.zeros(share.n_elems, np.float32) for share in run.shares]

        def fetch(rank: int) -> PullTransfer:
            with fresh_context() as context:
                return carry_pull(context, run.common(rank), into[rank], grant, SystemClock(), threading.Event())

        pulled = run.together(fetch, range(n_ranks))
        for rank, share in enumerate(run.shares):
            assert pulled[rank].done, pulled[rank].failure
            assert into[rank].tobytes() == of_share(THETA, share).tobytes()
        assert isinstance(combined(ends_of(pulled), n_ranks, run.chunks(), promised), Done)


@pytest.mark.parametrize("loop", ["python", "compiled"])
@pytest.mark.parametrize("wire", [Codec.BF16, Codec.INT8, Codec.INT4])
def test_differences_of_shares_are_those_of_the_whole(loop: LoopChoice, wire: Codec) -> None:
    """A chunk's bytes are a function of its own elements, so it does not matter who sends it."""

    def pushed_by(shares: list[Share]) -> tuple[dict[str, bytes], list[bytes]]:
        with run_of(len(shares), 2, loop, wire=wire) as run:
            run.shares = shares
            run.curves = [None] * len(shares)

            def difference(rank: int) -> Difference:
                return Difference(of_share(THETA, shares[rank]), of_share(1e-3 * RESIDUAL, shares[rank]))

            transfers = run.push(
                lambda rank: of_share(PUSHED, shares[rank]), range(len(shares)), wire=wire, difference=difference
            )
            assert all(transfer.done for transfer in transfers)
            return run.staged(), [port.landed(0).tobytes() for port in run.ports]

    assert pushed_by(shares_of(3)) == pushed_by([Share.whole(LAYOUT)])


@pytest.mark.parametrize("loop", ["python", "compiled"])
def test_live_parameters_of_a_share_are_sent_from_where_they_lie(loop: LoopChoice) -> None:
    with run_of(3, 2, loop) as run:
        parts = [np.array_split(of_share(PUSHED, share), 5) for share in run.shares]
        transfers = run.push(lambda rank: Live(parts[rank]), range(3))
        assert all(transfer.done for transfer in transfers)
        assert run.staged() == whole_digests(PUSHED, 2)


def test_a_share_of_other_chunks_is_refused_before_anything_is_sent() -> None:
    placement = PlacementSpec((SlaveAddress("s0", "tcp://127.0.0.1:1"),), (0,) * len(LAYOUT.blocks), b"")
    common = Common(RUN, 1, "cause", LAYOUT, SETTINGS, share=Share.of_runs([(0, 7)]))
    ticket = Ticket(1, placement, ORDER)
    with fresh_context() as context, pytest.raises(ConfigError, match="whole chunks of 4096 bytes"):
        carry_push(
            context, common, np.zeros(7, np.float32), push_id(CLUSTER), ticket, SystemClock(), threading.Event()
        )  # fmt: skip


# ---- on the data threads of ranks ----


@pytest.mark.parametrize(
    ("window_chunks", "n_ranks", "expected"),
    [(64, 1, 64), (64, 4, 16), (64, 16, 4), (64, 100, 1), (2, 1, 2), (3, 2, 1)],
)
def test_ranks_divide_the_window(window_chunks: int, n_ranks: int, expected: int) -> None:
    assert window_of_rank(window_chunks, n_ranks) == expected
