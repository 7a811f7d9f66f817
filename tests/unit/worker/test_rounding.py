"""Models in bfloat16 and float16 push what their steps changed, and nothing of what installing a version rounded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.vectors_held import vectors_held

from dips.worker import vectors as vectors_module
from dips.worker.state.effects import InstallMode
from dips.worker.torch_model import TorchParameters
from dips.worker.vectors import Vectors

F32 = NDArray[np.float32]
NARROW = [torch.bfloat16, torch.float16]


def model(*dtypes: torch.dtype, n_elems: int = 4000) -> torch.nn.Module:
    module = torch.nn.Module()
    for i, dtype in enumerate(dtypes):
        module.register_parameter(f"w{i}", torch.nn.Parameter(torch.zeros(n_elems, dtype=dtype)))
    return module


class Cluster:
    def __init__(self, module: torch.nn.Module) -> None:
        self.model = module
        self.store = TorchParameters(module, torch.optim.SGD(module.parameters(), lr=0.1))
        self.n_elems = self.store.layout().n_elems
        self.vectors = Vectors(self.n_elems, self.store)
        self.random = np.random.default_rng(1)
        self.torch_random = torch.Generator().manual_seed(2)

    def version(self) -> F32:
        return self.random.normal(size=self.n_elems).astype(np.float32)

    def pull(self, pulled: F32, mode: InstallMode = InstallMode.REPLACE) -> F32:
        self.vectors.landing()[:] = pulled
        self.vectors.install(self.store, mode)
        return pulled

    def push(self) -> F32:
        self.vectors.snapshot(self.store)
        return self.vectors.push.copy()

    def step(self) -> F32:
        """Changes every parameter; what became of each in its own dtype, as float32."""
        before = self.live()
        with torch.no_grad():
            for parameter in self.model.parameters():
                change = torch.randn(parameter.shape, generator=self.torch_random) * 0.03
                parameter.add_(change.to(parameter.dtype))
        return self.live() - before

    def live(self) -> F32:
        flat = np.empty(self.n_elems, np.float32)
        self.store.snapshot(flat)
        return flat


def test_the_first_push_of_a_run_is_the_model_as_it_is() -> None:
    cluster = Cluster(model(torch.bfloat16))
    cluster.step()
    assert np.array_equal(cluster.push(), cluster.live())


@pytest.mark.parametrize("dtype", NARROW)
def test_a_resumed_process_pushes_what_the_one_before_would_have(dtype: torch.dtype) -> None:
    cluster = Cluster(model(dtype))
    for again in range(3):
        cluster.pull(cluster.version(), InstallMode.REBASE_FROM_BASE if again else InstallMode.REPLACE)
        cluster.step()
        next_life = Cluster(model(dtype))
        next_life.store.install(cluster.live())
        assert (cluster.vectors.installed is None) == (again == 0)
        next_life.vectors.restore(cluster.vectors.base, None, None, cluster.vectors.installed)
        assert next_life.push().tobytes() == cluster.push().tobytes()


ODD = np.array([-0.0, np.nan, np.inf, 1e-41, 3.0, 1 + 2**-23], np.float32)


def test_the_float32_part_of_a_mixed_model_is_pushed_to_the_bit() -> None:
    cluster = Cluster(model(torch.bfloat16, torch.float32, torch.float16, n_elems=ODD.size))
    version = cluster.version()
    version[ODD.size : 2 * ODD.size] = ODD
    cluster.pull(version)
    pushed = cluster.push()
    assert pushed[ODD.size : 2 * ODD.size].tobytes() == ODD.tobytes()
    assert np.array_equal(pushed, version, equal_nan=True)


def test_a_float32_model_keeps_no_further_vector_and_no_bit_of_it_is_computed() -> None:
    cluster = Cluster(model(torch.float32, n_elems=ODD.size))
    assert not cluster.store.rounds
    assert cluster.pull(ODD).tobytes() == cluster.push().tobytes()
    for mode in (InstallMode.REPLACE, InstallMode.REBASE_FROM_PUSH, InstallMode.REBASE_FROM_BASE):
        cluster.pull(cluster.version(), mode)
        cluster.push()
        assert cluster.vectors.installed is None
        assert vectors_held(cluster.vectors) <= 3


def test_a_narrow_model_keeps_one_vector_more_and_only_after_a_rebase() -> None:
    cluster = Cluster(model(torch.bfloat16))
    for _ in range(4):
        cluster.pull(cluster.version())
        cluster.push()
        assert vectors_held(cluster.vectors) == 2
    for mode in (InstallMode.REBASE_FROM_PUSH, InstallMode.REBASE_FROM_BASE) * 3:
        cluster.step()
        cluster.pull(cluster.version(), mode)
        cluster.push()
        assert vectors_held(cluster.vectors) <= 4
    cluster.pull(cluster.version())
    assert vectors_held(cluster.vectors) == 2


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["step", "push", *InstallMode]), max_size=25), st.sampled_from([1000, 40, 7]))
def test_whatever_happens_nothing_is_pushed_but_base_and_steps(done: list[str | InstallMode], piece_elems: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vectors_module, "PIECE_ELEMS", piece_elems)
        patch.setattr("dips.worker.torch_model.ONE_THREAD_ELEMS", 16)
        cluster = Cluster(model(torch.bfloat16, torch.float32, torch.bfloat16, torch.float16, n_elems=33))
        base = cluster.pull(cluster.version())
        since_base, since_push = np.zeros_like(base), np.zeros_like(base)
        was_pushed = False
        for what in done:
            if what == "step":
                changed = cluster.step()
                since_base += changed
                since_push += changed
            elif what == "push":
                assert np.abs(cluster.push() - (base + since_base)).max() < 1e-5
                since_push[:], was_pushed = 0, True
            elif isinstance(what, InstallMode) and (was_pushed or what is not InstallMode.REBASE_FROM_PUSH):
                base = cluster.pull(cluster.version(), what)
                if what is InstallMode.REBASE_FROM_PUSH:
                    since_base = since_push.copy()
                elif what is InstallMode.REPLACE:
                    since_base[:] = 0
                was_pushed = False
        assert np.abs(cluster.push() - (base + since_base)).max() < 1e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", NARROW)
def test_a_model_on_a_cuda_device_pushes_its_base_to_the_bit(dtype: torch.dtype) -> None:
    cluster = Cluster(model(dtype).cuda())
    base = cluster.pull(cluster.version())
    assert np.array_equal(cluster.push(), base)
    base = cluster.pull(cluster.version(), InstallMode.REBASE_FROM_PUSH)
    assert np.array_equal(cluster.push(), base)
