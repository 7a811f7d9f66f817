"""Faults of simulated runs: what each does, and when it strikes."""
