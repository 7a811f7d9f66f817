"""A run whose processes are killed, and what its tapes say of the time that passes (bench_recovery.py)."""
