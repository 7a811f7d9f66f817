"""A problem of two sites whose layers and links were measured: its file, and that of the profile."""

from __future__ import annotations

from pathlib import Path

PROBLEM = """
[model]
name = "four"
layers = 4
hidden = 64
heads = 2
mlp_width = 128
vocabulary = 256
source = "a test"

[[sites]]
name = "here"
devices = 2
memory_gib = 8
device = "fast"
source = "a test"

[[sites]]
name = "there"
devices = 2
memory_gib = 8
device = "slow"
source = "a test"

[[links]]
sender = "here"
receiver = "there"
bandwidth_gbps = 10
latency_ms = 5
source = "a test"

[training]
pipeline = 4
microbatches = 4
microbatch_sequences = 2
sequence_tokens = 128
source = "a test"

[profile]
file = "profile.toml"
source = "a test"
"""

PROFILE = """
[measured]
source = "a test"
at = 2026-03-01T10:00:00Z
model = "four"
layers = 4
sequence_tokens = 128

[[layers]]
part = "embedding"
device = "fast"
forward_ms = 1
input_gradient_ms = 0
weight_gradient_ms = 2

[[layers]]
device = "fast"
count = 3
forward_ms = 10
input_gradient_ms = 11
weight_gradient_ms = 12

[[layers]]
device = "fast"
layer = 3
forward_ms = 20
input_gradient_ms = 21
weight_gradient_ms = 22

[[layers]]
part = "output"
device = "fast"
forward_ms = 3
input_gradient_ms = 4
weight_gradient_ms = 5

[[layers]]
device = "slow"
count = 4
microbatch_sequences = 1
forward_ms = 20
input_gradient_ms = 20
weight_gradient_ms = 20

[[layers]]
device = "slow"
count = 4
microbatch_sequences = 5
forward_ms = 60
input_gradient_ms = 60
weight_gradient_ms = 60

[[links]]
sender = "here"
receiver = "there"
bandwidth_gbps = 0.5
latency_ms = 7

[[links]]
sender = "there"
receiver = "here"
bandwidth_gbps = 0.25
latency_ms = 8

[calibration]
source = "a test"
operation_us = 100
send_us = 50
error = 0.03
"""


OVERHEADS = PROFILE[PROFILE.index("[calibration]") :]
HEAD = PROFILE[: PROFILE.index("[[layers]]")]
OF_STAGE = "forward_ms = 10\ninput_gradient_ms = 10\nweight_gradient_ms = 10"


def files(folder: Path, *changes: tuple[str, str]) -> Path:
    """The problem's file, beside its profile; each change is made where its text is."""
    texts = {"problem.toml": PROBLEM, "profile.toml": PROFILE}
    for before, after in changes:
        where = [name for name, text in texts.items() if before in text]
        assert where, before
        texts[where[0]] = texts[where[0]].replace(before, after, 1)
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder / "problem.toml"
