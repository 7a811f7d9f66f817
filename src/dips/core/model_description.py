"""Describes what an export needs beyond a layout: tensors that are not trained, and the model's configuration.

The first cluster to join brings it with the layout, as JSON; so a version can be exported from the slaves' files or
over the network without the program that trained it. Knows no framework, and holds no parameter.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dips.core.errors import ConfigError, RefusalCode, Refused
from dips.core.layout import MAX_DESCRIPTION_CHARS, MAX_NAME_CHARS
from dips.core.messages import TensorDigest

# ---- untrained -------------------------------------------------------------------------------------------------------
#
# Lists the digests of what a model holds and a run does not train: frozen parameters and buffers. A Join carries them.
#
# Clusters that hold other frozen parameters train different models, and merging their updates is wrong without a trace.
# So the first cluster's list is the run's, and the others' are compared with it. Knows no framework: a client without
# frozen parameters and buffers sends two empty lists.


MAX_TENSORS = 1 << 17
"""So many tensors are listed at most, 10 MB of a Join with names of 60 characters."""

MAX_NAMES_BYTES = 16 << 20
"""Of all names together; with digests what the text of a list is made from stays below twice as much."""

_MAX_TEXT_BYTES = 8 * MAX_NAMES_BYTES
_NAMED = 3
"""So many tensors of a kind are named in a refusal."""

_NAME_CHARS = 100


@dataclass(frozen=True)
class Untrained:
    """The frozen parameters and the buffers of a model. Names are unique within each list."""

    frozen: tuple[TensorDigest, ...] = ()
    buffers: tuple[TensorDigest, ...] = ()

    def check(self) -> None:
        """Raises Refused(MALFORMED) for lists that no client of ours sends."""
        if (n := len(self.frozen) + len(self.buffers)) > MAX_TENSORS:
            raise _malformed(f"{n} tensors that are not trained are listed, at most {MAX_TENSORS} can be")
        n_bytes = 0
        for what, listed in (("frozen parameter", self.frozen), ("buffer", self.buffers)):
            seen: set[str] = set()
            for item in listed:
                if not 0 < len(item.name) <= MAX_NAME_CHARS:
                    raise _malformed(f"the name of a {what} is empty or longer than {MAX_NAME_CHARS} characters")
                if item.name in seen:
                    raise _malformed(f"{what} {item.name[:_NAME_CHARS]!r} is listed twice")
                seen.add(item.name)
                n_bytes += len(item.name.encode())
        if n_bytes > MAX_NAMES_BYTES:
            raise _malformed(f"names of tensors that are not trained take {n_bytes} bytes: {MAX_NAMES_BYTES} can be")

    def to_text(self) -> str:
        """Compact, since it is in every entry of the journal: names of a model compress well."""
        raw = [[[item.name, f"{item.digest:016x}"] for item in listed] for listed in (self.frozen, self.buffers)]
        return base64.b85encode(zlib.compress(json.dumps(raw, separators=(",", ":")).encode(), 6)).decode()

    @staticmethod
    def from_text(text: str) -> Untrained:
        """The inverse of to_text. Raises ValueError for anything else, however long it would become."""
        try:
            unpack = zlib.decompressobj()
            data = unpack.decompress(base64.b85decode(text), _MAX_TEXT_BYTES)
            if unpack.unconsumed_tail or not unpack.eof:
                raise ValueError("it is cut, or far too long")
            frozen, buffers = json.loads(data)
            read = Untrained(_digests(frozen), _digests(buffers))
            read.check()
        except (ValueError, TypeError, zlib.error, RecursionError, Refused) as error:
            raise ValueError(f"the list of what the run does not train cannot be read: {error}") from error
        return read


def difference(what: str, ours: tuple[TensorDigest, ...], theirs: tuple[TensorDigest, ...]) -> str:
    """Which tensors of a kind (`what`, in the plural) another cluster holds differently, by name; empty when none."""
    mine, other = _by_name(ours), _by_name(theirs)
    parts = (
        ("{} {} differ", [name for name in mine if other.get(name, mine[name]) != mine[name]]),
        ("it lacks {} {}", [name for name in mine if name not in other]),
        ("{} {} are in no other cluster's model", [name for name in other if name not in mine]),
    )
    return "; ".join(sentence.format(what, _named(names)) for sentence, names in parts if names)


def _named(names: list[str]) -> str:
    shown = ", ".join(repr(name[:_NAME_CHARS]) for name in names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


def _by_name(listed: tuple[TensorDigest, ...]) -> Mapping[str, int]:
    return {item.name: item.digest for item in listed}


def _digests(raw: object) -> tuple[TensorDigest, ...]:
    if not isinstance(raw, list):
        raise TypeError(f"{raw!r:.40} is no list")
    items = []
    for name, digest in raw:
        if not isinstance(name, str) or not isinstance(digest, str) or len(digest) != 16:
            raise TypeError(f"{name!r:.40} and {digest!r:.40} are no name and digest")
        items.append(TensorDigest(name, int(digest, 16)))
    return tuple(items)


def _malformed(sentence: str) -> Refused:
    return Refused(RefusalCode.MALFORMED, sentence)


# ---- model description -----------------------------------------------------------------------------------------------


TRANSFORMERS, OTHER = "huggingface-1", "torch-1"
"""Forms of a description: of a model of Hugging Face transformers, and of any other one."""

MAX_TOLD = 8
"""So many of the absent tensors are named where not all of them can be described."""


@dataclass(frozen=True)
class Lacking:
    """A tensor that is saved with the model and is not trained."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name of it, such as "float32"
    digest: int | None = None  # of its contents (core/model_description.py); None where training changes them


_OF_BASE, WHOLE = ("base_layer", "original_module"), "modules_to_save"
OF_PEFT = (*_OF_BASE, WHOLE)
"""What peft puts into names of the model that it adapts; WHOLE: of modules that are trained as a whole."""


@dataclass(frozen=True)
class Adapter:
    """The adapter of peft (a LoRA) that a run trains, and what its folder has."""

    name: str = ""  # in peft, such as "default"
    config: Mapping[str, Any] = field(default_factory=dict)  # the adapter_config.json
    prefix: str = ""  # precedes the adapted model's names in the layout
    folder_prefix: str = ""  # and in the adapter's folder
    # names: of tensors in the layout that have another name in the folder than in_folder() makes; "": they are not
    # part of the adapter
    names: Mapping[str, str] = field(default_factory=dict)
    # scaling: of what the adapter adds to the module of this name in the folder; "": to all others. Empty: it is no
    # plain LoRA, and only peft can merge it.
    scaling: Mapping[str, float] = field(default_factory=dict)
    why_not: str = ""  # it cannot be written as a folder

    def in_folder(self, name: str) -> str:
        """The name that a tensor of the layout has in the adapter's folder; empty: it is not part of the adapter."""
        if name in self.names:
            return self.names[name]
        parts = name.removeprefix(self.prefix).split(".")
        at = len(parts) - (1 if parts[-1] == self.name else 2)
        if at > 0 and parts[at] == self.name:
            del parts[at]
        return self.folder_prefix + ".".join(parts)

    def in_base(self, name: str) -> str:
        """The name that a tensor has in the model without an adapter."""
        parts = [part for part in name.split(".") if part not in _OF_BASE]
        if WHOLE in parts and parts[(at := parts.index(WHOLE)) + 1 : at + 2] == [self.name]:
            del parts[at : at + 2]
        return ".".join(parts)

    @staticmethod
    def from_raw(raw: Any) -> Adapter:
        """Raises ValueError, KeyError or TypeError for what is not vars() of one."""
        adapter = Adapter(**raw)
        texts = (adapter.name, adapter.prefix, adapter.folder_prefix, adapter.why_not, *adapter.names.keys())
        if not all(isinstance(text, str) for text in (*texts, *adapter.names.values(), *adapter.scaling.keys())):
            raise TypeError("a name of its adapter is no text")
        if not all(type(factor) in (int, float) and math.isfinite(factor) for factor in adapter.scaling.values()):
            raise ValueError("the scaling of its adapter is no number")
        if not adapter.why_not and not isinstance(adapter.config.get("peft_type"), str):
            raise ValueError("the configuration of its adapter is not one of peft")
        return adapter


@dataclass(frozen=True)
class ModelDescription:
    """Describes a model beyond its layout."""

    # the config.json of a model of transformers; empty: another model
    config: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""  # precedes its own names in the layout, as when it is a part of another module
    # absent, n_absent: some of the tensors that it has and that are not trained, and how many
    absent: tuple[str, ...] = ()
    n_absent: int = 0
    lacks: tuple[Lacking, ...] = ()  # all of them; empty where they are too many
    adapter: Adapter | None = None

    def to_json(self) -> str:
        """Without what is too long for a layout; empty: then a version cannot be exported to a folder."""
        raw = {
            "format": TRANSFORMERS if self.config else OTHER,
            "config": dict(self.config),
            "prefix": self.prefix,
            "absent": list(self.absent[:MAX_TOLD]),
            "n_absent": self.n_absent,
        }
        forms = [raw]
        if self.adapter is not None:
            too_long = Adapter(
                self.adapter.name, why_not="its configuration and names are too long for the run's layout"
            )
            forms = [{**raw, "adapter": vars(self.adapter)}, {**raw, "adapter": vars(too_long)}]
        rows = [
            [one.name, list(one.shape), one.dtype, "" if one.digest is None else f"{one.digest:016x}"]
            for one in self.lacks
        ]
        for whole in ({**forms[0], "lacks": rows}, *forms):
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
        adapter = None if raw.get("adapter") is None else Adapter.from_raw(raw["adapter"])
        if lacks and len(lacks) != n_absent:
            raise ValueError(f"it describes {len(lacks)} of {n_absent} absent tensors")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"the run's description of its model cannot be read ({error}): export one file of tensors instead"
        ) from error
    return ModelDescription(config, prefix, tuple(str(name) for name in absent), n_absent, lacks, adapter)


def _lacking(name: object, shape: object, dtype: object, digest: object) -> Lacking:
    if not (isinstance(name, str) and isinstance(dtype, str) and isinstance(digest, str) and isinstance(shape, list)):
        raise TypeError(f"{name!r:.80} is no description of a tensor")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"tensor {name[:80]!r} has shape {shape!r:.80}")
    return Lacking(name, tuple(shape), dtype, int(digest, 16) if digest else None)
