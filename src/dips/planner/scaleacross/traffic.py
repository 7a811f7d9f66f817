"""What training sends between accelerators, and how fast a way can carry it: the formulas of the paper's section 3.1
and 5, for one accelerator.

H is the model's width, F that of the MLP, F_e that of an expert, E the number of experts, S the tokens of a sequence,
m the sequences of a microbatch.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dips.planner.model import Model

Bytes = TypeVar("Bytes", float, NDArray[np.float64])
"""One size, or many."""

BYTES = 2.0
"""Of a number that is sent: activations, weights and gradients in 16 bits, as in the paper's formula."""


def message_bytes(model: Model, sequence_tokens: int, microbatch_sequences: int, tensor: int, context: int) -> float:
    """One message between two chunks, one way: 2 (H / TP) (S / CP) m bytes."""
    return BYTES * model.hidden / tensor * sequence_tokens / context * microbatch_sequences


def messages_each_way(microbatches: int, chunks: int) -> int:
    """Messages of an iteration between two neighbouring stages, each way, as the paper counts them."""
    return microbatches * chunks


def exchanged_elements(model: Model, layer: int, tensor: int, expert: int) -> float:
    """Weights of one layer that replicas exchange, once: (4 H^2 + 3 H F) / TP, or (4 H^2 + 3 H F_e E / EP) / TP with
    experts. The formula counts all experts of a device, also where no other replica has them."""
    hidden = model.hidden
    if model.is_dense(layer):
        return (4 * hidden**2 + 3 * hidden * model.mlp_width) / tensor
    return (4 * hidden**2 + 3 * hidden * model.expert_width * model.experts / expert) / tensor


def collectives(chunks: int) -> int:
    """Of one stage in an iteration: an all-gather and a reduce-scatter for each chunk."""
    return 2 * chunks


def crossings_in_a_loop(chunks: int) -> int:
    """How often a microbatch crosses the boundary between two sites, forward and back: with the way from the last
    stage to the first one. Chunks are those of a stage."""
    return 2 * (2 * chunks - 1)


def crossings_in_a_v(chunks: int) -> int:
    """The same where chunks go to the last stage and back: the turns stay inside a site."""
    return 2 * chunks


def sprayed_bytes_per_s(latency_s: float, packets: int = 512, packet_bytes: int = 4096) -> float:
    """The most of one queue pair with packet spraying: so many packets are on their way at most (section 5.3)."""
    return packets * packet_bytes / latency_s if latency_s else math.inf


def ring_s(n_bytes: Bytes, members: int, bytes_per_s: float, latency_s: float) -> Bytes:
    """An all-gather or a reduce-scatter of so many bytes in a ring: members - 1 steps of a part, each as long as the
    slowest pair takes (section 3.2: with 1,024 members latency dominates)."""
    return (members - 1) * (n_bytes / members / bytes_per_s + latency_s)


def retransmission_s(messages: int, message_bytes: float, loss_rate: float, packet_bytes: int, rtt_s: float) -> float:
    """What lost packets cost an iteration with Go-Back-N: a round trip for each message that loses one, if none of
    them is hidden."""
    packets = max(1, math.ceil(message_bytes / packet_bytes))
    return messages * -math.expm1(packets * math.log1p(-loss_rate)) * rtt_s
