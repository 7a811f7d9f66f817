"""Which identity a command uses: the options', else the environment's, else the run's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from dips.cli.run_options import asked_security, insecure_asked
from dips.core.errors import ConfigError
from dips.core.net.security import INSECURE, Identity
from dips.local.authority import ensure_keys
from dips.local.run_directory import KEYS


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DIPS_KEYS", "DIPS_INSECURE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    ensure_keys(tmp_path / KEYS, operators=["operator", "me", "you"])
    return tmp_path


def name_of(security: object) -> str:
    assert isinstance(security, Identity)
    return security.name


def test_the_option_wins_over_the_environment_and_the_run(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = run_dir / KEYS
    assert name_of(asked_security(None, False, run_dir)) == "operator"
    monkeypatch.setenv("DIPS_KEYS", str(keys / "me"))
    assert name_of(asked_security(None, False, run_dir)) == "me"
    assert name_of(asked_security(keys / "you", False, run_dir)) == "you"
    assert asked_security(None, True, run_dir) is INSECURE


def test_nothing_said_is_an_error_with_both_remedies(tmp_path: Path) -> None:
    for run_dir in (None, tmp_path):
        with pytest.raises(ConfigError, match=r"no keys: give --keys DIR .* or say --insecure"):
            asked_security(None, False, run_dir)


def test_two_things_said_are_an_error(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="both given"):
        asked_security(run_dir / KEYS / "me", True)
    monkeypatch.setenv("DIPS_KEYS", str(run_dir / KEYS / "me"))
    monkeypatch.setenv("DIPS_INSECURE", "1")
    with pytest.raises(ConfigError, match="both given"):
        asked_security(None, False)


@pytest.mark.parametrize(("text", "insecure"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_the_environment_says_insecure(monkeypatch: pytest.MonkeyPatch, text: str, insecure: bool) -> None:
    monkeypatch.setenv("DIPS_INSECURE", text)
    assert insecure_asked(False) is insecure
    assert insecure_asked(True)
    monkeypatch.setenv("DIPS_INSECURE", "maybe")
    with pytest.raises(ConfigError, match="DIPS_INSECURE is 'maybe': set it to 1, or leave it out"):
        insecure_asked(False)
