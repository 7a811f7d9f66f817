"""Makes the simulator's Plan from a set-up and a method: a World in which nothing fails.

Time-outs that only faults need are very long, only the jitter of steps and delays is random, and every size that a
transfer has is that of the model whose parameters it carries (set-up, [model] wire_parameters).
"""

from __future__ import annotations

import math

from dips.compare.methods import Method
from dips.compare.setup import ComparisonSetup
from dips.core.layout import Layout, Parameter
from dips.core.messages import DataMode, DataPlan
from dips.core.units import parse_bytes
from dips.core.wire import WIRE_DTYPES
from dips.master.config import MasterConfig
from dips.sim.arithmetic import Arithmetic
from dips.sim.content import SYMBOLS
from dips.sim.network import LinkPlan, ProcessRates
from dips.sim.run_plan import SimulatedRunPlan
from dips.trainer.sizes import SIZES

NEVER_S = 1e7
"""A time-out that never ends."""

LEAVE_S = 600.0
RETRY_S = 0.05
MANY_EVENTS = 50_000_000
BYTES_PER_PARAMETER = 4
TIMING_BLOCKS_PER_SLAVE = 4
TIMING_CHUNKS_PER_BLOCK = 6


def plan_of(
    setup: ComparisonSetup, method: Method, layout: Layout, data: DataPlan, arithmetic: Arithmetic = SYMBOLS
) -> SimulatedRunPlan:
    """The Plan of this method; World(seed, plan=...) runs it. Raises ConfigError for contradicting settings.

    Symbols are not trained: for them a step is one row, since they do not depend on where rows begin.
    """
    config = setup.master_config(method).to_run_config()
    inner, trains = setup.inner, arithmetic is not SYMBOLS
    model_bytes = BYTES_PER_PARAMETER * layout.n_elems
    return SimulatedRunPlan(
        setup.cluster_names,
        setup.slave_names,
        layout,
        data,
        config,
        setup.step_s,
        setup.tokens_per_step,
        delay_s=setup.links.latency,
        flush_s=setup.servers.flush,
        work_s=setup.servers.work,
        call_deadline_s=NEVER_S,
        leave_wait_s=LEAVE_S,
        data_silence_s=NEVER_S,
        data_stall_s=NEVER_S,
        faults_for_s=0.0,
        n_faults=0,
        checkpoints=False,
        snapshots_kept=2,
        arithmetic=arithmetic,
        batch_rows=inner.batch_size if trains else 1,
        sequence_tokens=inner.sequence_tokens if trains else setup.tokens_per_step,
        step_jitter=setup.clusters.jitter,
        declared=True,
        wires=(WIRE_DTYPES[method.wire_dtype],) * setup.n_clusters,
        retry_max_s=RETRY_S,
        slave_memory_bytes=1 << 62,
        max_chunk_bytes=max(config.settings.chunk_bytes, 1 << 16),
        disk_bytes=1 << 40,
        links=link_plan(setup, model_bytes),
        max_events=MANY_EVENTS,
    )


def link_plan(setup: ComparisonSetup, model_bytes: int) -> LinkPlan:
    """The links with the set-up's rates; a model of `model_bytes` takes as long as one of wire_parameters."""
    links = setup.links
    card = _rate(links.slave_card)
    rates = dict.fromkeys(setup.slave_names, ProcessRates(card, card))
    rates |= {
        name: ProcessRates(_rate(up), _rate(down))
        for name, up, down in zip(setup.cluster_names, setup.up_bits_per_s, setup.down_bits_per_s, strict=True)
    }
    return LinkPlan(rates, wire_bytes(setup) / model_bytes)


def wire_bytes(setup: ComparisonSetup) -> int:
    """Bytes of one transfer of the whole model: float32 parameters."""
    return BYTES_PER_PARAMETER * (setup.model.wire_parameters or SIZES[setup.model.size].n_elems)


def timing_layout(setup: ComparisonSetup) -> Layout:
    """The layout of a model of symbols, in as many messages as are needed to share links: six for each of a slave's
    four blocks, of the set-up's chunk size."""
    chunk_bytes = _chunk_bytes(setup)
    n_elems = TIMING_CHUNKS_PER_BLOCK * chunk_bytes // BYTES_PER_PARAMETER
    return Layout(
        tuple(
            Parameter(f"layers.{i}.w", (n_elems,), "float32", f"layers.{i}")
            for i in range(TIMING_BLOCKS_PER_SLAVE * setup.servers.slaves)
        )
    )


def timing_data(setup: ComparisonSetup) -> DataPlan:
    """Text without end, in chunks of two steps."""
    chunk_tokens = 2 * setup.tokens_per_step
    n_chunks = math.ceil(4 * setup.run.tokens / chunk_tokens)
    return DataPlan(DataMode.LEASED, b"no text", n_chunks * chunk_tokens, chunk_tokens)


def _chunk_bytes(setup: ComparisonSetup) -> int:
    default: int = MasterConfig.model_fields["chunk_bytes"].default
    return parse_bytes(setup.master.get("chunk_bytes", default))


def _rate(bits_per_s: float) -> float:
    return bits_per_s or math.inf
