"""Callbacks for the trainers of Hugging Face and Lightning (docs/integrations.md).

Each module needs its trainer installed, and is imported only when used: `dips.HuggingFaceCallback` and
`dips.LightningCallback` name them. Their common code is in trainer_loop.py.
"""
