"""ZB-V: two stages on each device, down the pipeline and back, with split backward passes (Qi et al.,
arXiv:2405.15362)."""

from __future__ import annotations

from dips.planner.ir import Kind, Op, Schedule, wave


class _Device:
    """Writes one device's order. Counts: next microbatch of each (kind, chunk)."""

    def __init__(self, device: int, n_devices: int) -> None:
        self._stages = (device, 2 * n_devices - 1 - device)
        self.order: list[Op] = []
        self.done = {(kind, chunk): 0 for kind in (Kind.F, Kind.D, Kind.W) for chunk in (0, 1)}

    def add(self, cells: str) -> None:
        """Append operations, such as "F0 I1 W1": kind and chunk; each is of its next microbatch."""
        for cell in cells.split():
            key = (Kind(cell[0]), int(cell[1]))
            self.order.append(Op(key[0], self._stages[key[1]], self.done[key]))
            self.done[key] += 1

    def left(self, kind: Kind, chunk: int, n_microbatches: int) -> bool:
        return self.done[kind, chunk] < n_microbatches


def zb_v(n_devices: int, n_microbatches: int) -> Schedule:
    """1F1B's memory at no bubble on the first device when T_F = T_D = T_W and n_microbatches >= 2 n_devices."""
    orders = tuple(_order(device, n_devices, n_microbatches) for device in range(n_devices))
    return Schedule("zb_v", wave(n_devices), n_microbatches, orders)


def _order(device: int, n_devices: int, n: int) -> tuple[Op, ...]:
    """The order of operations, as long as microbatches last: fill both chunks, drain the second while the first is
    filled, run both evenly, then end the gradients that others wait for before the weights' own."""
    row = _Device(device, n_devices)

    def add(*cells: str) -> None:
        for cell in cells:
            if row.left(Kind(cell[0]), int(cell[1]), n):
                row.add(cell)

    for _ in range(2 * (n_devices - device) - 1):
        add("F0")
    for _ in range(device):
        add("F1", "F0")
    for _ in range(n_devices - device):
        add("F1", "I1", "W1")
    while row.left(Kind.F, 1, n):
        add("F0", "I0", "W0", "F1", "I1", "W1")
    for _ in range(device):
        add("I0", "I1")
    for _ in range(n_devices - device):
        add("I0", "W0")
    while row.left(Kind.W, 1, n) or row.left(Kind.W, 0, n):
        add("W1", "W0")
    return tuple(row.order)
