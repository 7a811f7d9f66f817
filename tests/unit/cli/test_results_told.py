"""What `dips verify`, `story`, `demo`, `up`, and `keys show` print, with the work itself played."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.repository import ROOT
from support.run_status import run_status

from dips.cli import demo as command_demo
from dips.cli import main
from dips.cli import verify as command_verify
from dips.cli.demo import own_model
from dips.cli.up import how_to_join
from dips.core.errors import KEYS_REFUSED_EXIT, TERMINATED
from dips.judge.invariants import Violation
from dips.judge.replay import Replayed
from dips.judge.verify import NOT_APPLICABLE, OK, VIOLATED, PromiseRow, VerifyReport
from dips.local.authority import Authority, ensure_keys
from dips.local.demo import DemoOptions, DemoResult
from dips.local.processes import RunPlan
from dips.local.run_directory import DEMO, UP, Mark, claim
from dips.local.run_file import read_run_file

# ---- verify and story ----


def report(**changes: Any) -> VerifyReport:
    rows = [PromiseRow("I1", "one version", 3, OK), PromiseRow("I2", "no loss", 0, NOT_APPLICABLE, "no push")]
    return replace(VerifyReport(Path("r"), "mine", rows, []), **changes)


def test_a_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []
    found = report(
        problems=["a tape is torn", "a file"],
        unproven=["I2 lacks a tape", "and I3"],
        notes=["a note", "and more"],
        replayed=Replayed(versions=4, shards=8, skipped=["1:2 has no push", "nor 1:3"], judged=5),
    )

    def played(run_dir: Path, replay: bool, **more: Any) -> VerifyReport:
        asked.append((run_dir, replay, more))
        return found

    monkeypatch.setattr(command_verify, "verify_run", played)
    assert main.run(["verify", str(tmp_path), "--replay", "--without-tape", "a", "--allow-skipped"]) == 1
    assert asked == [(tmp_path, True, {"allow_skipped": True, "without": ["a"]})]
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "promise records result",
        f"I1 one version 3 {OK}",
        f"I2 no loss 0 {NOT_APPLICABLE}: no push",
        "replayed 4 versions, 8 shards, bit for bit; measured the norms of 5 rounds again",
        *("not replayed: 1:2 has no push", "not replayed: nor 1:3"),
        *("cannot be read: a tape is torn", "cannot be read: a file"),
        *("unproven: I2 lacks a tape", "unproven: and I3"),
        *("note: a note", "note: and more"),
        f"run mine: {found.verdict}",
    ]
    assert main.run(["verify", str(tmp_path), "--json"]) == 1
    assert asked[1] == (tmp_path, False, {"allow_skipped": False, "without": ()})
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found.to_json()))


def test_violations_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    violations = [Violation("I1", f"violation {n}", "") for n in range(32)]
    found = report(violations=violations, rows=[PromiseRow("I1", "x", 3, VIOLATED)])
    monkeypatch.setattr(command_verify, "verify_run", lambda *_, **__: found)
    assert main.run(["verify", str(tmp_path)]) == 7
    *_, last, more, verdict = capsys.readouterr().out.splitlines()
    assert (last, more) == (str(violations[29]), "... and 2 more: --json shows all")
    assert verdict == f"run mine: I1 {VIOLATED}"


# ---- demo and up ----


def played_demo(tmp_path: Path, **changes: Any) -> DemoResult:
    clusters = {
        name: {
            "parallel": "", "speed_gap": gap, "measured_speed": 4400.0, "steps": 480, "tokens": 400_000,
            "pushes_applied": 12, "pushes_excluded": 1, "incarnations": 2,
        }
        for name, gap in (("a", 0.0), ("b", 0.16))
    }  # fmt: skip
    made = {
        "clusters": clusters, "timeline": 1, "version": 12, "tokens": 1_000_000, "seconds": 181.5, "rounds": 13,
        "merged_rounds": 9, "heldout_loss": [[0, 5.6], [1_000_000, 2.21]], "verify": "ok",
        "verified": {"I1": 30, "I2": 3}, "checks": {"run_stopped": True},
        "faults": [{"what": "b killed", "when": 40.0, "back_when": 46.5, "when_tokens": 350_000}],
        **changes,
    }  # fmt: skip
    with claim(tmp_path / "run", Mark("demo", DEMO, "dips demo")) as directory:
        return DemoResult(made, directory, ["--data", "a b"], "http://127.0.0.1:1/?link=secret")


def test_the_end_of_a_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[DemoOptions] = []

    def played(wanted: DemoOptions, *_: object) -> DemoResult:
        asked.append(wanted)
        return found

    monkeypatch.setattr(command_demo, "run_demo", played)
    monkeypatch.setenv("COLUMNS", "120")
    found = played_demo(tmp_path)
    words = ["--data", "x", "--clusters", "3", "--slaves", "1", "--minutes", "2", "--run-dir", "d", "--no-faults"]
    more = ["--model-size", "small", "--seed", "7", "--record-pushes", "--insecure", "--no-page", "--metrics"]
    assert main.run(["demo", *words, *more, "--parallel", "--cut-link"]) == 0
    assert asked == [
        DemoOptions((Path("x"),), 3, 1, 2.0, Path("d"), False, "small", 7, True, True, False, True, True, True)
    ]
    run = found.directory.path
    told = capsys.readouterr().out.splitlines()
    assert told[-11 - len(own_model(Path.cwd())) :][:13] == [
        "b killed at 40 s (350k tokens), back after 6.5 s",
        "version 1:12: 1M tokens in 3 min 2 s, 13 rounds, 9 of them merged from two or more clusters",
        "held-out loss 2.2100 nats per byte",
        f"verified ok: 33 records judged (dips verify {run})",
        f"report   {run / 'report.json'}",
        f"picture  {run / 'loss.png'}",
        f"logs     {run / 'logs'}",
        "page     ended with the run; it was at http://127.0.0.1:1/",
        "next:",
        f"  dips export {run} --to model.safetensors",
        "  dips eval model.safetensors --data 'a b'",
        *own_model(Path.cwd())[:2],
    ]
    assert f" {ROOT}/examples/own_loop.py" in own_model(tmp_path)[1]
    assert " ../docs/start.md" in own_model(ROOT / "src")[3]
    [row] = [line.split() for line in told if line.startswith("b ") and "%" in line]
    assert row == ["b", "16%", "4400", "480", "400k", "12", "1", "2"]


def test_a_demo_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = {"what": "b killed", "when": 40.0, "back_when": None, "when_tokens": 350_000}
    checks = {"everything_killed_came_back": False, "run_stopped": True}
    found = played_demo(
        tmp_path, version=None, heldout_loss=[], faults=[fault, {**fault, "what": "s0 killed"}], checks=checks
    )
    monkeypatch.setattr(command_demo, "run_demo", lambda *_: found)
    assert main.run(["demo"]) == 1
    out, error = capsys.readouterr()
    assert "b killed at 40 s (350k tokens), not back\ns0 killed at 40 s (350k tokens), not back\n" in out
    assert "version none: " in out
    assert "held-out loss: not measured\n" in out
    assert "does not hold: everything killed came back (the run waited for it" in error
    assert main.run(["demo", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == found.report


def test_up_says_how_loops_of_ones_own_join(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = f'[run]\nid = "x"\ndirectory = "{tmp_path / "run"}"\n'
    public = head + 'keys_for = ["a", "me"]\n[master]\nlisten = "10.0.0.1:29400"\n'
    keys, join = tmp_path / "run" / "keys", {}
    with claim(tmp_path / "run", Mark("x", UP, "dips up")) as directory:
        own = public + '[[clusters]]\nid = "a"\ncommand = ["true"]\n'
        texts = {"local": head, "public": public, "insecure": head + "insecure = true\n", "own": own}
        for name, text in texts.items():
            (tmp_path / "run.toml").write_text(text)
            join[name] = how_to_join(read_run_file(tmp_path / "run.toml")[1], "10.0.0.1:29400", directory)
    loop = "  DIPS_MASTER=10.0.0.1:29400 DIPS_CLUSTER={} {} python examples/own_loop.py"
    add, stop = (
        f"keys for another one:  dips keys add {keys} --cluster NAME",
        f"end the run with:  dips stop {tmp_path / 'run'}",
    )
    assert join["local"][1:] == [*(loop.format(name, f"DIPS_KEYS={keys / name}") for name in "ab"), add, stop]
    assert join["insecure"][1:] == [*(loop.format(name, "DIPS_INSECURE=1") for name in "ab"), stop]
    assert join["public"][1:] == [
        *(loop.format(name, f"DIPS_KEYS={keys / name}") for name in ("a", "me")),
        "from another machine (docs/start.md):",
        f"  scp -rp 10.0.0.1:{keys / 'me'} keys-me",
        "  dips doctor --master 10.0.0.1:29400 --keys keys-me",
        add,
        stop,
    ]
    assert join["own"] == join["public"][3:-2], "only what another machine needs"
    assert main.run(["up", str(tmp_path / "run.toml"), "--check"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run.toml'}: 1 slaves, 1 clusters, all settings are good\n"


class Deserted(contextlib.nullcontext["Deserted"]):
    """In place of LocalRun: its clusters have ended, one with keys that are refused, and the run has not."""

    finished, deserted, page_url, status = False, True, None, run_status()
    pages: ClassVar[list[str | None]] = []

    def __init__(self, plan: RunPlan, *given: object) -> None:
        super().__init__(self)
        self.plan = plan
        self.pages.append(plan.master.page_listen)

    def start(self, extend: bool) -> str:
        return "127.0.0.1:5"

    def tick(self) -> object:
        return self.status

    def exit_codes(self) -> dict[str, int | None]:
        return {"m": None, "a": KEYS_REFUSED_EXIT}


class Watched(Deserted):
    """Its clusters' keys are good; after one look comes what `then` says."""

    deserted, then, looks = False, "", 0

    def tick(self) -> object:
        self.looks += 1
        self.finished, self.deserted = self.then == "finished", self.then == "deserted"
        if self.then.startswith("ctrl-C"):
            raise KeyboardInterrupt
        if self.then == "SIGTERM":
            raise SystemExit(TERMINATED)
        return self.status

    def finish(self) -> None:
        assert self.finished

    def exit_codes(self) -> dict[str, int | None]:
        return {"m": None, "a": 0}


@pytest.mark.parametrize(
    ("local", "then", "code", "said"),
    [
        (Deserted, "", KEYS_REFUSED_EXIT, "the keys of a are refused: give new ones"),
        (Watched, "finished", 0, "run x ended at version 1:12, 400000 tokens\n"),
        (Watched, "deserted", 0, "run x is at version 1:12, 400000 tokens; `dips up FILE` continues it\n"),
        (Watched, "ctrl-C", 130, "run x were ended at version 1:12, 400000 tokens; its files are in RUN, and `dips up"),
        (Watched, "SIGTERM", TERMINATED, "SIGTERM: the processes of run x were ended at version 1:12, 400000 tokens;"),
        (Watched, "ctrl-C at once", 130, "ctrl-C: the processes of run x were ended before its first version"),
    ],
)
def test_up_says_how_it_ended_and_whose_keys_are_refused(
    local: type[Deserted],
    then: str,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, run = tmp_path / "run.toml", tmp_path / "run"
    file.write_text(f'[run]\nid = "x"\ndirectory = "{run}"\n[slave]\nmemory_bytes = "64 MiB"\n')
    monkeypatch.setattr(Watched, "then", then)
    monkeypatch.setattr(Watched, "status", run_status(published=None) if "at once" in then else run_status())
    monkeypatch.setattr("dips.cli.up.LocalRun", local)
    monkeypatch.setattr("dips.cli.up.time.sleep", lambda seconds: None)
    monkeypatch.setattr("dips.cli.up.refuse_what_cannot_start", lambda run, plan: None)

    def up(*more: str) -> object:
        try:
            return main.run(["up", str(file), "--insecure", *more])
        except SystemExit as ended:
            return ended.code

    assert up() == code
    out, error = capsys.readouterr()
    assert said.replace("FILE", str(file)).replace("RUN", str(run)) in out + error
    assert "the run's master listens on 127.0.0.1:5" in error
    assert (f"next: dips export {run} --to" in out) == (code == 0)
    assert up("--no-page") == code
    *_, with_one, without = Deserted.pages
    assert (with_one is not None, without) == (True, None)


# ---- keys ----


def test_keys_are_shown_with_what_is_wrong_with_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ensure_keys(tmp_path, ["a", "b", "c"])
    with Authority(tmp_path).locked() as authority:
        authority.revoke("b", "stolen")
        authority.revoke("c", "")
    assert main.run(["keys", "show", str(tmp_path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = {row[0]: (row[1], row[2], " ".join(row[4:])) for row in rows if len(row) > 3}
    serials = {name: authority.certificate(name).serial_hex[:12] for name in authority.names()}
    assert shown["a"] == ("cluster", serials["a"], "")
    assert shown["b"] == ("cluster", serials["b"], "revoked: stolen")
    assert shown["c"] == ("cluster", serials["c"], "revoked: no reason given")
    assert main.run(["keys", "show", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["authorities"] == 1
    assert [(row["name"], row["revoked"], row["reason"]) for row in told["identities"][:3]] == [
        ("a", False, ""),
        ("b", True, "stolen"),
        ("c", True, ""),
    ]
