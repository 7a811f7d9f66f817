"""A worker's compiled loops over real sockets, with guard pages around everything that they may touch.

Each runs in a process of its own: an access outside ends it, and the test says where. `make fuzz` sends more.
"""

from __future__ import annotations

import pytest
from support.checked_memory import in_child
from support.guarded_carry import KINDS, answer_guarded


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_answers(kind: str) -> None:
    assert in_child(answer_guarded, kind, 1, 10) == ""
