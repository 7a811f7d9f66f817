"""The promises about state, one named function each, and the Checker that asks them about every fact.

A function gets the history of all facts before and one fact, and answers with sentences about what is wrong, an empty
list when nothing is, or None when the fact is none that it judges. docs/verify.md lists the evidence of each.
"""

from __future__ import annotations

from dips.judge.invariants.checker import Checker, Violation
from dips.judge.invariants.register import INVARIANTS, Invariant

__all__ = ["INVARIANTS", "Checker", "Invariant", "Violation"]
