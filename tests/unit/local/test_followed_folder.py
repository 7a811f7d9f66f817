"""A followed folder: what it takes, what it keeps, and what a later follow finds in it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from dips.cli import main
from dips.core.errors import ConfigError, DipsError, FatalError, RetryLater
from dips.core.ids import Version
from dips.core.layout import Layout, Parameter, PublishedModel, layer_of
from dips.local import model_folder
from dips.local.followed_folder import LOCK, NEWEST, STATE, VERSIONS, Content, FollowedFolder
from dips.local.model_folder import CONFIG, INDEX, ModelFolder, TensorsFolder, as_folder
from dips.local.operator_client import NamedRun
from dips.master.directory import LOCK_NAME
from dips.trainer.export import ABOUT
from dips.trainer.sizes import ModelConfig, llama_name

SIZES = ModelConfig(32, 1, 8)
LAYOUT = Layout(tuple(Parameter(n, shape, "float32", layer_of(n)) for n, shape in SIZES.parameter_shapes.items()))


def version_of(v: int, timeline: int = 1, run_id: str = "mine") -> PublishedModel:
    flat = np.random.default_rng(v).normal(size=LAYOUT.n_elems).astype(np.float32)
    return PublishedModel(run_id, Version(timeline, v), 10 * v, LAYOUT, flat)


def for_transformers(fetched: PublishedModel) -> Content:
    return as_folder(fetched, check=False)


def in_several_files(fetched: PublishedModel) -> Content:
    content = for_transformers(fetched)
    assert isinstance(content, ModelFolder)
    return ModelFolder(content.config, content.tensors, content.about, shard_bytes=8000)


def one_file(fetched: PublishedModel) -> Content:
    return TensorsFolder(fetched, {})


def opened(
    folder: Path, content: Callable[[PublishedModel], Content] = for_transformers, keep: int = 2
) -> FollowedFolder:
    return FollowedFolder(folder, content, keep)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("content", [for_transformers, in_several_files, one_file])
def test_the_newest_few_stay_and_a_later_follow_finds_the_last_one_to_the_bit(
    tmp_path: Path, content: Callable[[PublishedModel], Content]
) -> None:
    """After a rollback too, whose numbers are smaller."""
    to = tmp_path / "new" / "to"
    with opened(to, content) as folder:
        assert (folder.run_id, folder.held()) == ("", None)
        for fetched in (version_of(5), version_of(6), version_of(9), version_of(8, timeline=2)):
            folder.put(fetched)
            assert json.loads((to / NEWEST / ABOUT).read_text())["version"] == str(fetched.version)
    assert names(to) == {LOCK, STATE, NEWEST, VERSIONS}
    assert names(to / VERSIONS) == {"1-9", "2-8"}
    with opened(to, content) as folder:
        held, last = folder.held(), version_of(8, timeline=2)
        assert held is not None
        assert (held.run_id, held.version, held.tokens, held.layout) == ("mine", last.version, 80, LAYOUT)
        assert held.flat.tobytes() == last.flat.tobytes()


def test_what_a_reader_resolved_stays_for_the_next_version_also_where_numbers_begin_again(tmp_path: Path) -> None:
    """As in a run that was begun anew with the name of an earlier one."""
    to = tmp_path / "to"
    with opened(to) as folder:
        for v in (49, 50):
            folder.put(version_of(v))
    with opened(to) as folder:
        for v in (3, 4):
            folder.put(version_of(v))
    assert names(to / VERSIONS) == {"1-3", "1-4"}


def test_files_of_two_versions_have_no_name_in_common_where_there_are_several(tmp_path: Path) -> None:
    """A reader that read the index before `newest` changed finds nothing, and no mixture."""
    with opened(tmp_path / "to", in_several_files) as folder:
        for v in (1, 2):
            folder.put(version_of(v))
    of_version = [names(tmp_path / "to" / VERSIONS / place) for place in ("1-1", "1-2")]
    assert len(of_version[0]) > 4
    assert of_version[0] & of_version[1] == {"config.json", INDEX, ABOUT}
    placed = json.loads((tmp_path / "to" / NEWEST / INDEX).read_text())["weight_map"]
    assert {*placed.values()} < of_version[1]


def test_what_is_left_of_a_kill_is_removed_and_written_again(tmp_path: Path) -> None:
    """Between the folder of a version and the link to it, and in the middle of a folder."""
    to = tmp_path / "to"
    with opened(to) as folder:
        folder.put(version_of(1))
    for rest in (to / VERSIONS / "1-2", to / VERSIONS / ".tmp-1-3.beef"):
        rest.mkdir()
        (rest / "model.safetensors").write_bytes(b"half")
    (to / ".tmp-newest.cafe").symlink_to("nowhere")
    with opened(to) as folder:
        assert not [name for name in names(to) | names(to / VERSIONS) if name.startswith(".tmp-")]
        folder.put(version_of(2))
    written = load_file(to / NEWEST / "model.safetensors")
    assert {*written} == {llama_name(name) for name in SIZES.parameter_shapes}


@pytest.mark.parametrize("damage", ["gone", "cut", "another form", "no file about it", "no configuration"])
def test_a_version_that_cannot_be_read_back_is_fetched_whole_and_written_beside_it(tmp_path: Path, damage: str) -> None:
    to = tmp_path / "to"
    with opened(to) as folder:
        folder.put(version_of(1))
    model = to / VERSIONS / "1-1" / "model.safetensors"
    match damage:
        case "gone":
            model.unlink()
        case "cut":
            model.write_bytes(model.read_bytes()[:-5])
        case "no file about it":
            (model.parent / ABOUT).unlink()
        case "no configuration":
            (model.parent / CONFIG).unlink()
    form, before = one_file if damage == "another form" else for_transformers, (to / NEWEST).resolve()
    with opened(to, form) as folder:
        assert folder.held() is None
        folder.put(version_of(1))
        assert before.exists(), "a reader may have opened it"
        assert (to / NEWEST).resolve() != before
        here = folder.held()
        assert here is not None
        assert here.flat.tobytes() == version_of(1).flat.tobytes()


def a_file(to: Path) -> None:
    to.write_text("mine")


def something_else(to: Path) -> None:
    to.mkdir()
    (to / "thesis.tex").write_text("mine")


def a_state_that_is_cut(to: Path) -> None:
    to.mkdir()
    (to / LOCK).touch()
    (to / STATE).write_text('{"run_id": "mi')


@pytest.mark.parametrize(
    ("made", "says"),
    [(a_file, "is a file"), (something_else, "holds something else"), (a_state_that_is_cut, "cannot be read")],
)
def test_what_is_no_followed_folder_is_refused_and_left_as_it_is(
    tmp_path: Path, made: Callable[[Path], None], says: str
) -> None:
    to = tmp_path / "to"
    made(to)
    before = names(to) if to.is_dir() else None
    with pytest.raises(ConfigError, match=says):
        opened(to)
    assert before is None or before == names(to)


def test_one_process_and_one_run_have_it(tmp_path: Path) -> None:
    with opened(tmp_path / "to") as folder:
        folder.put(version_of(1))
        with pytest.raises(ConfigError, match=f"process {os.getpid()} follows a run in"):
            opened(tmp_path / "to")
        with pytest.raises(ConfigError, match="holds versions of run mine, this is run other"):
            folder.put(version_of(2, run_id="other"))
        assert (tmp_path / "to" / NEWEST).resolve().name == "1-1"
    opened(tmp_path / "to")


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, FatalError), (errno.EACCES, ConfigError)], ids=["full", "not allowed"]
)
@pytest.mark.parametrize("at", ["a file", "the link"])
def test_where_nothing_can_be_written_newest_stays_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[DipsError], at: str
) -> None:
    def fails(*given: object, **named: object) -> None:
        raise OSError(number, os.strerror(number))

    to = tmp_path / "to"
    with opened(to) as folder:
        folder.put(version_of(1))
        with monkeypatch.context() as patched:
            if at == "a file":
                patched.setattr("dips.trainer.export.replace_file", fails)
            else:
                patched.setattr("dips.local.followed_folder.os.symlink", fails)
            with pytest.raises(kind, match=os.strerror(number)):
                folder.put(version_of(2))
        assert (to / NEWEST).resolve().name == "1-1"
        assert not [name for name in names(to) | names(to / VERSIONS) if name.startswith(".tmp-")]
        folder.put(version_of(2))
    assert (to / NEWEST).resolve().name == "1-2"
    assert model_folder.MODEL in names(to / NEWEST)


@pytest.mark.parametrize("form", ["safetensors", "huggingface"])
def test_the_command_follows_a_master_and_takes_the_last_version_of_a_run_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    run, to, asked, stopped, puts = tmp_path / "run", tmp_path / "to", [], [True], []

    def keep(folder: FollowedFolder, master: str, security: object, patience_s: float, *, once: bool) -> int:
        asked.append((folder.folder, master, patience_s, once))
        return 143

    def put(folder: FollowedFolder, fetched: PublishedModel) -> None:
        puts.append(fetched.version)
        whole_put(folder, fetched)

    whole_put = FollowedFolder.put
    monkeypatch.setattr(FollowedFolder, "put", put)
    monkeypatch.setattr("dips.local.followed_folder.keep_newest", keep)
    monkeypatch.setattr("dips.local.model_folder.load_stored", lambda directory: version_of(len(stopped)))
    left = SimpleNamespace(waiting_for="", published=Version(1, 1), tokens=1)
    monkeypatch.setattr(NamedRun, "at_rest", lambda named: SimpleNamespace(**vars(left), stopped=stopped[-1]))
    follow = ["follow", str(run), "--insecure", "--format", form, "--to", str(to)]
    assert main.run(["follow", "127.0.0.1:9", *follow[2:], "--wait", "7", "--once"]) == 143
    assert asked == [(to, "127.0.0.1:9", 7.0, True)]
    (run / "master").mkdir(parents=True)
    (run / "master" / LOCK_NAME).touch()
    for _ in range(2):
        assert main.run(follow) == 0
    assert puts == [Version(1, 1)], "it is there already"
    assert [path.suffix for path in (to / NEWEST).iterdir()].count(".safetensors") == 1
    assert (to / NEWEST / CONFIG).exists() == (form == "huggingface")
    stopped.append(True)
    assert main.run(follow) == 0
    assert puts == [Version(1, 1), Version(1, 2)]
    stopped.append(False)
    assert main.run(follow) == RetryLater.exit_code
    assert main.run(["follow", str(run), "--format", "dcp", "--to", str(to)]) == ConfigError.exit_code
    assert main.run(["follow", str(run)]) == ConfigError.exit_code
    assert (len(asked), len(puts)) == (1, 2)
