"""The promises about state, one named function each, and the Checker that runs them on every fact.

A function gets the history of all earlier facts and one fact. It returns sentences about what is wrong, an empty list
when nothing is, or None when it does not judge this fact. docs/evidence.md lists the evidence of each.
"""

from __future__ import annotations

from dips.judge.invariants.checker import DECISIONS, INVARIANTS, Checker, Invariant, Violation

__all__ = ["DECISIONS", "INVARIANTS", "Checker", "Invariant", "Violation"]
