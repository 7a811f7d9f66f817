"""Ranks of `dips plan run` without processes, torch or time: each has a clock of its own, and the one whose operation
ends first goes on, as it would in the world."""

from __future__ import annotations

from pathlib import Path

from dips.planner.commands.plan_run import PlanSource, job_of
from dips.planner.ir import Kind, Op, Schedule
from dips.planner.run import links


class RankClock:
    """Stands still but when it is waited on; each wait ends late_ns too late."""

    def __init__(self, late_ns: int = 0) -> None:
        self.ns = 0
        self._late_ns = late_ns

    def now_ns(self) -> int:
        return self.ns

    def wait_until(self, ns: int) -> None:
        if ns > self.ns:
            self.ns = ns + self._late_ns


def play(folder: Path, source: PlanSource, late_ns: int = 0) -> list[links.Iteration]:
    """One iteration, as each rank notes it."""
    job = job_of(source, 1, "gloo", 1.0)
    cells = links.parse_cells(job.csv, "the plan")
    sizes = links.board_sizes(job, cells.n_stages, cells.n_microbatches)
    links.LinkBoard.make(folder / links.BOARD_FILE, *sizes)
    with links.LinkBoard(folder / links.BOARD_FILE, *sizes) as board:
        clocks = [RankClock(late_ns) for _ in cells.orders]
        paces = [links.RankPace(job, cells, rank, board, clock) for rank, clock in enumerate(clocks)]
        for pace in paces:
            pace.begin(0)
        _play(cells, clocks, paces, board, job.lasts_ns)
        return [pace.finish() for pace in paces]


def _play(
    cells: Schedule,
    clocks: list[RankClock],
    paces: list[links.RankPace],
    board: links.LinkBoard,
    lasts_ns: tuple[tuple[int, int, int], ...],
) -> None:
    left = [list(row) for row in cells.orders]
    ended: dict[Op, int] = {}
    while any(left):
        ready = []
        for rank, row in enumerate(left):
            if not row or (bytes_ns := _bytes_there_ns(row[0], cells, ended)) is None:
                continue
            direction = links.FORTH if row[0].kind == "F" else links.BACK
            noted_ns = board.arrives_ns(0, direction, row[0].stage, row[0].microbatch) if row[0].kind != "W" else 0
            start_ns = max(clocks[rank].ns, bytes_ns, noted_ns)
            ready.append((start_ns + _lasts_ns(row[0], lasts_ns), rank, bytes_ns))
        assert ready, "the ranks wait for each other"
        _, rank, bytes_ns = min(ready)
        op = left[rank].pop(0)
        clocks[rank].ns = max(clocks[rank].ns, bytes_ns)  # torch waits for the bytes; the note is Pace's to wait for
        assert paces[rank].run(op, lambda: "its work's result") == "its work's result"
        ended[op] = clocks[rank].ns
        after = op.stage + (1 if op.kind == "F" else -1)
        if op.kind != "W" and 0 <= after < cells.n_stages and cells.device_of_stage[after] != rank:
            paces[rank].send(op)


def _lasts_ns(op: Op, lasts_ns: tuple[tuple[int, int, int], ...]) -> int:
    f, d, w = lasts_ns[op.stage]
    return {"F": f, "I": d, "W": w, "B": d + w}[op.kind]


def _bytes_there_ns(op: Op, cells: Schedule, ended: dict[Op, int]) -> int | None:
    """When what an operation needs was sent; None if it was not."""
    if op.kind == "W" or op.stage == (0 if op.kind == "F" else cells.n_stages - 1):
        return 0
    before, kinds = (op.stage - 1, "F") if op.kind == "F" else (op.stage + 1, "IB")
    return next((ended[made] for kind in kinds if (made := Op(Kind(kind), before, op.microbatch)) in ended), None)
