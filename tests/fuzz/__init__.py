"""Fuzzing of everything that reads bytes it did not write: `make fuzz` (docs/evidence.md)."""
