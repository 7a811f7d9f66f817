"""The error for a violated invariant in a search."""

from __future__ import annotations


class SearchViolation(Exception):
    """An invariant does not hold. name: I1 to I14, ILLEGAL (a step that is not in a machine's table), or DEADLOCK."""

    def __init__(self, name: str, sentence: str) -> None:
        super().__init__(f"{name}: {sentence}")
        self.name = name
        self.sentence = sentence

    def __reduce__(self) -> tuple[type[SearchViolation], tuple[str, str]]:
        return SearchViolation, (self.name, self.sentence)
