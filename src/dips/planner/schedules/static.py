"""GPipe, 1F1B and ZB-H1: one stage on each device, in an order that does not depend on costs."""

from __future__ import annotations

from dips.planner.ir import Kind, Op, Schedule, straight


def gpipe(n_devices: int, n_microbatches: int) -> Schedule:
    """All forward passes, then all backward passes (Huang et al., arXiv:1811.06965)."""
    orders = tuple(
        (
            *(Op(Kind.F, stage, m) for m in range(n_microbatches)),
            *(Op(Kind.B, stage, m) for m in range(n_microbatches)),
        )
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
