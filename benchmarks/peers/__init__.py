"""The parties of bench_sync.py: one cluster of each system, and the servers that some of them need.

Every worker is a script of its own, because each system lives in a virtual environment of its own; what they share
(peers/turns.py, peers/work.py) needs torch and the standard library alone.
"""
