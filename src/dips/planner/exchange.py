"""Times the exchanges between a pipeline's replicas: weights before a stage's first operation, gradients after its
last; with ZeRO stages 2 and 3 those of every microbatch.

CrossPipe's Figure 7 (arXiv:2507.00217): with ZeRO stage 1 an all-gather of weights precedes the first F of each stage,
and a reduce-scatter of gradients follows its last W; without, an all-reduce follows. An exchange is a message like
others: it occupies its resource for a time, its latency does not, and devices compute meanwhile. Its resource is the
network of its device, or the link between two sites that all stages there share; either way exchanges with the same
resource go one after the other, all-gathers in the order of the stages (which is that of their first F), gradients in
the order in which they are ready. Messages of the pipeline use other resources: inside a site each pair of stages has
its own, and a link between sites carries one or the other.

An exchange may be cut into equal buckets, as DDP, Megatron-LM and FSDP cut it (arXiv:2006.15704, section 3.2.3): a
bucket of gradients leaves when the layers that fill it have their gradients, while the stage's last operation computes
those of the others; and the first F begins with the layers whose weights are there. Buckets follow each other without
a pause, so k buckets of a stage overlap (k - 1) / k of that operation, or of the exchange where this is shorter.

ZeRO stages 2 and 3 (arXiv:1910.02054) keep shards only, so layers exchange for every microbatch, as FSDP does
(arXiv:2304.11277): stage 2 reduce-scatters the gradients of each layer after its W (or B), stage 3 also all-gathers the
weights of each layer before it computes F and D (or B). W needs no weights: a gradient of weights is a product of an
input and an output's gradient. So stage 3 sends 3 times the weights for a microbatch (ZeRO, section 7.2.2). Each device
plays its layers on its own network, one exchange at a time, in the order in which they are ready:

* The all-gather of a layer may begin when the device begins the layer before it (of this operation or of the one
  before): a device holds the weights of two layers at most. The layer waits until they have arrived.
* The reduce-scatter of a layer is ready when the layer has ended and the reduce-scatter before it has arrived; the
  device goes on then: it holds the gradients of two layers at most.

All of this is local to a device: the order of its operations says the order on its network, whatever their times are,
since the all-gather of layer q + 1 is ready when layer q begins, the reduce-scatter of layer q when it has ended, and
the all-gather of layer q + 2 not before layer q + 1 begins. So playing layer after layer gives the exact times of these
rules, without events of the network.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from dips.core.errors import ConfigError
from dips.planner.ir import Kind


class Exchange(NamedTuple):
    """The costs of one stage's exchange. All 0: no exchange."""

    resource: int
    gather_ns: int  # time on its resource, before the stage
    reduce_ns: int  # and after it
    gather_latency_ns: int = 0  # weights arrive so much later
    reduce_latency_ns: int = 0  # and gradients
    buckets: int = 1

    def overlap_ns(self, before: bool, computes_ns: int) -> int:
        """How long buckets are on their way while the operation next to the exchange, of that length, computes."""
        return min(self.gather_ns if before else self.reduce_ns, computes_ns) * (self.buckets - 1) // self.buckets

    @property
    def gathers(self) -> bool:
        return bool(self.gather_ns or self.gather_latency_ns)

    @property
    def reduces(self) -> bool:
        return bool(self.reduce_ns or self.reduce_latency_ns)


class Exchanged(NamedTuple):
    """One simulated exchange."""

    stage: int
    before: bool  # weights; else gradients
    resource: int
    start_ns: int  # it occupied its resource from here
    freed_ns: int  # to here
    ends_ns: int


class ShardExchange(NamedTuple):
    """What each layer of one stage exchanges for every microbatch, with ZeRO stages 2 and 3; layers count as equal."""

    resource: int  # the network of its device
    layers: int  # of the stage
    gather_ns: int  # time on the network of the weights of one layer; 0 with stage 2
    reduce_ns: int  # and of its gradients
    gather_latency_ns: int = 0
    reduce_latency_ns: int = 0


class LayeredOp(NamedTuple):
    """One operation, or one part of it, whose layers exchange."""

    stage: int
    layers: int
    gathers: bool
    reduces: bool
    costs: ShardExchange


def layered(stage: int, kind: Kind, part: int, parts: int, costs: ShardExchange) -> LayeredOp:
    """How an operation exchanges. Parts have whole layers; where there are more parts than layers some have none."""
    gathers = kind is not Kind.W and bool(costs.gather_ns or costs.gather_latency_ns)
    reduces = kind in (Kind.W, Kind.B) and bool(costs.reduce_ns or costs.reduce_latency_ns)
    whole, rest = divmod(costs.layers, parts)
    # Weights come for the first part of a layer, gradients leave after the last one.
    layers = whole + ((parts - 1 - part if reduces and not gathers else part) < rest)
    return LayeredOp(stage, max(1, layers), gathers and layers > 0, reduces and layers > 0, costs)


class LayerPlayer:
    """Plays the layers of one device's operations, one after another, on its network. overlapped: exchanges go on while
    the device computes; else it waits for each."""

    def __init__(self, free_ns: int, overlapped: bool) -> None:
        self.log = ShardLog()
        self.waited_ns = 0  # inside of operations: for weights of a layer that is not the first, and for gradients
        self._free_ns, self._overlapped = free_ns, overlapped
        self._began_ns = 0  # when the last layer began
        self._reduced_ns = 0  # when the last reduce-scatter has arrived
        self._leaves: tuple[int, LayeredOp] | None = None  # a reduce-scatter that is ready at a time, not played yet

    def play(self, op: LayeredOp, ready_ns: int, lasts_ns: int) -> tuple[int, int]:
        """When an operation of so much computation begins and ends, if its device and its input are ready."""
        now = start = ready_ns
        whole, rest = divmod(lasts_ns, op.layers)
        gathers, reduces, overlapped, cost = op.gathers, op.reduces, self._overlapped, op.costs
        for layer in range(op.layers):
            if gathers:
                at = self._began_ns if overlapped else now
                if at < self._free_ns:
                    at = self._free_ns
                freed = self._free_ns = at + cost.gather_ns
                self.log.add(op.stage, True, at, freed, freed + cost.gather_latency_ns)
                now = max(now, freed + cost.gather_latency_ns)
            if self._leaves is not None:
                self.flush()
            if layer == 0:
                start = now
            self._began_ns = now
            now += whole + (layer < rest)
            if reduces:
                now = max(now, self._reduced_ns)
                self._leaves = now, op
                if not overlapped:
                    self.flush()
                    now = self._reduced_ns
        self.waited_ns += now - start - lasts_ns
        return start, now

    def flush(self) -> None:
        """Play the reduce-scatter that is ready: it follows the all-gather of the layer after its own."""
        if self._leaves is not None:
            (ready_ns, op), self._leaves = self._leaves, None
            start = max(ready_ns, self._free_ns)
            self._free_ns = start + op.costs.reduce_ns
            self._reduced_ns = self._free_ns + op.costs.reduce_latency_ns
            self.log.add(op.stage, False, start, self._free_ns, self._reduced_ns)


class ShardLog:
    """What the layers of one device exchanged, in the order of its network: three numbers for each exchange, since a
    large plan has millions of them."""

    def __init__(self) -> None:
        self._numbers = array("q")  # 2 x stage + (1 for weights), start, end on the network
        self.first_ns = 0  # start of the first one
        self.last_ns = 0  # when all have arrived

    def add(self, stage: int, before: bool, start_ns: int, freed_ns: int, ends_ns: int) -> None:
        if not self._numbers:
            self.first_ns = start_ns
        self._numbers.extend((2 * stage + before, start_ns, freed_ns))
        if ends_ns > self.last_ns:
            self.last_ns = ends_ns

    def __len__(self) -> int:
        return len(self._numbers) // 3

    def rows(self, shards: Sequence[ShardExchange]) -> Iterator[Exchanged]:
        """The exchanges, with their costs."""
        for at in range(0, len(self._numbers), 3):
            code, start_ns, freed_ns = self._numbers[at : at + 3]
            one, before = shards[code >> 1], bool(code & 1)
            latency_ns = one.gather_latency_ns if before else one.reduce_latency_ns
            yield Exchanged(code >> 1, before, one.resource, start_ns, freed_ns, freed_ns + latency_ns)


def least_ns(op: LayeredOp, lasts_ns: int, overlapped: bool) -> int:
    """The least time from the begin to the end of an operation of so much computation, on an idle network."""
    alone = LayerPlayer(0, overlapped)
    start, end = alone.play(op, op.costs.gather_ns + op.costs.gather_latency_ns, lasts_ns)
    return end - start


def gathered(exchanges: Sequence[Exchange]) -> list[Exchanged]:
    """The all-gathers, from time 0 on."""
    found, free = [], dict[int, int]()
    for stage, one in enumerate(exchanges):
        if one.gathers:
            start = free.get(one.resource, 0)
            freed = free[one.resource] = start + one.gather_ns
            found.append(Exchanged(stage, True, one.resource, start, freed, freed + one.gather_latency_ns))
    return found


def gates(exchanges: Sequence[Exchange], first_ns: Sequence[int] | None) -> list[int]:
    """When the first F of each stage may start. first_ns[s]: how long it takes; None: all wait until all weights have
    arrived."""
    found = [0] * len(exchanges)
    for one in gathered(exchanges):
        found[one.stage] = one.ends_ns
    if first_ns is None:
        return [max(found, default=0)] * len(exchanges)
    return [at - one.overlap_ns(True, ns) for at, one, ns in zip(found, exchanges, first_ns, strict=True)]


def reduced(exchanges: Sequence[Exchange], ready: Sequence[int], last_ns: Sequence[int] | None) -> list[Exchanged]:
    """The exchanges of gradients. ready[s]: when stage s has ended. last_ns[s]: how long its last operation took; None:
    all wait for the last stage."""
    if last_ns is None:
        at = [max(ready)] * len(ready)
    else:
        at = [end - one.overlap_ns(False, ns) for end, one, ns in zip(ready, exchanges, last_ns, strict=True)]
    found, free = [], dict[int, int]()
    for stage in sorted(range(len(exchanges)), key=lambda stage: (at[stage], stage)):
        one = exchanges[stage]
        if one.reduces:
            start = max(at[stage], free.get(one.resource, 0))
            freed = free[one.resource] = start + one.reduce_ns
            found.append(Exchanged(stage, False, one.resource, start, freed, freed + one.reduce_latency_ns))
    return found


def check_exchanges(
    done: Iterable[Exchanged], exchanges: Sequence[Exchange], first: Sequence[int], last: Sequence[int]
) -> None:
    """Check the exchanges. first[s], last[s]: when stage s needs all of its weights, and from when on its gradients may
    leave: start of the first operation and end of the last one, but for what buckets overlap.

    Raises ConfigError, which names the stage, for an exchange that is missing, doubled or of another length, for one
    that does not precede or follow its stage, and for two at a time on one resource.
    """
    rows = list(done)
    wanted = sorted(
        (stage, before)
        for stage, one in enumerate(exchanges)
        for before, there in ((True, one.gathers), (False, one.reduces))
        if there
    )
    if sorted((row.stage, row.before) for row in rows) != wanted:
        raise ConfigError(f"{len(rows)} exchanges between replicas instead of {len(wanted)}: give one for each stage")
    for row in rows:
        one = exchanges[row.stage]
        lasts = (one.gather_ns, one.gather_latency_ns) if row.before else (one.reduce_ns, one.reduce_latency_ns)
        if (row.freed_ns - row.start_ns, row.ends_ns - row.freed_ns, row.resource) != (*lasts, one.resource):
            raise ConfigError(f"stage {row.stage}: its exchange {row} does not have its cost ({one})")
        if row.before and row.ends_ns > first[row.stage]:
            raise ConfigError(
                f"stage {row.stage} needs its weights at {first[row.stage]} ns, they arrive at {row.ends_ns} ns"
            )
        if not row.before and row.start_ns < last[row.stage]:
            raise ConfigError(
                f"stage {row.stage} has gradients to send at {last[row.stage]} ns, they leave at {row.start_ns} ns"
            )
    _check_turns(rows)


def _check_turns(rows: Sequence[Exchanged]) -> None:
    """Raises ConfigError for two at a time on one network."""
    for row, after in pairwise(sorted(rows, key=lambda row: (row.resource, row.start_ns, row.freed_ns))):
        if row.resource == after.resource and after.start_ns < row.freed_ns:
            raise ConfigError(f"stages {row.stage} and {after.stage} exchange at the same time on one network")


def check_shards(rows: Sequence[Exchanged], shards: Sequence[ShardExchange], microbatches: int) -> None:
    """Check the exchanges of every microbatch: weights for F and for D or B, gradients after W or B.

    Raises ConfigError for exchanges that are missing, and for two at a time on one network.
    """
    for stage, one in enumerate(shards):
        for before, each in (
            (True, 2 if one.gather_ns or one.gather_latency_ns else 0),
            (False, int(bool(one.reduce_ns or one.reduce_latency_ns))),
        ):
            found = sum(row.stage == stage and row.before is before for row in rows)
            if found != one.layers * microbatches * each:
                what = "weights" if before else "gradients"
                raise ConfigError(
                    f"stage {stage}: {found} exchanges of {what} instead of {one.layers * microbatches * each}"
                )
    _check_turns(rows)
