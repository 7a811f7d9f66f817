"""Describes what an export needs beyond a layout: tensors that are not trained, and the model's configuration.

The first cluster to join brings it with the layout, as JSON; so a version can be exported from the slaves' files or
over the network without the program that trained it. Knows no framework, and holds no parameter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dips.core.errors import ConfigError
from dips.core.layout import MAX_DESCRIPTION_CHARS

TRANSFORMERS, OTHER = "huggingface-1", "torch-1"
"""Forms of a description: of a model of Hugging Face transformers, and of any other one."""

MAX_TOLD = 8
"""So many of the absent tensors are named where not all of them can be described."""


@dataclass(frozen=True)
class Lacking:
    """A tensor that is saved with the model and is not trained. dtype: torch's name of it, such as "float32".

    digest: of its contents (core/untrained.py); None where training changes them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: int | None = None


@dataclass(frozen=True)
class ModelDescription:
    """Describes a model beyond its layout. config: the config.json of a model of transformers; empty: another model.

    prefix: precedes its own names in the layout, as when it is a part of another module. absent, n_absent: some of
    the tensors that it has and that are not trained, and how many. lacks: all of them; empty where they are too many.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    absent: tuple[str, ...] = ()
    n_absent: int = 0
    lacks: tuple[Lacking, ...] = ()

    def to_json(self) -> str:
        """Empty when it is longer than a layout may carry: then a version cannot be exported to a folder."""
        raw = {
            "format": TRANSFORMERS if self.config else OTHER,
            "config": dict(self.config),
            "prefix": self.prefix,
            "absent": list(self.absent[:MAX_TOLD]),
            "n_absent": self.n_absent,
        }
        rows = [[one.name, list(one.shape), one.dtype, _hex(one.digest)] for one in self.lacks]
        for whole in ({**raw, "lacks": rows}, raw):
            text = json.dumps(whole, sort_keys=True, separators=(",", ":"))
            if len(text) <= MAX_DESCRIPTION_CHARS:
                return text
        return ""


def description_from_json(text: str) -> ModelDescription | None:
    """The inverse of to_json; None for an empty text. Raises ConfigError for anything else."""
    if not text:
        return None
    try:
        raw = json.loads(text)
        if raw["format"] not in (TRANSFORMERS, OTHER):
            raise ValueError(f"it is of the form {raw['format']!r}")
        config, prefix, absent, n_absent = raw["config"], raw["prefix"], raw["absent"], raw["n_absent"]
        whole = isinstance(config, dict) and isinstance(prefix, str) and isinstance(absent, list)
        of_transformers = raw["format"] == TRANSFORMERS
        if not whole or type(n_absent) is not int or n_absent < 0:
            raise ValueError("a field is of another type")
        if bool(config) != of_transformers or (of_transformers and not isinstance(config.get("model_type"), str)):
            raise ValueError("its configuration is not what its form says")
        if n_absent and not absent:
            raise ValueError("it names none of the tensors that are absent")
        lacks = tuple(_lacking(*row) for row in raw.get("lacks", []))
        if lacks and len(lacks) != n_absent:
            raise ValueError(f"it describes {len(lacks)} of {n_absent} absent tensors")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"the run's description of its model cannot be read ({error}): export one file of tensors instead"
        ) from error
    return ModelDescription(config, prefix, tuple(str(name) for name in absent), n_absent, lacks)


def _hex(digest: int | None) -> str:
    return "" if digest is None else f"{digest:016x}"


def _lacking(name: object, shape: object, dtype: object, digest: object) -> Lacking:
    if not (isinstance(name, str) and isinstance(dtype, str) and isinstance(digest, str) and isinstance(shape, list)):
        raise TypeError(f"{name!r:.80} is no description of a tensor")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"tensor {name[:80]!r} has shape {shape!r:.80}")
    return Lacking(name, tuple(shape), dtype, int(digest, 16) if digest else None)
