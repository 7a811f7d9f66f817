"""The limit of open files: raised as far as the system goes, never lowered, never an error."""

from __future__ import annotations

import resource

import pytest

from dips.core.file_limit import raise_file_limit


@pytest.mark.parametrize(("soft", "hard", "after"), [
    (1024, 4096, 4096), (1024, 1 << 20, 5000), (1024, resource.RLIM_INFINITY, 5000), (8000, 9000, 8000),
    (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 5000),
])  # fmt: skip
def test_the_soft_limit_goes_up_to_what_is_wanted_and_allowed(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, after: int
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: given.append(limits))
    assert raise_file_limit(5000) == after
    assert given in ([], [(after, hard)])


def test_a_system_that_refuses_leaves_things_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(which: int, limits: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 1 << 20))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert raise_file_limit() == 256
