"""Pushes as differences in fewer bits, by the driver over real sockets, with what rounding loses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.run_for_workers import CHUNK_BYTES, LAYOUT, FlatModel, RunForWorkers, part_of, until_version_changes

from dips.core.errors import RefusalCode
from dips.core.ids import Version
from dips.core.math import wire_numpy
from dips.core.messages import DataMode, DataPlan, Refusal
from dips.core.wire import WIRE_DTYPES, Codec, encoded_bytes
from dips.worker.config import ClientConfig
from dips.worker.shell import ClusterShell
from dips.worker.vectors import F32, chunk_spans

DTYPES = ("bfloat16", "int8", "int4")
SPANS = chunk_spans(LAYOUT, CHUNK_BYTES)


@pytest.fixture
def run() -> Iterator[RunForWorkers]:
    run = RunForWorkers(theta=FlatModel(7).theta)
    run.settings = replace(run.settings, verdict_wait_s=60.0)
    yield run
    run.close()


def driver(run: RunForWorkers, model: FlatModel, wire_dtype: str, **knobs: object) -> ClusterShell:
    given: dict[str, object] = {
        "insecure": True, "master": run.address, "cluster_id": "a", "data_silence_s": 5.0, "data_stall_s": 60.0,
        "wire_dtype": wire_dtype,
    }  # fmt: skip
    return ClusterShell(ClientConfig.model_validate(given | knobs), model, model.layout(), DataPlan(DataMode.OWN))


def train(client: ClusterShell, model: FlatModel, seed: int) -> F32:
    """One round; what the model held when it was pushed."""
    rng = np.random.default_rng(seed)
    for _ in range(4):
        model.theta += rng.normal(size=model.theta.size).astype(np.float32) * np.float32(0.01)
        pushed: F32 = model.theta.copy()
        client.step(100)
    return pushed


def rounded(codec: Codec, now: F32, base: F32, residual: F32 | None) -> F32:
    """What slaves make of a push, by the reference."""
    out = np.empty_like(now)
    for start, stop in SPANS:
        payload = np.empty(encoded_bytes(codec, stop - start), np.uint8)
        part = None if residual is None else residual[start:stop]
        wire_numpy.encode(codec, now[start:stop], base[start:stop], part, payload)
        wire_numpy.decode(codec, base[start:stop], payload, out[start:stop])
    return out


def keep(codec: Codec, now: F32, base: F32, residual: F32) -> None:
    for start, stop in SPANS:
        wire_numpy.keep_residual(codec, now[start:stop], base[start:stop], residual[start:stop])


@pytest.mark.parametrize("wire_dtype", DTYPES)
def test_rounds_in_fewer_bits_with_error_feedback(run: RunForWorkers, wire_dtype: str) -> None:
    codec, model = WIRE_DTYPES[wire_dtype], FlatModel(1)
    residual: F32 | None = None
    with driver(run, model, wire_dtype) as client:
        for number in (1, 2, 3):
            base = model.theta.copy()
            pushed = train(client, model, number)
            assert client.version == Version(1, number)
            push = list(run.verdicts)[-1]
            assert all(slave.codecs[push] is codec for slave in run.slaves)
            assert run.theta_of(push).tobytes() == rounded(codec, pushed, base, residual).tobytes()
            residual = np.zeros_like(base) if residual is None else residual
            keep(codec, pushed, base, residual)
            kept = part_of(client).vectors.residual
            assert kept is not None
            assert kept.tobytes() == residual.tobytes()
        assert part_of(client).vectors.n_vectors == 3, "theta_base, the push that becomes the pull, the residual"
    payload_bytes = sum(len(p) for slave in run.slaves for p in slave.landed[push].values())
    assert payload_bytes == sum(encoded_bytes(codec, stop - start) for start, stop in SPANS)


def test_a_residual_outlives_the_process(run: RunForWorkers, tmp_path: Path) -> None:
    model = FlatModel(1)
    knobs = {"checkpoint_dir": tmp_path, "checkpoint_every_s": 0.0}
    with driver(run, model, "int8", **knobs) as client:
        train(client, model, 1)
        client.checkpoint_if_due()
        kept = part_of(client).vectors.residual
        assert kept is not None
        residual = kept.copy()
    again = FlatModel(2)
    with driver(run, again, "int8", resume_required=True, **knobs) as client:
        assert client.resumed
        kept = part_of(client).vectors.residual
        assert kept is not None
        assert kept.tobytes() == residual.tobytes()


def test_a_push_whose_base_is_gone_is_sent_again_as_parameters(run: RunForWorkers) -> None:
    gone = Refusal(RefusalCode.BASE_GONE, "that version is not here any more")
    run.slaves[1].hook = lambda header: gone if header.codec is Codec.INT8 else None
    model = FlatModel(1)
    real = run._BeginPush

    def begin(request: object) -> object:
        """A new opening of the staging, as real slaves make for another codec."""
        reply = real(request)  # type: ignore[arg-type]
        for slave in run.slaves:
            slave.landed.clear()
            slave.codecs.clear()
        return reply

    run._BeginPush = begin  # type: ignore[method-assign,assignment]
    with driver(run, model, "int8") as client:
        pushed = train(client, model, 1)
        until_version_changes(client)
        push = next(iter(run.verdicts))
        assert run.attempts[push] == 2
        for slave in run.slaves:
            parts = [pushed[block.start_elem : block.stop_elem] for block in slave.blocks]
            assert slave.versions[Version(1, 1)].tobytes() == np.concatenate(parts).tobytes()
        assert part_of(client).vectors.residual is None, "float32 loses nothing"
