"""Writes a version as a folder: one that `from_pretrained` of Hugging Face transformers or of peft opens, or another
content.

The configuration comes with the run's layout (core/model_description.py), or is the byte model's; so neither torch nor
transformers is needed to write it. Where both are installed, a model of that configuration says whether it would take
the tensors, before anything is written. A folder appears whole or not at all, and what is in one is never overwritten
unless `force` says so.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dips.core.errors import ConfigError, Refused
from dips.core.files import TEMPORARY, sync_folder
from dips.core.ids import SlaveId, Version
from dips.core.layout import Layout, PublishedModel, layout_from_json
from dips.core.model_description import WHOLE, Adapter, description_from_json
from dips.core.net.object_store import open_store
from dips.core.placement import Placement
from dips.slave import snapshot_files as manifests
from dips.slave.snapshot_files import NO_RESIDUAL, SnapshotError, SnapshotStamp, read_snapshot
from dips.trainer.export import ABOUT, about_version, export_model, named_tensors, serialized, write_whole
from dips.trainer.sizes import ModelConfig, llama_config, llama_name
from dips.worker.checkpoint_files import RawTensor

CONFIG, INDEX, MODEL = "config.json", "model.safetensors.index.json", "model.safetensors"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
SHARD_BYTES = 5_000_000_000
"""A larger model is written in several files."""

_OURS = re.compile(
    r"(adapter_)?model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|(adapter_)?config\.json|__\d+_\d+\.distcp"
    r"|\.metadata|dips_version\.json"
)
"""What earlier exports of any format wrote."""

_HEADS = (CONFIG, ADAPTER_CONFIG, ".metadata")
"""Without its head, a folder is no model: neither for transformers, nor for peft or torch.distributed.checkpoint."""

Tensors = Mapping[str, NDArray[np.float32] | RawTensor]


class FolderContent(Protocol):
    """What a folder is to hold."""

    def write_files(self, folder: Path) -> None:
        """Write all files, durable, into an empty folder. Raises OSError or ConfigError."""
        ...


@dataclass(frozen=True)
class CheckpointFolder:
    """A version as a torch.distributed.checkpoint, from which a model of any parallelism loads its own parts; `filled`
    are further tensors, which are written unchanged.

    Tensors have the names, shapes and values of the full model, whatever the clusters' ranks held, as in the other
    formats. They are written in pieces, one after the other: memory is that of the version and of one piece.
    """

    fetched: PublishedModel
    filled: Mapping[str, RawTensor] = field(default_factory=dict)

    def write_files(self, folder: Path) -> None:
        import torch  # slow to import, and for this format alone

        from dips.worker.checkpoint_files import CheckpointStamp
        from dips.worker.parallel.shard_files import SavedBox, ShardFile, saved_bytes, whole, write_metadata
        from dips.worker.torch_state import tensor_of

        boxes: list[SavedBox] = []
        name = "__0_0.distcp"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)  # only read
            tensors = {
                name: torch.from_numpy(values)
                for name, values in named_tensors(self.fetched.layout, self.fetched.flat).items()
            }
            tensors |= {name: tensor_of(raw) for name, raw in self.filled.items()}
        write_whole(folder / name, saved_bytes((whole(name, tensor) for name, tensor in tensors.items()), boxes))
        write_metadata(folder, [ShardFile(name, CheckpointStamp(0, ""), tuple(boxes))])
        text = json.dumps(about_version(self.fetched), indent=2) + "\n"
        write_whole(folder / ABOUT, [memoryview(text.encode())])


@dataclass(frozen=True)
class ModelFolder:
    """The files for transformers."""

    config: Mapping[str, Any]
    tensors: Tensors
    about: Mapping[str, Any]  # which version of which run it is
    shard_bytes: int = SHARD_BYTES
    not_checked: str = ""  # why no model of the configuration has said whether it would take the tensors
    tag: str = ""  # in the names of several files, so that nobody takes them for those of another version

    def write_files(self, folder: Path) -> None:
        shards = _shards(self.tensors, self.shard_bytes)
        name = f"model{self.tag}-{{:05d}}-of-{len(shards):05d}.safetensors"
        files = {name.format(n): shard for n, shard in enumerate(shards, 1)}
        if len(shards) == 1:
            files = {MODEL: shards[0]}
        else:
            total = sum(map(_n_bytes, self.tensors.values()))
            where = {name: file for file, shard in files.items() for name in shard}
            write_whole(folder / INDEX, _json({"metadata": {"total_size": total}, "weight_map": where}))
        for file, shard in files.items():
            write_whole(folder / file, serialized(shard, {"format": "pt"}))
        write_whole(folder / ABOUT, _json(self.about))
        write_whole(folder / CONFIG, _json(self.config))


@dataclass(frozen=True)
class AdapterFolder:
    """The files for peft."""

    config: Mapping[str, Any]
    tensors: Tensors
    about: Mapping[str, Any]

    def write_files(self, folder: Path) -> None:
        write_whole(folder / ADAPTER, serialized(self.tensors, {"format": "pt"}))
        write_whole(folder / ABOUT, _json(self.about))
        write_whole(folder / ADAPTER_CONFIG, _json(self.config))


def check_target(folder: Path, force: bool) -> None:
    """Raise ConfigError when a folder cannot be written there without harm; call it before anything is fetched."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: give a folder that does not exist yet")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise ConfigError(f"{folder} is not empty: give another folder, or --force to replace the model in it")


@dataclass(frozen=True)
class TensorsFolder:
    """One file of tensors under the names of the layout, for models that have no configuration."""

    fetched: PublishedModel
    filled: Mapping[str, RawTensor]

    @property
    def tensors(self) -> Tensors:
        return {**named_tensors(self.fetched.layout, self.fetched.flat), **self.filled}

    def write_files(self, folder: Path) -> None:
        export_model(self.fetched, folder / MODEL, filled=self.filled)
        write_whole(folder / ABOUT, _json(about_version(self.fetched)))


def as_folder(
    fetched: PublishedModel, filled: Mapping[str, RawTensor] = MappingProxyType({}), *, check: bool = True
) -> ModelFolder | AdapterFolder:
    """The model's folder; of a run that trains an adapter the adapter's, or with `filled` that of the merged model.

    filled: what the version lacks. Raises ConfigError when all together is not a whole model that transformers knows,
    or, with `check`, would not be taken by a model of its configuration.
    """
    _checked = _taken if check else lambda folder: folder
    described = description_from_json(fetched.layout.description)
    tensors = named_tensors(fetched.layout, fetched.flat)
    about = about_version(fetched)
    if described is None or not described.config:
        if described is not None and described.adapter is not None and not filled:
            return _adapter_folder(described.adapter, tensors, about)
        return _checked(ModelFolder(_byte_model(fetched), {llama_name(name): t for name, t in tensors.items()}, about))
    if described.adapter is not None and not filled:
        return _adapter_folder(described.adapter, tensors, about)
    if described.n_absent and not filled:
        raise ConfigError(
            f"the run trains a part of its model only: {described.n_absent} tensors, such as {described.absent[0]!r}, "
            "are not in it; give --fill FILE with the model that training began with, or export one file of tensors, "
            "and load it over that model"
        )
    if others := [name for name in tensors if not name.startswith(described.prefix)]:
        raise ConfigError(
            f"the run trains {others[0]!r} in addition to its transformers model: export one file of tensors instead"
        )
    # float32 is what the slaves hold. auto_map names program files that are not part of a version.
    left_out = ("auto_map", "torch_dtype", "dtype", "_name_or_path", "quantization_config")
    config = {key: value for key, value in described.config.items() if key not in left_out}
    config["torch_dtype" if "torch_dtype" in described.config else "dtype"] = "float32"
    own = {name.removeprefix(described.prefix): tensor for name, tensor in tensors.items()}
    if described.adapter is not None:
        return _checked(ModelFolder(config, _merged(described.adapter, tensors, described.prefix, filled), about))
    return _checked(ModelFolder(config, {**own, **filled}, about))


def write_folder(content: FolderContent, folder: Path, force: bool = False) -> None:
    """Write it, whole or not at all; with `force` what an earlier export wrote there is replaced, all else stays.

    Raises ConfigError as check_target does, and when the disk does not take it.
    """
    check_target(folder, force)
    folder = folder.absolute()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = folder.with_name(f"{TEMPORARY}{folder.name}.{secrets.token_hex(4)}")
        new.mkdir()
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be written: {error.strerror or error}") from error
    try:
        content.write_files(new)
        _put_in_place(new, folder)
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


class RemoteTarget:
    """A model under a URL of an object store. Use as a context manager: it gives a place on this machine, and what was
    written there is sent at the end, a folder's head last. Raises ConfigError as check_target does, and where the store
    is not reached, before anything is fetched.
    """

    def __init__(self, url: str, is_folder: bool, force: bool) -> None:
        self._is_folder = is_folder
        place, _, self._name = (url.rstrip("/"), "", "model") if is_folder else url.rpartition("/")
        self._objects = open_store(place)
        held = [name for name in self._objects.sizes() if "/" not in name] if is_folder else []
        if not is_folder:
            self._objects.sizes(self._name)  # a wrong credential is said at once
        if held and not force:
            raise ConfigError(f"{url} is not empty: give another URL, or --force to replace the model in it")
        self._old = sorted((name for name in held if _OURS.fullmatch(name)), key=lambda name: name not in _HEADS)

    def __enter__(self) -> Path:
        self._room = tempfile.TemporaryDirectory(prefix="dips-export-")
        return Path(self._room.name) / self._name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._room as room:
            if kind is not None:
                return
            path = Path(room) / self._name
            self._objects.delete(self._old)
            for file in sorted(path.iterdir(), key=lambda file: file.name in _HEADS) if self._is_folder else [path]:
                self._objects.put(file.name, file)


# ---- adapters --------------------------------------------------------------------------------------------------------

_FILE = "export one file of tensors (--format safetensors)"


def _adapter_folder(
    adapter: Adapter, tensors: Mapping[str, NDArray[np.float32]], about: Mapping[str, Any]
) -> AdapterFolder:
    if adapter.why_not:
        raise ConfigError(f"the run's adapter cannot be written as a folder of peft: {adapter.why_not}; {_FILE}")
    if others := [name for name in tensors if not adapter.in_folder(name)]:
        raise ConfigError(f"the run trains {others[0]!r}, which is not part of its adapter: {_FILE}")
    return AdapterFolder(adapter.config, {adapter.in_folder(name): t for name, t in tensors.items()}, about)


def _merged(
    adapter: Adapter, tensors: Mapping[str, NDArray[np.float32]], prefix: str, filled: Mapping[str, RawTensor]
) -> Tensors:
    """The base with the adapter added to it (W + s B A), under the base's names. prefix: of these in the layout.

    Raises ConfigError for what only peft can merge.
    """
    remedy = "leave out --fill, and merge it with peft: PeftModel.from_pretrained(base, DIR).merge_and_unload()"
    if adapter.why_not:
        raise ConfigError(f"the run's adapter cannot be merged: {adapter.why_not}; {_FILE}")
    if not adapter.scaling:
        raise ConfigError(f"the run's adapter is no plain LoRA of matrices, and is not merged here: {remedy}")
    merged: dict[str, NDArray[np.float32] | RawTensor] = {adapter.in_base(name): t for name, t in filled.items()}
    pairs: dict[str, dict[str, NDArray[np.float32]]] = {}
    for name, tensor in tensors.items():
        module, _, kind = adapter.in_folder(name).removesuffix(".weight").rpartition(".")
        whole = adapter.in_base(name.removeprefix(prefix))
        if kind in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"):
            pair = pairs.setdefault(module, {})
            pair[kind[-1]] = tensor
            if len(pair) < 2:
                continue
            base = whole[: whole.rindex(f".{kind}")] + ".weight"
            weight = merged.get(base)
            if not isinstance(weight, RawTensor) or weight.dtype not in ("F32", "BF16", "F16"):
                raise ConfigError(f"the base has no {base!r} of floating-point numbers to merge into: {remedy}")
            added = (pair["B"] @ pair["A"]) * np.float32(adapter.scaling.get(module, adapter.scaling[""]))
            if "embedding" in kind or adapter.config.get("fan_in_fan_out"):
                added = added.T
            if weight.dtype == "BF16":
                values = (weight.data.view("<u2").astype(np.uint32) << 16).view(np.float32)
            else:
                values = weight.data.view("<f4" if weight.dtype == "F32" else "<f2").astype(np.float32)
            merged[base] = values.reshape(weight.shape) + added
        elif whole in merged or WHOLE not in name.split("."):  # or the base's own, such as a bias
            merged[whole] = tensor
        else:
            raise ConfigError(f"the run trains {name!r}, of which the base has no {whole!r}: {remedy}")
    return merged


# ---- names -----------------------------------------------------------------------------------------------------------


def _taken(folder: ModelFolder) -> ModelFolder:
    """Raises ConfigError where a model of the configuration would not take these tensors, and begin with random ones.

    The folder says so where this cannot be known here.
    """
    if absent := [name for name in ("torch", "transformers") if find_spec(name) is None]:
        return replace(folder, not_checked=f"{absent[0]} is not installed here")
    import torch
    import transformers

    named = next(iter(folder.config.get("architectures") or ["no architecture"]))
    kind = getattr(transformers, named, None)
    if kind is None:
        return replace(folder, not_checked=f"transformers {transformers.__version__} here has no {named}")
    try:
        with torch.device("meta"):
            model = kind(kind.config_class.from_dict(dict(folder.config)))
    except Exception as error:  # the library's own
        why = f"transformers {transformers.__version__} here makes no {named} of it ({error!r:.200})"
        return replace(folder, not_checked=why)
    expected = model.state_dict(keep_vars=True)
    tied: dict[int, list[str]] = {}
    for name, tensor in expected.items():
        tied.setdefault(id(tensor), []).append(name)
    may_lack = [*(model._keys_to_ignore_on_load_missing or ()), r"\bnum_batches_tracked$"]
    missing = [
        names[0]
        for names in tied.values()
        if not folder.tensors.keys() & set(names) and not any(re.search(each, names[0]) for each in may_lack)
    ]
    strange = [name for name in folder.tensors if name not in expected]
    other = [name for name, t in folder.tensors.items() if name in expected and t.shape != tuple(expected[name].shape)]
    parts = [("it lacks", missing), ("has", strange), ("has another shape of", other)]
    if said := [f"{what} {_few(names)}" for what, names in parts if names]:
        raise ConfigError(
            f"a {type(model).__name__} of the folder's config.json would not take its tensors ({' and '.join(said)}): "
            f"{_FILE}, and load it in the program that trained it"
        )
    return folder


def _few(names: list[str]) -> str:
    return repr(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _byte_model(fetched: PublishedModel) -> Mapping[str, Any]:
    try:
        return {**llama_config(ModelConfig.from_layout(fetched.layout)), "dtype": "float32"}
    except ConfigError as error:
        raise ConfigError(
            "the run's model is neither one of Hugging Face transformers nor the byte model of `dips train`, so that "
            "no config.json can be written for it: export one file of tensors (--format safetensors)"
        ) from error


def _shards(tensors: Tensors, shard_bytes: int) -> list[Tensors]:
    """Neighbours together, each at most shard_bytes unless a single tensor is larger."""
    shards: list[dict[str, NDArray[np.float32] | RawTensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + _n_bytes(tensor) > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += _n_bytes(tensor)
    return list(shards)


def _n_bytes(tensor: NDArray[np.float32] | RawTensor) -> int:
    return tensor.data.nbytes


def _put_in_place(new: Path, folder: Path) -> None:
    """A new folder at once. In one that is there its head goes first and comes last."""
    if not folder.exists() or not any(folder.iterdir()):
        os.rename(new, folder)  # an empty folder gives way
    else:
        for head in _HEADS:
            (folder / head).unlink(missing_ok=True)
        for old in [path for path in folder.iterdir() if _OURS.fullmatch(path.name)]:
            old.unlink()
        for name in sorted((path.name for path in new.iterdir()), key=lambda name: name in _HEADS):
            os.replace(new / name, folder / name)
        sync_folder(folder)
    sync_folder(folder.parent)


def _json(value: Mapping[str, Any]) -> list[memoryview]:
    return [memoryview((json.dumps(value, indent=2) + "\n").encode())]


# ---- offline ---------------------------------------------------------------------------------------------------------
#
# Reads a published version of a run whose processes are gone, from the slaves' snapshots.
#
# A version counts only if every slave of its placement has a committed snapshot of it whose bytes are what
# was written; the newest such version is taken unless one is named. It must never mix versions, and never
# write.


@dataclass(frozen=True)
class _Committed:
    """A manifest: one slave's part of one version."""

    version: Version
    slave_id: str
    file: Path
    stamp: SnapshotStamp
    digest: str
    record: Mapping[str, Any]


def load_stored(run_dir: Path, version: Version | None = None) -> PublishedModel:
    """The newest version that all slaves have, or the one that is named.

    Raises ConfigError when there is none, naming what is missing or damaged.
    """
    by_version = _manifests(run_dir)
    if version is not None and version not in by_version:
        have = ", ".join(str(v) for v in sorted(by_version))
        raise ConfigError(f"{run_dir} has no snapshot of version {version}, only of {have}: name one of these")
    candidates = [version] if version is not None else sorted(by_version, reverse=True)
    problems: list[str] = []
    for candidate in candidates:
        try:
            # Raises SnapshotError when a slave's part is missing or damaged.
            parts = by_version[candidate]
            run_id, tokens, layout, placement = _read_record(parts[0])
            of_slave = {part.slave_id: part for part in parts}
            flat = np.empty(layout.n_elems, np.float32)
            for slave in placement.slaves:
                if slave not in of_slave:
                    raise SnapshotError(f"slave {slave} has no committed snapshot of it")
                _place(of_slave[slave], slave, layout, placement, flat)
            return PublishedModel(run_id, parts[0].version, tokens, layout, flat)
        except (SnapshotError, OSError) as error:
            problems.append(f"version {candidate}: {error}")
    raise ConfigError(f"no version in {run_dir} is complete on all slaves; " + "; ".join(problems))


def _manifests(run_dir: Path) -> dict[Version, list[_Committed]]:
    found: dict[Version, list[_Committed]] = {}
    for path in sorted((run_dir / "slaves").glob("*/manifest-*.json")):
        try:
            read = manifests.decode(path.read_bytes(), str(path))
            part = path.with_name(read.file), read.stamp, read.info.digest.hex(), json.loads(read.record)
        except (OSError, ValueError, SnapshotError) as error:
            raise ConfigError(f"{path} is not a manifest of a slave ({error}): remove it, or restore it") from error
        version = read.info.version
        found.setdefault(version, []).append(_Committed(version, read.slave_id, *part))
    if not found:
        raise ConfigError(
            f"{run_dir} has no snapshots of slaves: name the directory of a run of `dips demo` or `dips up`, or "
            "collect the slaves' directories in a folder slaves below it"
        )
    return found


def _read_record(part: _Committed) -> tuple[str, int, Layout, Placement]:
    """Run, tokens, layout and placement as the COMMIT record has them; nothing else of it matters here."""
    try:
        ledger = part.record["ledger"]
        slaves = tuple(sorted(SlaveId(name) for name in ledger["slaves"]))
        placement = Placement(slaves, tuple(int(slave) for slave in ledger["placement"]))
        return str(ledger["run_id"]), int(ledger["tokens"]), layout_from_json(ledger["layout"]), placement
    except (KeyError, TypeError, ValueError, Refused) as error:
        raise SnapshotError(f"the COMMIT record next to {part.file} cannot be read ({error!r})") from error


def _place(part: _Committed, slave: SlaveId, layout: Layout, placement: Placement, flat: NDArray[np.float32]) -> None:
    """Copy a slave's blocks, which follow each other in its file, to where they belong."""
    blocks = placement.blocks_of(slave, layout)
    n_elems = sum(block.n_elems for block in blocks)
    theta, momentum = np.empty(n_elems, np.float32), np.empty(n_elems, np.float32)
    with part.file.open("rb") as file:
        head = read_snapshot(file, str(part.file), (theta, momentum, NO_RESIDUAL))
    if head.stamp != part.stamp:
        raise SnapshotError(f"{part.file} is not the file that its manifest names")
    if part.record["digests"].get(slave) != part.digest:
        raise SnapshotError(f"{part.file} does not hold what the COMMIT record of {part.version} says")
    start = 0
    for block in blocks:
        flat[block.start_elem : block.stop_elem] = theta[start : start + block.n_elems]
        start += block.n_elems
