"""Runs planned pipeline schedules with torch.distributed.pipelining.

`step.py` is for a user's own model: it runs one training step from stages, a plan.csv and a batch. The rest implements
`dips plan run`: a small model whose operations take as long as planned, over emulated links, so that a plan can be
compared with real time on one machine.
"""
