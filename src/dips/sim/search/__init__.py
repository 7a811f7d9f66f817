"""Exhaustive search over the real state machines at small bounds: `python -m dips.sim.search` (docs/search.md).

It must never contain a second copy of a decision: what is searched is Coordinator, SlaveState and Session as they run.
"""
