"""Emulated links: when messages leave and arrive, on the file that ranks share."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from dips.planner.run import links
from dips.planner.run.links import BACK, FORTH, NO_NOTE, LinkBoard, RankLink


def test_a_message_occupies_its_link_and_travels(tmp_path: Path) -> None:
    """A link without width waits for nothing; one that is held takes the next message when the answer is there."""
    usual, no_width, held = (RankLink(0, 1, 0, *numbers) for numbers in ((20, 5), (0, 5), (20, 5, 10)))
    file = tmp_path / "links.bin"
    LinkBoard.make(file, 2, 1, 3, 4)
    with LinkBoard(file, 2, 1, 3, 4) as board:
        of_usual = [board.send(0, link, FORTH, 1, 0, ready_ns=100) for link in (usual, no_width, usual)]
        of_held = [board.send(1, held, FORTH, 1, 0, ready_ns=100) for _ in range(2)]
    assert of_usual == [(100, 120, 125), (100, 100, 105), (120, 140, 145)]
    assert of_held == [(100, 120, 125), (130, 150, 155)]


def test_two_ranks_share_a_link_and_iterations_do_not(tmp_path: Path) -> None:
    sizes = (2, 1, 3, 4)
    file = tmp_path / "links.bin"
    LinkBoard.make(file, *sizes)
    with LinkBoard(file, *sizes) as one, LinkBoard(file, *sizes) as other:
        one.send(0, RankLink(0, 1, 0, 20, 5), FORTH, 1, 3, ready_ns=100)
        late = other.send(0, RankLink(2, 3, 0, 20, 7), BACK, 0, 2, ready_ns=110)
        next_iteration = other.send(1, RankLink(2, 3, 0, 20, 7), BACK, 0, 2, ready_ns=110)
        assert (late[0], next_iteration[0]) == (120, 110)
        assert other.arrives_ns(0, FORTH, 1, 3) == 125
        assert one.arrives_ns(0, BACK, 0, 2) == 147
        assert one.arrives_ns(1, BACK, 0, 2) == 137
        assert one.arrives_ns(0, BACK, 1, 3) == NO_NOTE
        assert one.arrives_ns(1, FORTH, 1, 3) == NO_NOTE


def test_plans_are_made_where_there_are_no_file_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows: `dips plan` imports this module."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    spec = importlib.util.find_spec(links.__name__)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
