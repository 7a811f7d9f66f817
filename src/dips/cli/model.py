"""`dips export`, `dips follow` and `dips eval`: write published versions as files, and compute a held-out loss.

What reads, fetches and evaluates is imported by the functions that use it, so that --help and mistakes are answered at
once; torch only by an evaluation and by the checkpoint format.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dips.cli.run_options import RUN, Insecure, Keys, Run, asked_security, keys_of_run
from dips.core.errors import ConfigError, RefusalCode, Refused, RetryLater
from dips.core.ids import Version, parse_version
from dips.core.net.object_store import is_url
from dips.core.net.security import Security
from dips.core.units import format_count
from dips.local.operator_client import NamedRun, OperatorClient
from dips.local.options import ConfigFile, role_settings, with_knobs
from dips.local.processes import EVALUATION_KNOBS
from dips.master.directory import read_address
from dips.trainer.config import SECTION as TRAIN_SECTION
from dips.trainer.config import TrainConfig
from dips.trainer.corpus import check_paths
from dips.worker.config import SECTION as CLIENT_SECTION
from dips.worker.config import ClientConfig

if TYPE_CHECKING:
    from dips.core.layout import PublishedModel
    from dips.worker.checkpoint_files import RawTensor

FETCH_S = 10.0
FOLLOW_S = 120.0
_LOOK_S = 2.0
_READER = "export"


class Form(Enum):
    """The formats that `dips export` writes."""

    HUGGINGFACE = "huggingface"
    SAFETENSORS = "safetensors"
    DCP = "dcp"


FillFrom = Annotated[
    Path | None,
    typer.Option(
        "--fill",
        metavar="FILE",
        help="The model's state, with what a run does not train (frozen weights, buffers): a .safetensors file, or a "
        "folder of them.",
    ),
]
AVersion = Annotated[
    str | None, typer.Option("--version", metavar="T:V", help="A version as `dips status` names it; else the newest.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]

_OF_READERS = {"tape", "metrics_listen", "metrics_file"}
_NOT_OF_EVALUATION = (set(TrainConfig.model_fields) - EVALUATION_KNOBS) | (set(ClientConfig.model_fields) - _OF_READERS)


def export(
    run: Run = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="PATH",
            help="What to write: FILE.safetensors, or a folder for from_pretrained(); either may be a URL of an object "
            "store, such as s3://BUCKET/MODEL.",
        ),
    ] = None,
    form: Annotated[
        Form | None,
        typer.Option(
            "--format",
            help="safetensors: one file (the default for a PATH that ends so); huggingface: a folder; dcp: a folder "
            "for torch.distributed.checkpoint.load().",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an earlier export in a folder that is not empty.")
    ] = False,
    version: AVersion = None,
    fill_from: FillFrom = None,
    wait_s: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0.0, help="How long to wait for a first version.")
    ] = FETCH_S,
    keys: Keys = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> int:
    """Write a published version, while training goes on or after it has ended: one safetensors file, or a folder.

    Three formats: safetensors is one file of all tensors. huggingface is a folder with config.json and safetensors, as
    transformers' from_pretrained() opens it, for models of transformers and for the byte model of `dips train`; of a
    run that trains an adapter of peft (a LoRA) it is the adapter's folder, or with --fill the merged model's. dcp is
    a torch.distributed.checkpoint, a folder from which each rank of any parallelism (FSDP2, tensor, pipeline, or none)
    loads its own part with torch.distributed.checkpoint.load().

    From a master, or from a run's directory: of a run that has ended, the slaves' snapshots are put together. What is
    written is checked against the digests of its round. What the run does not train, and no version holds, can be added
    from a file, which must be the one that training began with.
    """
    wanted = parse_version(version) if version else None
    if to is None:
        raise ConfigError("nothing says what to write: give --to FILE.safetensors, or --to DIR for a folder")
    named = NamedRun.of(run)
    from dips.core.model_description import description_from_json
    from dips.local.model_folder import (
        AdapterFolder,
        CheckpointFolder,
        RemoteTarget,
        as_folder,
        check_target,
        write_folder,
    )
    from dips.trainer.export import export_model, fill

    form = form or (Form.SAFETENSORS if to.endswith(".safetensors") else Form.HUGGINGFACE)
    is_folder = form is not Form.SAFETENSORS
    remote = RemoteTarget(to, is_folder, force) if is_url(to) else None
    if is_folder and remote is None:
        check_target(Path(to), force)
    fetched = _fetch(named, wanted, wait_s, lambda: asked_security(keys, insecure, named.directory))
    described = description_from_json(fetched.layout.description)
    filled = fill(fetched.layout, described, fill_from) if fill_from is not None else {}
    is_adapter, not_checked = False, ""
    with remote or contextlib.nullcontext(Path(to)) as path:
        if form is Form.HUGGINGFACE:
            folder = as_folder(fetched, filled)
            if isinstance(folder, AdapterFolder):
                is_adapter = True
            else:
                not_checked = folder.not_checked
            write_folder(folder, path, force)
        else:
            prefix = described.prefix if described is not None else ""
            more = {prefix + name: tensor for name, tensor in filled.items()}
            if form is Form.DCP:
                write_folder(CheckpointFolder(fetched, more), path, force)
            else:
                export_model(fetched, path, filled=more)
    lacking = described.n_absent - len(filled) if described is not None else 0
    fields = {
        "file": to,
        "format": form.value,
        "run_id": fetched.run_id,
        "timeline": fetched.version.timeline,
        "version": fetched.version.v,
        "tokens": fetched.tokens,
        "elements": fetched.layout.n_elems,
        "filled": len(filled),
        "lacking": lacking,
        "not_checked": not_checked,
    }
    sentence = f"{to}: version {fetched.version} of run {fetched.run_id}, {format_count(fetched.tokens)} tokens"
    if is_adapter:
        sentence += (
            f"\nIt is an adapter: load it with peft, PeftModel.from_pretrained(base, {to!r}), over the base that "
            "training began with; --fill FILE, with that base, gives the merged model"
        )
    elif described is not None and lacking:
        sentence += (
            f"\nIt lacks {lacking} tensors that the run does not train, such as {described.absent[0]!r}: load it over "
            "the model that training began with, or add them with --fill FILE"
        )
    if not_checked:
        sentence += (
            f"\nNot checked whether a new model of its config.json takes its tensors: {not_checked}; from_pretrained() "
            "says at loading which weights are newly initialized: there must be none"
        )
    print(json.dumps(fields) if as_json else sentence)
    return 0


def follow(
    run: Run = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="DIR", help="The folder to keep: empty, new, or made by an earlier follow."),
    ] = None,
    form: Annotated[
        Form,
        typer.Option(
            "--format",
            help="huggingface: a folder for from_pretrained(); safetensors: one file of tensors, of any model.",
        ),
    ] = Form.HUGGINGFACE,
    keep: Annotated[int, typer.Option("--keep", metavar="N", min=1, help="How many versions stay.")] = 2,
    once: Annotated[bool, typer.Option("--once", help="End when the newest version is there.")] = False,
    fill_from: FillFrom = None,
    wait_s: Annotated[
        float,
        typer.Option(
            "--wait", metavar="SECONDS", min=0.0, help="How long to wait for a master that has not answered yet."
        ),
    ] = FOLLOW_S,
    keys: Keys = None,
    insecure: Insecure = False,
) -> int:
    """Keep a folder at a run's newest version, until the run has ended: for evaluation, inference, or samplers.

    DIR/newest leads to the newest version, whole at every moment; resolve it once, and open what it leads to. Versions
    come as differences to the one before where the run publishes them (pull_wire); a follow that was interrupted goes
    on from the version in DIR. A master or a slave that is away, and a full disk, are waited for. Of a run that has
    ended and is named by its directory, the last version is put together from the slaves' snapshots.
    """
    if to is None:
        raise ConfigError("nothing says where to: give --to DIR")
    if form is Form.DCP:
        raise ConfigError("--format dcp is for `dips export`: give huggingface or safetensors")
    named = NamedRun.of(run)
    from dips.core.model_description import description_from_json
    from dips.local.followed_folder import Content, FollowedFolder, keep_newest
    from dips.local.model_folder import TensorsFolder, as_folder, load_stored
    from dips.trainer.export import fill

    def content(fetched: PublishedModel) -> Content:
        described = description_from_json(fetched.layout.description)
        if fill_from is not None and not filled:
            filled.update(fill(fetched.layout, described, fill_from))
        if form is Form.HUGGINGFACE:
            return as_folder(fetched, filled, check=False)
        prefix = described.prefix if described is not None else ""
        return TensorsFolder(fetched, {prefix + name: tensor for name, tensor in filled.items()})

    filled: dict[str, RawTensor] = {}
    with FollowedFolder(to, content, keep) as folder:
        try:
            master = named.master()
            return keep_newest(folder, master, asked_security(keys, insecure, named.directory), wait_s, once=once)
        except RetryLater:
            left = named.at_rest()
            if left is None or not left.stopped or named.directory is None:
                raise
            stored, held = load_stored(named.directory), folder.held()
            if held is None or (held.run_id, held.version) != (stored.run_id, stored.version):
                folder.put(stored)
            print(f"{folder.newest}: the run has ended with version {stored.version}")
            return 0


@with_knobs(TrainConfig, ClientConfig, without=_NOT_OF_EVALUATION)
def evaluate(
    model: Annotated[
        str | None,
        typer.Argument(metavar="RUN | MODEL.safetensors", help=f"{RUN}, else DIPS_MASTER; or an exported file."),
    ] = None,
    version: AVersion = None,
    follow_run: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Every version as it is published, to --tape, until the run has stopped. A master that goes away "
            "meanwhile is waited for.",
        ),
    ] = False,
    keys: Keys = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
    config: ConfigFile = None,
    **given: Any,
) -> int:
    """Print the held-out loss of an exported model, or of a version that a run still keeps.

    Give the same --data and held-out settings as in training: the text is then the same that was never trained on, and
    the loss is the one that the run reported.
    """
    # torch takes seconds to import: mistakes that can be seen without it are told before.
    train = role_settings(TrainConfig, TRAIN_SECTION, config, given).value
    check_paths(train.data)
    if model is not None and model.endswith(".safetensors"):
        if version or follow_run:
            raise ConfigError(f"{model} is one model: --version and --follow are for a run")
        from dips.trainer.export import read_export
        from dips.trainer.sizes import ModelConfig

        exported = read_export(Path(model))
        ModelConfig.from_layout(exported.layout)
        from dips.trainer.evaluate import Evaluator

        evaluation = Evaluator(train)(exported)
    else:
        run = NamedRun.of(model)
        if follow_run:
            keys = keys or keys_of_run(run.directory)
            ours = {**given, "keys": keys, "insecure": insecure or None, "master": run.master()}
            client = role_settings(ClientConfig, CLIENT_SECTION, None, ours).value
            from dips.trainer.evaluate import follow

            return follow(train, client)
        wanted = parse_version(version) if version else None
        security = asked_security(keys, insecure, run.directory)
        master = run.master()
        from dips.trainer.evaluate import evaluate_live

        evaluation = evaluate_live(master, None, train, security, wanted)
    fields = {
        "run_id": evaluation.run_id,
        "timeline": evaluation.version.timeline,
        "version": evaluation.version.v,
        "tokens": evaluation.tokens,
        "loss": evaluation.loss,
    }
    sentence = (
        f"held-out loss {evaluation.loss:.6f} nats per byte: version {evaluation.version} of run {evaluation.run_id}, "
        f"{format_count(evaluation.tokens)} tokens"
    )
    print(json.dumps(fields) if as_json else sentence)
    return 0


def _answers(address: str, run_id: str, security: Security) -> bool:
    """Whether that run is served there: a killed master leaves its address behind."""
    try:
        with OperatorClient(address, run_id, _LOOK_S, security=security) as operator:
            operator.status()
    except RetryLater:
        return False
    return True


def _fetch(run: NamedRun, version: Version | None, wait_s: float, security: Callable[[], Security]) -> PublishedModel:
    """security: asked for only when a master is: the files of a run that has ended need none."""
    from dips.local.model_folder import load_stored
    from dips.worker.reader import fetch_version

    if run.directory is None:
        address = run.master()
    else:
        written = read_address(run.directory / "master")
        if written is None or not _answers(written.address, written.run_id, security()):
            return load_stored(run.directory, version)
        address = written.address
    try:
        return fetch_version(address, None, _READER, security(), version=version, deadline_s=wait_s)
    except Refused as refused:
        if refused.code is not RefusalCode.VERSION_GONE or run.directory is None:
            raise
        return load_stored(run.directory, version)  # memory has let it go; a snapshot on disk may still hold it
