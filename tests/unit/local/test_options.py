"""A role's command line has every knob of the role, and says exactly what was given."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field
from typer.testing import CliRunner

from dips.core.config import Knobs, groups_of, load
from dips.core.errors import ConfigError
from dips.core.units import Bytes, Seconds
from dips.local.options import command_line, overrides_for, role_settings, with_knobs
from dips.master.config import MasterConfig
from dips.slave.config import SlaveConfig
from dips.trainer.config import TrainConfig
from dips.worker.config import ClientConfig


class SomeKnobs(Knobs):
    GROUPS: ClassVar = {"name": "Who", "wait_s": "Times"}

    name: str = Field(description="A name [in brackets].")
    size_bytes: Bytes = Field(4096, description="A size.")
    wait_s: Annotated[Seconds, Field(gt=0)] = Field(2.5, description="A time.")
    grace_s: Literal["auto"] | Seconds = Field("auto", description="Either.")
    kind: Literal["x", "y"] = Field("x", description="One of two.")
    paths: tuple[Path, ...] = Field((), description="Several.")
    on: bool = Field(False, description="A switch.")
    maybe: bool | None = Field(None, description="A switch or nothing.")
    folder: Path | None = Field(None, description="A folder or nothing.")


class DerivedKnobs(SomeKnobs):
    GROUPS: ClassVar = {"colour": "Looks"}

    colour: str = Field("red", description="A colour.")


class MoreKnobs(Knobs):
    name: str = Field(description="The same name.")
    steps: int = Field(1, ge=1, description="Steps.")


def run(arguments: list[str], *kinds: type[Knobs], without: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a command with these knobs is called with."""
    seen: dict[str, Any] = {}

    @with_knobs(*kinds, without=without)
    def command(word: str = "none", **given: Any) -> int:
        """A command."""
        seen.update(given, word=word)
        return 0

    app = typer.Typer(add_completion=False)
    app.command()(command)
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen


def test_values_reach_the_settings_as_written() -> None:
    seen = run([], SomeKnobs)
    assert seen.pop("word") == "none"
    assert set(seen) == set(SomeKnobs.model_fields)
    assert overrides_for(SomeKnobs, seen) == {}
    assert "folder" not in run([], SomeKnobs, without=("folder",))
    assert run(["--word", "hello"], SomeKnobs)["word"] == "hello", "a command's own options stay"
    assert [run(words, SomeKnobs)["on"] for words in (["--no-on"], [])] == [False, None]
    seen = run(["--name", "n", "--steps", "3"], SomeKnobs, MoreKnobs)
    assert overrides_for(SomeKnobs, seen) == {"name": "n"}
    assert overrides_for(MoreKnobs, seen) == {"name": "n", "steps": "3"}


def test_help_has_options_in_groups_those_of_the_role_itself_first() -> None:
    @with_knobs(DerivedKnobs)
    def command(**given: Any) -> int:
        """A command."""
        return 0

    app = typer.Typer(add_completion=False)
    app.command()(command)
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    order = ("Looks", "--colour", "Who", "--size-bytes", "Times", "--grace-s", "--folder")
    places = [text.index(word) for word in order]
    assert places == sorted(places)
    for word in ("A name [in brackets].", "[default: 4096]", "x|y", "may be given several times"):
        assert word in text


@pytest.mark.parametrize("kind", [MasterConfig, SlaveConfig, ClientConfig, TrainConfig])
def test_every_knob_of_every_role_is_an_option_in_a_group(kind: type[Knobs]) -> None:
    groups = groups_of(kind)
    assert "" not in groups
    assert sorted(name for names in groups.values() for name in names) == sorted(kind.model_fields)
    assert set(inspect.signature(with_knobs(kind)(lambda **given: 0)).parameters) == set(kind.model_fields)


VALUES = st.fixed_dictionaries(
    {
        "name": st.text(st.characters(codec="ascii", exclude_categories=["C"]), min_size=1).filter(
            lambda text: not text.startswith("-")
        ),
        "size_bytes": st.integers(0, 1 << 40),
        "wait_s": st.floats(1e-6, 1e9, allow_nan=False),
        "grace_s": st.one_of(st.just("auto"), st.floats(0, 1e6, allow_nan=False)),
        "kind": st.sampled_from(["x", "y"]),
        "paths": st.lists(st.sampled_from([Path("a"), Path("b/c"), Path("/d e")])).map(tuple),
        "on": st.booleans(),
        "maybe": st.sampled_from([None, True, False]),
        "folder": st.sampled_from([None, Path("here"), Path("/there")]),
    }
)


@given(VALUES)
def test_the_command_line_of_settings_makes_these_settings_again(values: dict[str, Any]) -> None:
    config = SomeKnobs(**values)
    seen = run(command_line(config), SomeKnobs)
    again = load(SomeKnobs, "some", environment={}, overrides=overrides_for(SomeKnobs, seen)).value
    assert again == config


def test_the_command_line_leaves_out_defaults_and_what_is_hidden() -> None:
    config = SomeKnobs(name="n", size_bytes=4096, wait_s=3, on=False)
    assert command_line(config) == ["--name", "n", "--wait-s", "3.0"]
    assert command_line(config, without={"name"}) == ["--wait-s", "3.0"]
    assert command_line(SomeKnobs(name="n", maybe=False)) == ["--name", "n", "--no-maybe"]


def test_the_short_variables_say_where_and_who(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before what a file says, and after the command line."""
    monkeypatch.delenv("DIPS_INSECURE", raising=False)
    for name, value in (("MASTER", "127.0.0.1:5"), ("RUN", "mine"), ("CLUSTER", "a"), ("KEYS", "keys/a")):
        monkeypatch.setenv(f"DIPS_{name}", value)
    file = tmp_path / "worker.toml"
    file.write_text('[worker]\nmaster = "127.0.0.1:6"\nleave_wait_s = 6\n')
    client = role_settings(ClientConfig, "worker", file, {"cluster_id": "b", "run_id": None}).value
    assert (client.master, client.run_id, client.cluster_id) == ("127.0.0.1:5", "mine", "b")
    assert (client.keys, client.leave_wait_s) == (Path("keys/a").absolute(), 6.0)
    monkeypatch.setenv("DIPS_INSECURE", "1")
    with pytest.raises(ConfigError, match="both given"):
        role_settings(ClientConfig, "worker", None, {})
