"""Bounds of what strangers can fill, the words of the timeline, and the exit code of the process."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.master_bench import Bench

from dips.core.net.keys import is_signed_by, load_identity
from dips.local.authority import ensure_keys
from dips.master import access, process
from dips.master.config import MasterConfig
from dips.master.directory import remove_file
from dips.master.page import history
from dips.master.page.history import TapeTail
from dips.master.page.snapshot import sentence
from dips.master.state.slave_links import MAX_CLAIMS, NameClaims

# ---- the process ----


@pytest.mark.parametrize("failpoints", [False, True])
def test_the_process_ends_with_the_code_of_what_it_served(
    failpoints: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[Any] = []

    async def serve(config: MasterConfig, machine: type) -> Any:
        asked.append((config.run_id, machine.__name__))
        return SimpleNamespace(exit_code=143)

    monkeypatch.setattr(process, "serve", serve)
    monkeypatch.setattr(process, "raise_file_limit", lambda: asked.append("files"))
    monkeypatch.setattr(process, "configure_logging", lambda *given: asked.append(given[:2]))
    monkeypatch.setattr(process, "install", lambda role, *, enabled: asked.append((role, enabled)))
    config = MasterConfig(run_id="mine", directory=tmp_path, insecure=True, failpoints=failpoints)
    loaded: Any = SimpleNamespace(describe=lambda: "grace_s = 7 (told)")
    with caplog.at_level(logging.INFO):
        assert process.run(config) == 143
        assert "grace_s = 7" not in caplog.text
        assert process.run(config, loaded) == 143
    assert "grace_s = 7" in caplog.text
    assert asked == ["files", ("master", "mine"), ("master", failpoints), ("mine", "MasterMachine")] * 2


def test_an_address_that_cannot_be_removed_hides_no_other_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "gone").touch()
    for name in ("gone", "never"):
        remove_file(tmp_path / name)
    assert not (tmp_path / "gone").exists()
    assert not caplog.records
    remove_file(tmp_path)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(tmp_path) in caplog.text


# ---- bounds ----


def test_newcomers_that_wait_for_a_name_are_few_and_the_one_that_was_silent_longest_is_forgotten() -> None:
    claims = NameClaims()

    def wait(n: int, now_s: float) -> float:
        """Whether it is to ask again: 0 when it has waited long enough."""
        return claims.refuse("slave", "s0", str(n).encode(), "it", "end it", now_s, 10.0).retry_after_s

    for n in range(MAX_CLAIMS):
        assert wait(n, n / 1000) > 0
    assert wait(0, 1.0) > 0
    assert wait(MAX_CLAIMS, 2.0) > 0, "in the place of 1, which has not asked for the longest time"
    assert [wait(n, 10.1) > 0 for n in (0, 2, MAX_CLAIMS)] == [False, False, True]
    assert wait(1, 10.1) > 0, "it starts to wait again"
    claims.rearm()
    assert wait(MAX_CLAIMS, 12.5) > 0, "after a pause of the master all do"


def test_certificates_that_were_verified_are_remembered_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_keys(tmp_path, ["a", "b"], ["s0"])
    verified: list[object] = []
    signed = is_signed_by

    def counted(certificate: Any, authorities: Any) -> bool:
        verified.append(certificate)
        return signed(certificate, authorities)

    monkeypatch.setattr(access, "is_signed_by", counted)
    monkeypatch.setattr(access, "KNOWN_CERTIFICATES", 2)
    found = access.Access(load_identity(tmp_path / "master"))
    status = "/dips.v1.Clusters/Join"

    def admit(*names: str) -> int:
        verified.clear()
        for name in names:
            assert found.admit(status, (tmp_path / name / "tls.crt").read_bytes()).name == name
        return len(verified)

    assert admit("a", "a", "b", "a", "b") == 2
    ensure_keys(tmp_path, ["c"])
    assert admit("c", "c") == 1
    assert admit("c", "a", "a") == 1, "the others were forgotten"


def test_a_file_without_lines_is_passed_over_and_what_follows_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "AT_ONCE_BYTES", 100)
    path = tmp_path / "tape"
    line = json.dumps({"wall_s": 1.0, "kind": "heldout", "version": "1:1", "tokens": 5, "loss": 2.0})
    path.write_text("x" * 250 + "\n" + line + "\n")
    tail = TapeTail(path)
    assert [list(tail.events()) for _ in range(3)] == [[], [], []]
    assert [fields["version"] for _, _, fields in tail.events()] == ["1:1"]
    path.unlink()
    assert list(tail.events()) == []


# ---- the page ----


def test_what_an_operator_did_stands_beside_the_sentence_unless_it_is_the_sentence() -> None:
    view = Bench().running("a").look()

    def more(**fields: Any) -> str:
        changed = dataclasses.replace(view, status=dataclasses.replace(view.status, **fields))
        return " ".join(sentence(changed, {})["more"])

    for fields, words in (({"paused": True}, "paused"), ({"stopping": True}, "ending")):
        assert words in more(**fields)
        assert words not in more()
    assert "ending" not in more(stopping=True, stopped=True)
    assert "A reshard waits: x." in more(reshard="x", recovery="y")
    assert "A reshard waits: x." in more(reshard="x", waiting_for="y")
    assert "A reshard" not in more(reshard="x")
