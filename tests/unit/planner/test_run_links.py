"""Emulated links: when messages leave and arrive, on the file that ranks share."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from dips.planner.run import links
from dips.planner.run.links import BACK, FORTH, NO_NOTE, LinkBoard, RankLink


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
