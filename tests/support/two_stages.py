"""A problem that can be planned by hand: two stages at two sites, 10 ms a pass, messages of 8 ms and 5 ms on their
way."""

from __future__ import annotations

TWO = """
[model]
name = "two"
layers = 2
hidden = 10
heads = 2
mlp_width = 20
vocabulary = 30
source = "a test"

[[sites]]
name = "here"
devices = 1
memory_gib = 1
source = "a test"

[[sites]]
name = "there"
devices = 1
memory_gib = 1
source = "a test"

[[links]]
sender = "here"
receiver = "there"
bandwidth_gbps = 1
latency_ms = 5
source = "a test"

[training]
pipeline = 2
microbatches = 2
sequence_tokens = 100
source = "a test"

[profile]
forward_ms = 10
input_gradient_ms = 10
weight_gradient_ms = 10
message_mb = 1
error = 0.1
source = "a test"

[options]
schedules = ["1f1b", "gpipe"]
"""
