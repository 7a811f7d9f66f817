"""Settings: which source wins, what is printed, and what a wrong setting is told."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, model_validator

from dips.core.config import Knobs, Loaded, SettingsFile, environment_name, load, load_table
from dips.core.errors import ConfigError
from dips.core.units import Bytes, Seconds


class Oven(Knobs):
    name: str = Field(description="what it is called")
    heat_s: Seconds = Field(60.0, description="how long it heats")
    grace_s: Literal["auto"] | Seconds = Field("auto", description="how long it waits")
    room_bytes: Bytes = Field(1 << 20, description="how much goes in")
    shelves: int = Field(2, ge=1, description="how many shelves")
    lit: bool = Field(False, description="whether the lamp is on")
    racks: tuple[int, ...] = Field((), description="heights of the racks")
    books: list[Path] = Field([], description="cook books")
    record: Path | None = Field(None, description="where it writes")
    share: Annotated[float, Field(gt=0, lt=1)] = Field(0.5, description="a share")

    @model_validator(mode="after")
    def _grace_is_shorter(self) -> Oven:
        if self.grace_s != "auto" and self.grace_s >= self.heat_s:
            raise ValueError(f"grace_s ({self.grace_s} s) must be shorter than heat_s ({self.heat_s} s)")
        return self


def read(**overrides: object) -> Loaded[Oven]:
    return load(Oven, "oven", environment={}, overrides={"name": "x", **overrides})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('[oven]\nname = "from-file"\nshelves = 3\nheat_s = "2 min"\n[other]\nx = 1\n')
    return path


def test_the_stronger_source_wins_and_each_value_says_where_it_came_from(file: Path) -> None:
    loaded = load(
        Oven,
        "oven",
        file=file,
        environment={"DIPS_OVEN_SHELVES": "4", "DIPS_OVEN_NAME": "from-environment", "HOME": "/"},
        overrides={"name": "from-command-line", "shelves": None},
    )
    assert (loaded.value.name, loaded.value.shelves, loaded.value.heat_s) == ("from-command-line", 4, 120.0)
    assert loaded.value.room_bytes == 1 << 20
    assert loaded.provenance["name"] == "command line"
    assert loaded.provenance["shelves"] == "environment DIPS_OVEN_SHELVES"
    assert loaded.provenance["heat_s"] == f"{file} [oven]"
    assert loaded.provenance["room_bytes"] == "default"
    assert loaded.provenance.keys() == Oven.model_fields.keys()


def test_variables_that_give_no_setting() -> None:
    assert load(Oven, "oven", environment={"DIPS_OVEN_NAME": "a", "DIPS_OVEN_RECORD": ""}).value.record is None
    environment = {"DIPS_MASTER": "127.0.0.1:4711", "DIPS_MASTER_NAME": "m"}
    assert load(Oven, "master", environment=environment).value.name == "m"


def test_what_kubernetes_puts_into_a_container_is_no_setting_and_what_looks_like_it_is() -> None:
    names = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT", "PORT_4711_TCP", "PORT_4711_TCP_ADDR")
    environment = {"DIPS_OVEN_NAME": "a", **{f"DIPS_OVEN_{name}": "tcp://10.0.0.1:4711" for name in names}}
    assert load(Oven, "oven", environment=environment).value.name == "a"

    class Listener(Knobs):
        port: int = Field(0, description="where it listens")

    assert load(Listener, "oven", environment={"DIPS_OVEN_PORT": "4711"}).value.port == 4711


@pytest.mark.parametrize(
    ("text", "racks"), [("1,2, 3", (1, 2, 3)), ("[4, 5]", (4, 5)), ("7", (7,)), ("[]", ()), (" , ", ())]
)
def test_a_list_can_be_written_as_one_text(text: str, racks: tuple[int, ...]) -> None:
    assert load(Oven, "oven", environment={"DIPS_OVEN_NAME": "a", "DIPS_OVEN_RACKS": text}).value.racks == racks
    assert read(racks=text).value.racks == racks


def test_texts_of_the_environment_become_what_the_field_is() -> None:
    given = {"NAME": "a", "LIT": "true", "SHARE": "0.25", "GRACE_S": "500 ms", "ROOM_BYTES": "4 KiB", "RECORD": "/t"}
    oven = load(Oven, "oven", environment={f"DIPS_OVEN_{key}": value for key, value in given.items()}).value
    assert (oven.lit, oven.share, oven.grace_s, oven.room_bytes) == (True, 0.25, 0.5, 4096)
    assert oven.record == Path("/t")


def test_a_field_without_description_is_a_bug_of_ours() -> None:
    with pytest.raises(TypeError, match=r"Bare\.x needs Field\(description=\.\.\.\)"):

        class Bare(Knobs):
            x: int = 1


def sentence(file: Path | None = None, environment: dict[str, str] | None = None, **overrides: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(Oven, "oven", file=file, environment=environment or {}, overrides={"name": "x", **overrides})
    return str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "shelfs = 3", "zzz = 3", 'heat_s = "long"', "heat_s = -1", "heat_s = nan", 'room_bytes = "1 Mbit"',
        "shelves = 0", 'shelves = "many"', "shelves = true", "heat_s = false", "lit = 7", 'racks = ["x"]',
        'racks = "[1"', "share = inf", "heat_s = { a = 1 }", 'grace_s = "soon"', "grace_s = 61",
    ],
)  # fmt: skip
def test_a_wrong_line_of_a_file_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(f"[oven]\n{line}\n")
    said = sentence(path).removeprefix(f"{path} [oven]: ").strip("'")
    assert said.startswith(line.partition(" =")[0])


def test_all_wrong_settings_are_named_at_once() -> None:
    lines = sentence(shelves=0, share=2.0, room_bytes="x").splitlines()
    assert [line.split(" = ")[0] for line in lines] == [
        "command line: room_bytes",
        "command line: shelves",
        "command line: share",
    ]


def test_a_weaker_source_is_checked_even_when_a_stronger_one_wins(file: Path) -> None:
    file.write_text("[oven]\nshelfs = 1\n")
    assert "did you mean 'shelves'?" in sentence(file, shelves=3)


@pytest.mark.parametrize("content", [
    b"[oven\n", b"\xff\xfe", b"oven = 3\n", b"[[oven]]\n", b"[oven]\na = " + b"a." * 3000, b"# a comment\n" * 100_000,
])  # fmt: skip
def test_a_file_that_cannot_be_understood_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    assert str(path) in sentence(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    assert sentence(path) == f"settings file {path} cannot be read: No such file or directory"
    assert sentence(tmp_path) == f"settings file {tmp_path} cannot be read: Is a directory"


def test_a_table_that_nobody_knows_is_named(file: Path) -> None:
    assert SettingsFile.read(file, ["oven", "other"]).table("other") == {"x": 1}
    with pytest.raises(ConfigError, match=r"run\.toml: 'other' is unknown; did you mean 'others'\?"):
        SettingsFile.read(file, ["oven", "others"])


def test_a_table_that_only_a_file_can_hold_is_read_with_its_place() -> None:
    assert load_table(Oven, {"name": "a", "heat_s": "1 min"}, "run.toml [[ovens]] 1").heat_s == 60
    with pytest.raises(ConfigError, match=r"^run\.toml \[\[ovens\]\] 2: 'nam' is not a setting; did you mean 'name'"):
        load_table(Oven, {"nam": "a"}, "run.toml [[ovens]] 2")
    with pytest.raises(ConfigError, match=r"^run\.toml \[\[ovens\]\] 2: name is not given .*: add it to the table"):
        load_table(Oven, {}, "run.toml [[ovens]] 2")


def test_a_section_of_any_name_has_a_variable_that_a_shell_can_set() -> None:
    assert environment_name("side-oven.left", "heat_s") == "DIPS_SIDE_OVEN_LEFT_HEAT_S"
