"""A run at full size under a virtual clock: the real master, and models of slaves, clusters and links.

What slaves and clusters do takes as long as the formulas of rates.py say; what the master decides is decided by the
master's own state machine. Nothing here may wait for real time or read a clock.
"""
