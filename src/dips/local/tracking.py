"""Follows what a run's master records, and writes it to an experiment tracker: TensorBoard, wandb, MLflow or Trackio.

The source is the master's tape, which has every round, and the tape of the held-out evaluator. A point belongs to a
version, and its step is the version's number; each timeline is a run of its own in the tracker, since a rollback gives
numbers a second time, and so are the held-out losses, which come later. What the tracker holds says where to go on:
there is no second record of it that could differ. So a restart of either side leaves no gap and no double.

A tracker that fails is a warning, and is opened again later; the tapes keep what it lacks. Must never write into the
run's records. The trackers' packages are imported when one is opened: they are optional.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import re
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import xxhash
from pydantic import Field

from dips.core.config import Knobs
from dips.core.errors import ConfigError
from dips.core.files import FolderLock
from dips.core.ids import Version, parse_version
from dips.core.release import how_to_install
from dips.core.units import format_seconds
from dips.core.wire import Codec, encoded_bytes
from dips.judge.records import find_tapes
from dips.local.log_files import HELDOUT_TAPE, tape_path
from dips.master.page.history import TapeTail, heldout_point

_logger = logging.getLogger("dips.track")

PACKAGES = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "trackio": ("trackio",),
}
"""What each tracker needs; the extra has its name."""

RETRY_FIRST_S, RETRY_MOST_S = 1.0, 60.0


class TrackKnobs(Knobs):
    """Where a run's curves go."""

    to: Literal["tensorboard", "wandb", "mlflow", "trackio"] = Field(description="The tracker.")
    dir: Path | None = Field(
        None,
        description="Folder that the tracker writes to; without it track/ in the run's directory. MLflow uses "
        "MLFLOW_TRACKING_URI where that is set and this is not.",
    )
    project: str = Field("dips", min_length=1, description="Project or experiment in the tracker.")


def check_tracker(knobs: TrackKnobs) -> None:
    """Raise ConfigError when the tracker's package is not installed, or it cannot be used as asked."""
    if absent := [name for name in PACKAGES[knobs.to] if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"the tracker {knobs.to} needs the package {absent[0]}: {how_to_install(knobs.to)}")
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL") if knobs.to == "trackio" else ():
        if os.environ.get(name):
            raise ConfigError(
                f"{name} is set, and trackio is written to a folder here, from which the run goes on after a restart: "
                "unset it, and use `trackio sync` for the folder"
            )


# ---- what is written -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """What is known of one version."""

    what: str  # "": a round; or "-heldout"
    version: Version
    wall_s: float  # Unix time when it was recorded
    values: Mapping[str, float]

    @property
    def step(self) -> int:
        return self.version.v

    @property
    def stream(self) -> str:
        """The end of the name of its run in the tracker."""
        timeline = self.version.timeline
        return self.what if timeline == 1 else f"{self.what}-timeline-{timeline}"


@dataclass
class RoundReader:
    """Makes points of the lines of the master's tape."""

    run_id: str = "run"  # an older release did not write it
    settings: dict[str, Any] = field(default_factory=dict)
    ended: bool = False
    _tickets: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    _judged: dict[str, tuple[Mapping[str, Any], dict[str, Mapping[str, Any]]]] = field(default_factory=dict)
    _rounds: dict[str, str] = field(default_factory=dict)  # version -> its round
    _progress: Mapping[str, Any] = field(default_factory=dict)
    _before: tuple[float, float] | None = None  # time and tokens of the version before

    def take(self, line: Mapping[str, Any]) -> Point | None:
        """The point that this line completes."""
        kind = line["kind"]
        if kind in ("master-started", "master-ended"):
            self.ended = kind == "master-ended" and line["exit_code"] == 0
            self.run_id = line.get("run_id", self.run_id)
            self.settings = line.get("settings", self.settings)
        elif kind == "ticket":
            self._tickets[line["push"].rpartition("/")[0]] = line
        elif kind == "judged":
            pushed = {*line["accepted"], *line["rejected"]} & self._tickets.keys()
            self._judged = {line["round"]: (line, {name: self._tickets[name] for name in pushed})}
        elif kind == "commit":
            self._rounds = {line["version"]: line["round"]}
        elif kind == "progress":
            self._progress = line
        elif kind == "publish":
            return self._published(parse_version(line["version"]), line)
        return None

    def _published(self, version: Version, line: Mapping[str, Any]) -> Point:
        wall_s, tokens = float(line["wall_s"]), float(line["tokens"])
        values: dict[str, Any] = {"version": version.v, "tokens": tokens}
        if self._before is not None and wall_s > self._before[0]:
            values["round_s"] = wall_s - self._before[0]
            values["tokens_per_s"] = max(0.0, tokens - self._before[1]) / values["round_s"]
        self._before = (wall_s, tokens)
        progress = self._progress if self._progress.get("version") == line["version"] else {}
        seen: Mapping[str, Mapping[str, Any]] = progress.get("clusters", {})
        for name, facts in seen.items():
            values |= {f"{name}/{key}": value for key, value in facts.items()}
        judged, tickets = self._judged.get(self._rounds.get(line["version"], ""), ({}, {}))
        if judged:
            values |= {key: judged[key] for key in ("kappa", "rho", "merged_norm")}
            values |= {"clusters": len(judged["accepted"]), "excluded": len(judged["rejected"])}
        for name, ticket in tickets.items():
            base = parse_version(ticket["base"]) if ticket["base"] not in (None, "None") else None
            if base is not None and base.timeline == version.timeline:
                values[f"{name}/staleness"] = version.v - 1 - base.v
            values[f"{name}/tokens"] = ticket["tokens"]
            if elems := progress.get("elems"):
                values[f"{name}/push_bytes"] = encoded_bytes(Codec[ticket["wire"]], elems)
            for key, field_name in (("norm", "norms"), ("score", "scores"), ("cosine", "cosines")):
                values[f"{name}/{key}"] = judged[field_name].get(name)
        losses = [(tickets[name]["tokens"], seen[name].get("loss")) for name in tickets.keys() & seen.keys()]
        known = [(weight, loss) for weight, loss in losses if _is_number(loss)]
        if weights := sum(weight for weight, _ in known):
            values["loss"] = sum(weight * loss for weight, loss in known) / weights
        return _point("", version, wall_s, values)


def _point(what: str, version: Version, wall_s: float, values: Mapping[str, Any]) -> Point:
    return Point(what, version, wall_s, {key: float(value) for key, value in values.items() if _is_number(value)})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _heldout(line: Mapping[str, Any]) -> Point | None:
    found = heldout_point(float(line["wall_s"]), line["kind"], line)
    if found is None:
        return None
    values = {"version": found.version.v, "tokens": found.tokens, "heldout_loss": found.loss}
    return _point("-heldout", found.version, found.wall_s, values)


_KINDS = re.compile(rb'"kind":"(?:master-started|master-ended|ticket|judged|commit|progress|publish|heldout)"')


def _points(tail: TapeTail, take: Callable[[Mapping[str, Any]], Point | None]) -> Iterator[Point]:
    """Raises ConfigError for a line that is not what a process wrote."""
    for line in filter(_KINDS.search, tail.lines()):
        try:
            point = take(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"a line of tape {tail.path} cannot be read ({error!r}): it was changed") from error
        if point is not None:
            yield point


# ---- following -------------------------------------------------------------------------------------------------------


class Tracking:
    """Brings a run's points to a tracker. look() is called again and again; close() at the end."""

    def __init__(self, directory: Path, knobs: TrackKnobs, open_one: Opener | None = None) -> None:
        """directory: with the run's tapes. Raises ConfigError when the master has written none, or another process
        writes this run to this tracker."""
        tapes = [path for path, role in find_tapes(directory).items() if role == "master"]
        if not tapes:
            raise ConfigError(f"{directory} has no tape of a master: start the run, or give its master's directory")
        # Another run of the same name has another first line, and is another run in the tracker
        with tapes[0].open("rb") as file:
            self._digest = xxhash.xxh3_64_hexdigest(file.readline())[:8]
        self._knobs = knobs
        self._folder = (knobs.dir or directory / "track").resolve()
        self._lock = FolderLock(
            self._folder,
            f".{knobs.to}-{self._digest}.lock",
            unusable=f"{self._folder} cannot be used ({{why}}): give another --dir",
            held=f"process {{holder}} writes this run to {knobs.to} already: one is enough",
            of_process=True,
        )
        self._tails = [TapeTail(path) for path in tapes]
        self._heldout = TapeTail(tape_path(directory, HELDOUT_TAPE))
        self._reader = RoundReader()
        self._waiting: deque[Point] = deque()
        kinds: dict[str, Opener] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MlFlow, "trackio": Trackio}
        self._open = open_one or kinds[knobs.to]
        self._trackers: dict[str, Tracker] = {}
        self._newest: dict[str, Version] = {}  # of rounds and of held-out losses, the one that was handed over last
        self._retry_s = self._due_s = 0.0
        self.written = 0

    @property
    def ended(self) -> bool:
        """The master has ended the run, and all that was recorded is written."""
        return self._reader.ended and not self._waiting

    @property
    def heldout_is_whole(self) -> bool:
        """Nothing measures held-out losses, or that of the newest version is there."""
        return not self._heldout.path.is_file() or self._newest.get("-heldout") == self._newest.get("")

    @property
    def run_id(self) -> str:
        return self._reader.run_id

    @property
    def is_away(self) -> bool:
        """The tracker takes nothing now."""
        return self._retry_s > 0

    def look(self, now_s: float) -> bool:
        """Write what is new, up to a bound; whether that is all. Tapes are read only once the last lines are written,
        so that a long outage takes no memory. Raises ConfigError for an altered tape."""
        self._read()
        while self._waiting and now_s >= self._due_s and self._write_first(now_s):
            pass
        self._read()
        return not self._waiting

    def _read(self) -> None:
        if self._waiting:
            return
        while not self._waiting and self._tails:
            before = self._tails[0].at_bytes
            self._waiting += _points(self._tails[0], self._reader.take)
            if self._tails[0].at_bytes == before:
                if len(self._tails) == 1:
                    break
                del self._tails[0]
        self._waiting += _points(self._heldout, _heldout)

    def _write_first(self, now_s: float) -> bool:
        point = self._waiting[0]
        try:
            tracker = self._trackers.get(point.stream)
            if tracker is None:
                run_id = self._reader.run_id
                name = f"{run_id}-{self._digest}{point.stream}"
                target = Target(self._knobs, self._folder, name, {"run_id": run_id, **self._reader.settings})
                tracker = self._trackers[point.stream] = self._open(target)
            if point.step > tracker.last:
                tracker.write(point)
                tracker.last = point.step
                self.written += 1
        except Exception as error:  # whatever another project's package raises must not end this one
            self.close()
            self._retry_s = min(max(RETRY_FIRST_S, 2 * self._retry_s), RETRY_MOST_S)
            self._due_s = now_s + self._retry_s
            # MLflow's address may have a password in it
            said = re.sub(r"//[^/\s]*@", "//", " ".join(str(error).split()))[:400] or type(error).__name__
            retry = format_seconds(self._retry_s)
            _logger.warning(
                "%s does not take what the run recorded; tried again in %s: %s", self._knobs.to, retry, said
            )
            return False
        if self._retry_s:
            _logger.warning("%s takes what the run records again", self._knobs.to)
        self._retry_s = 0.0
        self._newest[point.what] = point.version
        self._waiting.popleft()
        return True

    def close(self) -> None:
        """Let go of the tracker; what it does not hold then is written after the next start."""
        for tracker in self._trackers.values():
            try:
                tracker.close()
            except Exception as error:  # as above
                _logger.warning("%s did not close: %s", self._knobs.to, error)
        self._trackers.clear()


# ---- trackers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A run in a tracker."""

    knobs: TrackKnobs
    folder: Path
    name: str
    settings: Mapping[str, Any]


class Tracker(ABC):
    """One run in a tracker. `last`: the newest step that it holds, -1 for none."""

    last: int

    @abstractmethod
    def write(self, point: Point) -> None:
        """Write a point whose step is above `last`. May raise anything."""

    def close(self) -> None:  # noqa: B027 (most have nothing to close)
        """Let go of it."""


Opener = Callable[[Target], Tracker]
"""Opens, or goes on with, the run of this name. May raise anything."""


class TensorBoard(Tracker):
    """Event files; a point is one record of one file, so that none is half there."""

    def __init__(self, target: Target) -> None:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        from tensorboard.util.tensor_util import make_tensor_proto

        folder = target.folder / target.knobs.project / target.name
        steps = [-1]
        for path in sorted(folder.glob("events.out.tfevents.*")):
            steps += [
                event.step
                for event in EventFileLoader(str(path)).Load()
                if any(value.tag == "version" for value in event.summary.value)
            ]
        self.last = max(steps)
        self._writer = EventFileWriter(str(folder))
        if self.last < 0:
            rows = [f"| {name} | {value} |" for name, value in target.settings.items()]
            table = "\n".join(["| setting | value |", "| --- | --- |", *rows])
            metadata = create_summary_metadata("settings", "")
            tensor = make_tensor_proto([table.encode()])
            self._add(0, 0.0, Summary(value=[Summary.Value(tag="settings", metadata=metadata, tensor=tensor)]))

    def write(self, point: Point) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=key, simple_value=value) for key, value in point.values.items()]
        self._add(point.step, point.wall_s, Summary(value=values))
        self._writer.flush()

    def _add(self, step: int, wall_s: float, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(step=step, wall_time=wall_s, summary=summary))

    def close(self) -> None:
        self._writer.close()


class MlFlow(Tracker):
    """A tracking server, or a database in the folder. Both refuse a metric that they have."""

    def __init__(self, target: Target) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # we try again ourselves
        from mlflow import MlflowClient
        from mlflow.entities import Param, ViewType

        address = None if target.knobs.dir is None and os.environ.get("MLFLOW_TRACKING_URI") else target.folder
        uri = None if address is None else f"sqlite:///{address / 'mlflow.db'}"
        client = self._client = MlflowClient(tracking_uri=uri)
        project = client.get_experiment_by_name(target.knobs.project)
        of = (
            project.experiment_id
            if project is not None
            else client.create_experiment(target.knobs.project, None if address is None else str(address / "mlflow"))
        )
        found = client.search_runs([of], f"tags.dips_run = '{target.name}'", ViewType.ACTIVE_ONLY, 1)
        run = found[0] if found else client.create_run(of, run_name=target.name, tags={"dips_run": target.name})
        self._id = run.info.run_id
        self.last = int(run.data.metrics.get("version", -1))
        if self.last < 0:  # a restart before the first point may find some of them
            params = [Param(k, str(v)[:6000]) for k, v in target.settings.items() if k not in run.data.params]
            for at in range(0, len(params), 100):
                client.log_batch(self._id, params=params[at : at + 100])

    def write(self, point: Point) -> None:
        from mlflow.entities import Metric

        # "version" comes last: a point is there when it is
        values = sorted(point.values.items(), key=lambda value: value[0] == "version")
        rows = [Metric(key, value, round(1000 * point.wall_s), point.step) for key, value in values]
        for at in range(0, len(rows), 1000):
            self._client.log_batch(self._id, metrics=rows[at : at + 1000])


class Trackio(Tracker):
    """A database in the folder, which `trackio show` reads; a point is one transaction."""

    def __init__(self, target: Target) -> None:
        os.environ["TRACKIO_DIR"] = str(target.folder)  # read when it is imported
        from trackio.sqlite_storage import SQLiteStorage

        self._store, self._target = SQLiteStorage, target
        found = SQLiteStorage.get_max_step_for_run(target.knobs.project, target.name)
        self.last = -1 if found is None else found

    def write(self, point: Point) -> None:
        from datetime import UTC, datetime

        self._store.bulk_log(
            self._target.knobs.project,
            self._target.name,
            [dict(point.values)],
            [point.step],
            [datetime.fromtimestamp(point.wall_s, UTC).isoformat()],
            dict(self._target.settings),
        )


class Wandb(Tracker):
    """wandb's own process, which keeps points in files of the folder and sends them, unless WANDB_MODE=offline."""

    def __init__(self, target: Target) -> None:
        import wandb

        quiet = wandb.Settings(  # and nothing of this machine, its packages or this process
            silent=True,
            console="off",
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
            disable_git=True,
            save_code=False,
        )
        self._run = wandb.init(
            project=target.knobs.project,
            id=target.name,
            name=target.name,
            dir=str(target.folder),
            resume="allow",
            reinit="create_new",
            settings=quiet,
        )
        self._run.config.update(dict(target.settings), allow_val_change=True)
        kept = (path for path in target.folder.glob(f"wandb/*run-*/run-{target.name}.wandb"))
        self.last = max([self._run.step - 1, *(step for path in kept for step, _ in wandb_points(path))])

    def write(self, point: Point) -> None:
        self._run.log(dict(point.values), step=point.step, commit=True)

    def close(self) -> None:
        self._run.finish()


_BLOCK_BYTES = 1 << 15


def wandb_points(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Steps and values in a file of wandb, as far as it is whole: its package has no reader for Python.

    After a head of 7 bytes come blocks of 32 KiB with the parts of records: checksum, length and kind (the whole, the
    first, a middle or the last part), and the bytes.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    whole = b""
    with path.open("rb") as file:
        file.seek(7)
        while True:
            if (left := _BLOCK_BYTES - file.tell() % _BLOCK_BYTES) < 7:
                file.seek(left, os.SEEK_CUR)
            if len(head := file.read(7)) < 7:
                return
            _, length, kind = struct.unpack("<IHB", head)
            part = file.read(length)
            if kind not in (1, 2, 3, 4) or len(part) < length:
                return
            whole = part if kind in (1, 2) else whole + part
            if kind in (1, 4):
                record = Record.FromString(whole)
                if record.WhichOneof("record_type") == "history":
                    items = record.history.item
                    named = ((item.key or "/".join(item.nested_key), json.loads(item.value_json)) for item in items)
                    yield record.history.step.num, {key: float(value) for key, value in named if _is_number(value)}
