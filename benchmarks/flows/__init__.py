"""The two ends of bench_transfer.py, each in a process of its own, and the baselines that they are compared with."""
