"""Compares training methods: real training by the real state machines, under a virtual clock (docs/convergence.md)."""
