"""Exhaustive search over the real state machines at small bounds: `python -m search` (docs/simulation.md).

It must never contain a second copy of a decision: what is searched is MasterMachine, SlaveMachine and ClusterMachine
as they run.
"""
