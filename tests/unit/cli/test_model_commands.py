"""`dips eval`, `export`, `train` and `warm-up`: what they ask for and tell; the computing is played."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dips.cli import main, model, warm_up
from dips.core.errors import ConfigError, RefusalCode, Refused, RetryLater
from dips.core.ids import Version
from dips.core.math import compiling
from dips.core.net import zmq_numba
from dips.local import model_folder
from dips.local.authority import ensure_keys
from dips.master.directory import MasterAddress, write_address
from dips.trainer import evaluate
from dips.trainer import train as trainer
from dips.trainer.evaluate import Evaluation
from dips.worker import reader

FOUND = Evaluation("mine", Version(1, 7), 2_000_000, 1.25)
SENTENCE = "held-out loss 1.250000 nats per byte: version 1:7 of run mine, 2M tokens\n"
AS_JSON = {"run_id": "mine", "timeline": 1, "version": 7, "tokens": 2_000_000, "loss": 1.25}

Asked = list[Any]


@pytest.fixture(autouse=True)
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DIPS_MASTER", "DIPS_KEYS", "DIPS_INSECURE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """The directory of a run whose master has an address, with an operator's keys."""
    ensure_keys(tmp_path / "run" / "keys", operators=["operator"])
    (tmp_path / "run" / "master").mkdir()
    write_address(tmp_path / "run" / "master", MasterAddress("127.0.0.1:7", "mine", 1, 1))
    return tmp_path / "run"


# ---- eval ----


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text").write_text("words " * 1000)
    return tmp_path / "text"


def test_a_version_of_a_run_is_evaluated(
    served: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: Asked = []

    def live(master: str, run_id: None, train: Any, security: Any, version: Version | None) -> Evaluation:
        asked.append((master, run_id, train.data, train.sequence_tokens, security.name, version))
        return FOUND

    monkeypatch.setattr(evaluate, "evaluate_live", live)
    words = ["eval", str(served), "--data", str(text), "--sequence-tokens", "32"]
    assert main.run(words) == 0
    assert capsys.readouterr().out == SENTENCE
    assert main.run([*words, "--version", "2:3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == AS_JSON
    first = ("127.0.0.1:7", None, (text,), 32, "operator")
    assert asked == [(*first, None), (*first, Version(2, 3))]


def test_versions_are_followed_with_the_keys_of_the_run(
    served: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Asked = []

    def follow(train: Any, client: Any) -> int:
        asked.append((train.data, client.master, client.keys, bool(client.insecure)))
        return 143

    monkeypatch.setattr(evaluate, "follow", follow)
    words = ["eval", str(served), "--data", str(text), "--follow"]
    assert main.run(words) == 143
    assert main.run([*words, "--keys", str(text.parent / "k")]) == 143
    assert main.run(["eval", "127.0.0.1:9", "--data", str(text), "--follow", "--insecure"]) == 143
    assert asked == [
        ((text,), "127.0.0.1:7", served / "keys" / "operator", False),
        ((text,), "127.0.0.1:7", text.parent / "k", False),
        ((text,), "127.0.0.1:9", None, True),
    ]


# ---- export ----


class Operator:
    """In place of OperatorClient; does not answer where `away`."""

    away = False
    asked: Asked

    def __init__(self, address: str, run_id: str, call_s: float, *, security: Any) -> None:
        self.asked.append((address, run_id, security.name))

    def __enter__(self) -> Operator:
        return self

    def __exit__(self, *error: object) -> None:
        self.asked.append("closed")

    def status(self) -> None:
        if self.away:
            raise RetryLater("the master does not answer")


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> tuple[Asked, list[Exception]]:
    """Where a version comes from, and what the master refuses with."""
    asked, refusals = Asked(), list[Exception]()

    def fetch(
        address: str, run_id: None, name: str, security: Any, *, version: Version | None, deadline_s: float
    ) -> Any:
        asked.append(("master", address, run_id, getattr(security, "name", "none"), version, deadline_s))
        if refusals:
            raise refusals.pop()
        raise ConfigError("enough")

    def stored(directory: Path, version: Version | None) -> Any:
        asked.append(("files", directory, version))
        raise ConfigError("enough")

    monkeypatch.setattr(reader, "fetch_version", fetch)
    monkeypatch.setattr(model_folder, "load_stored", stored)
    monkeypatch.setattr(model, "OperatorClient", Operator)
    Operator.asked, Operator.away = [], False
    return asked, refusals


def test_a_version_comes_from_the_master_if_it_answers_else_from_the_runs_files(
    served: Path, tmp_path: Path, sources: tuple[Asked, list[Exception]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, refusals = sources
    to = ["--to", str(tmp_path / "m.safetensors"), "--version", "1:3", "--wait", "7"]

    def come_from(*words: str) -> list[str]:
        asked.clear()
        assert main.run(["export", *words, *to]) == ConfigError.exit_code
        return [one[0] for one in asked]

    gone = Refused(RefusalCode.VERSION_GONE, "it is gone")
    assert come_from(str(served)) == ["master"]
    assert asked == [("master", "127.0.0.1:7", None, "operator", Version(1, 3), 7.0)]
    assert Operator.asked == [("127.0.0.1:7", "mine", "operator"), "closed"]
    refusals.append(gone)
    assert come_from(str(served)) == ["master", "files"]
    assert asked[1] == ("files", served, Version(1, 3))
    monkeypatch.setattr(Operator, "away", True)
    assert come_from(str(served)) == ["files"]
    (served / "master" / "master.json").unlink()
    assert come_from(str(served)) == ["files"]
    assert come_from("127.0.0.1:9", "--insecure") == ["master"]
    for words, refusal in ((["127.0.0.1:9", "--insecure"], gone), ([str(served)], Refused(RefusalCode.RUN_ID, "no"))):
        refusals.append(refusal)
        write_address(served / "master", MasterAddress("127.0.0.1:7", "mine", 1, 1))
        monkeypatch.setattr(Operator, "away", False)
        asked.clear()
        assert main.run(["export", *words, *to]) == refusal.exit_code
        assert [one[0] for one in asked] == ["master"], "a refusal that files do not answer"


# ---- train ----


def test_a_cluster_trains_with_its_settings_after_its_keys_are_read(
    served: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: Asked = []

    def run(train: Any, client: Any) -> int:
        asked.append((train.steps, train.data, client.master, client.cluster_id))
        return 9

    monkeypatch.setattr(trainer, "run", run)
    words = ["train", "--data", str(text), "--steps", "3"]
    assert main.run(words) == 9
    assert main.run([*words, "--master", "127.0.0.1:1", "--cluster-id", "b", "--insecure"]) == 9
    assert [one[0:2] for one in asked] == [(3, (text,))] * 2
    assert asked[1][2:] == ("127.0.0.1:1", "b")
    keys = str(served / "nowhere")
    assert main.run([*words, "--master", "127.0.0.1:1", "--cluster-id", "b", "--keys", keys]) == ConfigError.exit_code
    assert f"{keys}/ca.crt" in capsys.readouterr().err
    assert main.run(["train", "--data", str(text)]) == ConfigError.exit_code
    assert len(asked) == 2


# ---- warm-up ----


def test_kernels_are_compiled_module_by_module_and_slow_ones_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds, said, watched = [100.0], list[str](), list[object]()

    @contextlib.contextmanager
    def watching(begins: Callable[[str, int, int], None], module: object) -> Iterator[None]:
        watched.append(module)
        for done in range(5):
            begins(f"k{done}", done, 9)
            seconds[0] += 0.75
        yield

    compiled = SimpleNamespace(warm_up=lambda: watched.append("compiled"))
    monkeypatch.setitem(sys.modules, "dips.core.math.wire_numba", compiled)
    monkeypatch.setattr("dips.cli.warm_up.time.monotonic", lambda: seconds[0])
    monkeypatch.setattr(compiling, "watched", watching)
    monkeypatch.setattr(compiling, "folder", lambda: Path("kept"))
    monkeypatch.setattr(zmq_numba, "available", lambda: False)
    monkeypatch.setattr(zmq_numba, "why_not", lambda: "no libzmq")
    found = list(warm_up.warmed(said.append, ("dips.slave.serve_numba", "dips.core.math.wire_numba")))
    without, _ = skipped = list(warm_up.warmed(said.append, ("dips.slave.serve_numba", "dips.core.net.carry_numba")))
    assert skipped == [warm_up.Warmed(one.module, 0, 0.0, "no libzmq") for one in skipped]
    assert found == [without, warm_up.Warmed("dips.core.math.wire_numba", 4, 3.75)]
    assert watched == [compiled, "compiled"]
    assert said == [f"dips.core.math.wire_numba: compiling {n} of 9 (k{n})" for n in (0, 3)]
    assert str(without) == "dips.slave.serve_numba: skipped: no libzmq"
    assert str(found[1]) == "dips.core.math.wire_numba: compiled 4 kernels, 3.75 s"
    assert str(warm_up.Warmed("m", 0, 0.031)) == "m: all there, 0.03 s"
    assert set(warm_up.MODULES) - set(warm_up.OF_SLAVES) == {"dips.core.net.carry_numba"}
    monkeypatch.setattr(warm_up, "MODULES", (found[1].module,))
    assert main.run(["warm-up"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [str(found[1]), "kept in kept"]
    monkeypatch.setattr(warm_up, "OF_SLAVES", tuple(one.module for one in found))
    assert main.run(["warm-up", "--slave"]) == 0
    assert {*map(str, found), "kept in kept"} <= {*capsys.readouterr().out.splitlines()}
    assert main.run(["warm-up", "--slave", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"kept_in": "kept", "modules": [asdict(one) for one in found]}
    monkeypatch.setattr(compiling, "folder", lambda: None)
    assert main.run(["warm-up"]) == ConfigError.exit_code
    assert "NUMBA_CACHE_DIR" in capsys.readouterr().err
    assert len(watched) == 8
