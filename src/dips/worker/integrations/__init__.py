"""Callbacks for trainers that people have: Hugging Face's and Lightning's (docs/integrations.md).

Each module needs its trainer installed, and is imported by whoever uses it: `dips.HuggingFaceCallback` and
`dips.LightningCallback` name them. Everything that is not theirs stands in trainer_loop.py.
"""
