"""SpanTrain's Dynamic Environment Adapter (sections 3.4 and 4.4): how many sequences each stage takes at a time follows
the measured bandwidth of the links.

traces.py reads bandwidths over time, pieces.py simulates an iteration whose stages take pieces of their own sizes,
decide.py is the state machine that chooses the sizes, and plays many iterations with and without it.
"""
