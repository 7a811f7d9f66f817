"""Runs planned pipeline schedules with torch.distributed.pipelining.

`step.py` is for a user's own model: it runs one training step from stages, a plan.csv and a batch, and moves layers
when another plan takes over. `share.py` lets unequal devices compute one stage together. The rest implements `dips plan
run`: a small model whose operations take as long as planned, over emulated links, so that a plan can be compared with
real time on one machine.
"""
