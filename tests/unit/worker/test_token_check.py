"""A step's token count beside what went into the model."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from dips.core.errors import ConfigError
from dips.worker.step_checks import TokenCheck


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
