"""The page of settings is that of the classes which declare them."""

from __future__ import annotations

from dips.cli.docs import settings
from dips.master.config import MasterConfig


def test_a_row_says_what_may_be_written_and_what_holds_otherwise() -> None:
    lines = settings().splitlines()
    assert any(line.startswith("| `slaves` | whole number, at least 1, at most 1024 | `2` | Slaves ") for line in lines)
    assert any(line.startswith("| `grace_s` | `auto` or time | `auto` | ") for line in lines)
    assert any(line.startswith("| `memory` | size, at least 256 MiB | `8 GiB` | ") for line in lines)
    assert any(line.startswith("| `run_id` | name | (required) | Name of the run; ") for line in lines)
    named = {line.split(" ")[1] for line in lines if line.startswith("| `")}
    assert {f"`{name}`" for name in MasterConfig.model_fields} <= named


def test_a_size_that_is_shown_can_be_typed_and_is_the_same() -> None:
    lines = settings().splitlines()
    assert any(line.startswith("| `max_bytes` | size, at least 1 B | `24 MB` | ") for line in lines)
