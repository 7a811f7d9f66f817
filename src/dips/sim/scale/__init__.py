"""Simulates a run at full size under a virtual clock: the real master, and models of slaves, clusters and links.

Slaves and clusters take as long as the formulas of rates.py say; the master's own state machine makes its decisions.
Nothing here may wait for real time or read a clock.
"""
