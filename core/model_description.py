"""What a layout's names and shapes do not tell, and a model's folder needs: the configuration of its architecture.

The first cluster to join brings it with the layout, as JSON; so a version can be exported from the slaves' files or
over the network without the program that trained it. Knows no framework, and holds no parameter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dips.core.errors import ConfigError
from dips.core.layout import MAX_DESCRIPTION_CHARS

FORMAT = "huggingface-1"
MAX_TOLD = 8
"""So many of the absent tensors are named."""


@dataclass(frozen=True)
class ModelDescription:
    """A model of Hugging Face transformers.

    config: what its config.json says. prefix: stands before its own names in the layout, as when it is a part of
    another module. absent, n_absent: some of the tensors that it has and that are not trained, and how many.
    """

    config: Mapping[str, Any]
    prefix: str = ""
    absent: tuple[str, ...] = ()
    n_absent: int = 0

    def to_json(self) -> str:
        """Empty when it is longer than a layout may carry: then a version cannot be exported to a folder."""
        raw = {
            "format": FORMAT,
            "config": dict(self.config),
            "prefix": self.prefix,
            "absent": list(self.absent[:MAX_TOLD]),
            "n_absent": self.n_absent,
        }
        text = json.dumps(raw, sort_keys=True, separators=(",", ":"))
        return text if len(text) <= MAX_DESCRIPTION_CHARS else ""


def description_from_json(text: str) -> ModelDescription | None:
    """The inverse of to_json; None for an empty text. Raises ConfigError for anything else."""
    if not text:
        return None
    try:
        raw = json.loads(text)
        if raw["format"] != FORMAT:
            raise ValueError(f"it is of the form {raw['format']!r}")
        config, prefix, absent, n_absent = raw["config"], raw["prefix"], raw["absent"], raw["n_absent"]
        whole = isinstance(config, dict) and isinstance(prefix, str) and isinstance(absent, list)
        if not whole or not isinstance(config.get("model_type"), str) or not isinstance(n_absent, int):
            raise ValueError("a field is of another type")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"the run's description of its model cannot be read ({error}): export one file of tensors instead"
        ) from error
    return ModelDescription(config, prefix, tuple(str(name) for name in absent), n_absent)
