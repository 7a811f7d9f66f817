"""Runs planned pipeline schedules with torch.distributed.pipelining.

`step.py` is for a user's own model: stages, a plan.csv and a batch in, a step out. The rest makes `dips plan run`: a
small model whose operations take as long as a plan says, over links that are emulated, so that a plan can be held
against the clock on one machine.
"""
