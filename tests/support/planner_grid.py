"""The schedules that do not depend on costs, and their closed forms."""

from __future__ import annotations

from dips.planner.schedules.fixed import gpipe, interleaved_1f1b, one_f_one_b, zb_h1, zb_v

STATIC = {
    "gpipe": (gpipe, 1),
    "1f1b": (one_f_one_b, 1),
    "interleaved_1f1b": (interleaved_1f1b, 2),
    "zb_h1": (zb_h1, 1),
    "zb_v": (zb_v, 2),
}
"""name: (maker, stages on each device), of the schedules that do not depend on costs."""

WITHOUT_DELAY = {
    "gpipe": lambda p, m: 3 * (m + p - 1),
    "1f1b": lambda p, m: 3 * (m + p - 1),
    "interleaved_1f1b": lambda p, m: 3 * m + 1.5 * (p - 1),
    "zb_h1": lambda p, m: 3 * m + p - 1,
    "zb_v": lambda p, m: 3 * m + (p - 1) / 2,
}
"""Closed forms of the makespan with T_F = T_D = T_W = 1, for as many microbatches as devices or more (CrossPipe, Table
3; Zero Bubble, arXiv:2401.10241; for ZB-V what is found)."""
