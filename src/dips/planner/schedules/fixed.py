"""GPipe, 1F1B, ZB-H1, interleaved 1F1B and ZB-V: schedules whose orders do not depend on costs."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from dips.core.errors import ConfigError
from dips.planner.ir import Kind, Op, Schedule, loop, straight, wave

# ---- one stage on each device ----


def gpipe(n_devices: int, n_microbatches: int) -> Schedule:
    """All forward passes, then all backward passes (Huang et al., arXiv:1811.06965)."""
    orders = tuple(
        tuple(Op(kind, stage, m) for kind in (Kind.F, Kind.B) for m in range(n_microbatches))
        for stage in range(n_devices)
    )
    return Schedule("gpipe", straight(n_devices), n_microbatches, orders)


def one_f_one_b(n_devices: int, n_microbatches: int) -> Schedule:
    """1F1B: device d runs ahead by n_devices - d microbatches at most (DAPPLE, arXiv:2007.01045)."""
    orders = []
    for stage in range(n_devices):
        ahead = min(n_devices - stage - 1, n_microbatches)
        order = [Op(Kind.F, stage, m) for m in range(ahead)]
        for m in range(n_microbatches):
            if m + ahead < n_microbatches:
                order.append(Op(Kind.F, stage, m + ahead))
            order.append(Op(Kind.B, stage, m))
        orders.append(tuple(order))
    return Schedule("1f1b", straight(n_devices), n_microbatches, tuple(orders))


def zb_h1(n_devices: int, n_microbatches: int) -> Schedule:
    """1F1B's memory, with W delayed by d microbatches on device d, where it fills the bubble of the end (Qi et al.,
    arXiv:2401.10241, section 3)."""
    orders = []
    for stage in range(n_devices):
        ahead = min(n_devices - stage - 1, n_microbatches)
        order = [Op(Kind.F, stage, m) for m in range(ahead)]
        for m in range(n_microbatches):
            if m + ahead < n_microbatches:
                order.append(Op(Kind.F, stage, m + ahead))
            order.append(Op(Kind.D, stage, m))
            if m >= stage:
                order.append(Op(Kind.W, stage, m - stage))
        order += [Op(Kind.W, stage, m) for m in range(max(0, n_microbatches - stage), n_microbatches)]
        orders.append(tuple(order))
    return Schedule("zb_h1", straight(n_devices), n_microbatches, tuple(orders))


# ---- several stages on each device ----


def interleaved_1f1b(n_devices: int, n_microbatches: int, chunks: int = 2) -> Schedule:
    """Interleaved 1F1B: stages go round the devices `chunks` times (Narayanan et al., arXiv:2104.04473).

    Microbatches go in groups of n_devices, each through all chunks before the next group. Raises ConfigError when the
    microbatches do not divide into such groups.
    """
    if n_microbatches % n_devices:
        raise ConfigError(
            f"interleaved 1F1B needs a multiple of {n_devices} microbatches for {n_devices} devices, "
            f"not {n_microbatches}: choose one"
        )

    def op(kind: Kind, device: int, turn: int) -> Op:
        """The operation of a device's n-th turn of this kind; backward passes go through the chunks from the last."""
        group, within = divmod(turn, n_devices * chunks)
        chunk, position = divmod(within, n_devices)
        if kind is Kind.B:
            chunk = chunks - 1 - chunk
        return Op(kind, chunk * n_devices + device, group * n_devices + position)

    total = n_microbatches * chunks
    orders = []
    for device in range(n_devices):
        ahead = min(2 * (n_devices - device - 1) + (chunks - 1) * n_devices, total)
        order = [op(Kind.F, device, turn) for turn in range(ahead)]
        for turn in range(total):
            if turn + ahead < total:
                order.append(op(Kind.F, device, turn + ahead))
            order.append(op(Kind.B, device, turn))
        orders.append(tuple(order))
    return Schedule("interleaved_1f1b", loop(n_devices, chunks), n_microbatches, tuple(orders))


def zb_v(n_devices: int, n_microbatches: int, *, w_between: bool = False) -> Schedule:
    """ZB-V: down the pipeline and back, with split backward passes (Qi et al., arXiv:2405.15362). 1F1B's memory, and
    no bubble on the first device when T_F = T_D = T_W and n_microbatches >= 2 n_devices.

    w_between: F and D in the pattern's order, and W where a device would wait. Where microbatches are too few to run
    evenly, this is shorter when T_F = T_D = T_W; the pattern may be when they are not.
    """
    orders = tuple(_zb_v_order(device, n_devices, n_microbatches) for device in range(n_devices))
    if w_between:
        orders = _with_w_between(orders, n_devices, n_microbatches)
    return Schedule("zb_v", wave(n_devices), n_microbatches, orders)


def runs_evenly(n_devices: int, n_microbatches: int) -> bool:
    """Whether microbatches suffice for all devices to be in the middle of ZB-V's pattern at once."""
    return n_microbatches >= 2 * (n_devices - 1)


def _zb_v_order(device: int, n_devices: int, n: int) -> tuple[Op, ...]:
    """One device's order. Cells such as F0, I1 and W1 name kind and chunk; each is of its next microbatch."""
    stages = (device, 2 * n_devices - 1 - device)
    order: list[Op] = []
    done: Counter[str] = Counter()

    def add(*cells: str) -> None:
        for cell in cells:
            if done[cell] < n:  # as long as microbatches last
                order.append(Op(Kind(cell[0]), stages[int(cell[1])], done[cell]))
                done[cell] += 1

    # Fill both chunks, drain the second while the first is filled, and run both evenly.
    for _ in range(2 * (n_devices - device) - 1):
        add("F0")
    for _ in range(device):
        add("F1", "F0")
    for _ in range(n_devices - device):
        add("F1", "I1", "W1")
    while done["F1"] < n:
        add("F0", "I0", "W0", "F1", "I1", "W1")
    # End the gradients that other devices wait for before the weights' own.
    for _ in range(device):
        add("I0", "I1")
    for _ in range(n_devices - device):
        add("I0", "W0")
    while done["W1"] < n or done["W0"] < n:
        add("W1", "W0")
    return tuple(order)


def _with_w_between(orders: Sequence[Sequence[Op]], n_devices: int, n: int) -> tuple[tuple[Op, ...], ...]:
    """The orders of a wave, with each W, oldest first, where its device waits for an input, or for memory of another F,
    when all operations take the same time, and messages none. A device holds n_devices microbatches at most.
    """
    last = 2 * n_devices - 1
    plan = [deque(op for op in order if op.kind is not Kind.W) for order in orders]
    left: list[deque[Op]] = [deque() for _ in orders]  # each device's W whose D is done
    held = [0] * n_devices  # halves of a stage's activation: F takes two, D and W free one each
    made: list[list[Op]] = [[] for _ in orders]
    done: set[Op] = set()

    def is_ready(device: int, op: Op) -> bool:
        if op.kind is Kind.F:
            fits = held[device] + 2 <= 4 * n_devices
            return fits and (op.stage == 0 or Op(Kind.F, op.stage - 1, op.microbatch) in done)
        return (Op(Kind.F, last, op.microbatch) if op.stage == last else op._replace(stage=op.stage + 1)) in done

    while len(done) < 3 * 2 * n_devices * n:
        now = []
        for device, order in enumerate(plan):
            if order and is_ready(device, order[0]):
                op = order.popleft()
            elif left[device]:
                op = left[device].popleft()
            else:
                continue
            if op.kind is Kind.D:
                left[device].append(op._replace(kind=Kind.W))
            held[device] += 2 if op.kind is Kind.F else -1
            made[device].append(op)
            now.append(op)
        done.update(now)
    return tuple(map(tuple, made))
