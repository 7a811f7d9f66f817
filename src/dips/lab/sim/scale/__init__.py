"""Simulates a run at full size under a virtual clock: the real machines of master, slaves and clusters in the
simulator's hosts, and models of their links, disks and arithmetic.

Whatever takes time takes as long as the formulas of rates.py say; the machines make all decisions. Nothing here may
wait for real time or read a clock.
"""
