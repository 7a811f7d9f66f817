"""Judges of any run, real or simulated, by what its processes recorded: invariants, verification, replay, event
history."""
