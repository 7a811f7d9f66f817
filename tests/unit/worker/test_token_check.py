"""A step's token count beside what went into the model."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch

from dips.core.errors import ConfigError
from dips.worker.step_checks import N_BATCHES, FirstBatches, TokenCheck

# torch's own, of the compiler and of what it will leave out some day.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")


class Anything(torch.nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> None:
        return None


@pytest.fixture
def model() -> Anything:
    return Anything()


def checked(model: torch.nn.Module) -> TokenCheck:
    check = TokenCheck()
    check.begin(model)
    return check


IDS = torch.zeros(8, 64, dtype=torch.long)


@pytest.mark.parametrize("args", [(IDS,), ([IDS],), ({"x": (IDS, None, 3)},)])
def test_a_count_that_the_inputs_cannot_hold_is_refused(model: Anything, args: Any) -> None:
    check = checked(model)
    model(*args)
    check.stepped(8 * 64)
    model(*args)
    with pytest.raises(ConfigError, match=r"1000000000 tokens, 1.95e\+06 times the 512 elements.*CHECK_TOKENS"):
        check.stepped(10**9)


def test_inputs_by_name_and_accumulated_ones_count_together(model: Anything, caplog: pytest.LogCaptureFixture) -> None:
    check = checked(model)
    with caplog.at_level(logging.WARNING):
        model(input_ids=IDS)
        model(input_ids=IDS)
        check.stepped(2 * 512)
    assert not caplog.records


def test_a_count_a_little_too_large_is_told_once(model: Anything, caplog: pytest.LogCaptureFixture) -> None:
    check = checked(model)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            model(IDS)
            check.stepped(8 * 512)
    assert [record.getMessage()[:30] for record in caplog.records] == ["a step counts 4096 tokens, 8 t"]


@pytest.mark.parametrize("args", [(), (object(),), (IDS, object()), ([[object()]],)])
def test_inputs_that_cannot_be_counted_say_nothing(model: Anything, args: Any) -> None:
    check = checked(model)
    model(*args)
    check.stepped(10**9)
    for several in ((IDS,), args or (object(),)):
        model(*several)
    check.stepped(10**9)


def test_a_step_without_a_call_of_the_model_is_told_once(model: Anything, caplog: pytest.LogCaptureFixture) -> None:
    check = checked(model)
    with caplog.at_level(logging.WARNING):
        check.stepped(8)  # of a model whose calls no hook sees
        model.eval()
        model(IDS)
        check.stepped(8)
        check.stepped(8)
        model.train()
        for args in ((IDS,), (object(),)) * 2:
            model(*args)
            check.stepped(8)
        assert not caplog.records
        check.stepped(8)
        check.stepped(8)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "optimizer.step() was called again without a call of the model since the step"
    )


def test_what_was_unknown_in_one_step_is_forgotten_with_it(model: Anything) -> None:
    check = checked(model)
    model(object())
    check.stepped(10**9)
    model(IDS)
    with pytest.raises(ConfigError):
        check.stepped(10**9)


def test_it_ends(model: Anything) -> None:
    check = checked(model)
    check.end()
    check.end()
    model(IDS)
    check.stepped(10**9)
    assert not model._forward_pre_hooks


def test_a_compiled_model_is_left_alone() -> None:
    model = torch.nn.Linear(4, 4)
    check = checked(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for rows in (2, 2, 2):
        compiled(torch.ones(rows, 4))
        check.stepped(10**9)


def digest_of(model: torch.nn.Module, batches: list[Any]) -> bytes:
    found: list[bytes] = []
    first = FirstBatches(model, found.append)
    for batch in batches:
        model(batch)
    first.end()
    assert len(found) <= 1
    return b"".join(found)


def batches_of(seed: int, dtype: torch.dtype = torch.long) -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(seed)
    return [{"x": torch.randint(9, (2, 5), generator=made).to(dtype)} for _ in range(N_BATCHES)]


def test_first_batches_have_one_digest_if_all_of_them_is_equal(model: Anything) -> None:
    digest = digest_of(model, batches_of(1))
    assert digest
    assert digest == digest_of(Anything(), [*batches_of(1), *batches_of(3)]), "the first ones decide"
    turned = [{"x": batch["x"].view(5, 2)} for batch in batches_of(1)]
    more = ([{"x": batch["x"], "y": torch.full((2,), value)} for batch in batches_of(1)] for value in (1.0, 2.0))
    others = (batches_of(2), batches_of(1, torch.bfloat16), batches_of(1)[::-1], turned, *more)
    assert len({digest, *(digest_of(Anything(), other) for other in others)}) == 7
    assert digest_of(Anything(), batches_of(1)[1:]) == b"", "too few to tell"
    margin = torch.zeros(8, 5000)
    images = [torch.cat([margin, torch.full((8, 5000), float(i))], dim=1) for i in range(2)]
    assert digest_of(model, images[:1] * N_BATCHES) != digest_of(Anything(), images[1:] * N_BATCHES)
    assert digest_of(model, [object()] * N_BATCHES) == b""


def test_batches_of_an_evaluation_are_not_the_first_ones(model: Anything) -> None:
    found: list[bytes] = []
    FirstBatches(model, found.append)
    model.eval()
    for batch in batches_of(2):
        model(batch)
    model.train()
    for batch in batches_of(1):
        model(batch)
    assert found == [digest_of(Anything(), batches_of(1))]


class Around(torch.nn.parallel.DistributedDataParallel):
    """It calls what it wraps, and needs no process group."""

    def __init__(self, module: torch.nn.Module) -> None:
        torch.nn.Module.__init__(self)
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Named(Anything):
    """No wrapper, but for the name of its part."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = Anything()


@pytest.mark.parametrize("inside", [Anything, Named])
def test_wrapped_models_batches_are_those_of_the_plain_one_and_tensors_without_content_do_no_harm(
    model: Anything, inside: type[Anything]
) -> None:
    def compiled(inner: torch.nn.Module) -> torch.nn.Module:
        made: torch.nn.Module = torch.compile(inner, backend="eager", fullgraph=True)  # type: ignore[assignment]
        return made

    wrapped = (compiled(inside()), Around(compiled(inside())), compiled(Around(inside())), Around(inside()))
    plain = digest_of(Anything(), batches_of(1))
    assert [digest_of(each, batches_of(1)) for each in wrapped] == [plain] * 4
    assert digest_of(model, [torch.empty(2, device="meta")] * N_BATCHES) == b""


def test_what_torch_makes_of_a_model_has_no_part_in_its_hooks() -> None:
    """Traced, exported and compiled within the first batches, and copied."""
    model, found, rows = torch.nn.Linear(4, 4), list[bytes](), torch.ones(2, 4)
    check = checked(model)
    FirstBatches(model, found.append)
    traced = torch.jit.trace(model, rows, check_trace=False)  # to check it would call the model
    exported = torch.export.export(model, (rows,)).module()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert not found
    for made in (traced, exported, compiled, copy.deepcopy(model)):
        for _ in range(N_BATCHES):
            assert torch.equal(made(rows), torch.nn.functional.linear(rows, model.weight, model.bias))
    assert not found
    check.stepped(10**9)
    for _ in range(N_BATCHES):
        model(rows)
    assert len(found) == 1


def test_a_model_that_torch_should_script_in_the_block_says_how_it_can() -> None:
    model = torch.nn.Linear(4, 4)
    check = checked(model)
    for hooked in (model, copy.deepcopy(model)):
        with pytest.raises(AttributeError, match="script it before or after the block, or in it another module"):
            torch.jit.script(hooked)
    check.end()
    assert torch.jit.script(model)(torch.ones(1, 4)).shape == (1, 4)


def test_samples_of_vmap_are_not_counted_as_batches(model: Anything) -> None:
    check = checked(model)
    torch.func.vmap(lambda ids: (model(ids), ids)[1])(IDS.repeat(100, 1))
    check.stepped(100 * IDS.numel())
