"""What a fuzzed place is: where its inputs come from, what is done with one, and which errors are its answer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import strategies as st

SLOW_S = 2.0
"""Processor time for one input; inputs are at most 1 MiB, which the slowest reader takes in 0.1 s."""


CORPUS = 500
"""Inputs that are kept for mutation."""


class Broken(AssertionError):
    """An input did what none may do: another error than the promised ones, or too long a time."""


@dataclass
class Target:
    """feed: returns a word for what became of the input. refusals: the errors that are right answers.

    finish: makes the checksum of a changed input right, where one would hide everything behind it.
    """

    name: str
    inputs: st.SearchStrategy[bytes]
    feed: Callable[[bytes], str]
    refusals: tuple[type[Exception], ...] = ()
    finish: Callable[[bytes], bytes] | None = None
    outcomes: Counter[str] = field(default_factory=Counter)
    corpus: list[bytes] = field(default_factory=list)
    """Inputs that were drawn, for fast mutation."""

    @property
    def n_inputs(self) -> int:
        return sum(self.outcomes.values())

    def take(self, data: bytes) -> None:
        """Feed one input and count what became of it. Raises Broken."""
        began_s = time.process_time()
        try:
            outcome = self.feed(data)
        except self.refusals as refused:
            if not str(refused).strip():
                raise Broken(f"{self.name}: {type(refused).__name__} without a sentence") from refused
            outcome = f"refused: {type(refused).__name__}"
        except Exception as error:
            raise Broken(f"{self.name}: {type(error).__name__}: {str(error)[:500]}") from error
        took_s = time.process_time() - began_s
        if took_s > SLOW_S:
            raise Broken(f"{self.name}: one input of {len(data)} bytes took {took_s:.1f} s of a processor")
        self.outcomes[outcome] += 1

    def keep(self, data: bytes) -> None:
        """Put an input into the corpus, in the place of a random one once it is full."""
        if len(self.corpus) < CORPUS:
            self.corpus.append(data)
        else:
            self.corpus[self.n_inputs % CORPUS] = data
