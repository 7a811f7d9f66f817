"""Who may look at the status page: names it is asked for under, tokens, certificates, files; and its own files."""

from __future__ import annotations

import json
import re
import stat
from hashlib import sha256
from pathlib import Path

import pytest
from support.repository import ROOT

from dips.core.errors import ConfigError, Refused
from dips.core.net.keys import load_identity
from dips.core.net.security import INSECURE
from dips.local.authority import ensure_keys
from dips.master.access import Access
from dips.master.page import access
from dips.master.page import access as gates
from dips.master.page.server import static_files

TOKEN = "t" * 43
STATIC = ROOT / "src" / "dips" / "master" / "page" / "static"
UPLOT = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    ensure_keys(folder / "keys", ["a"], ["s0"], ["me", "gone"])
    return folder / "keys"


def keyed(keys: Path, *hosts: str) -> access.PageAccess:
    return access.PageAccess(Access(load_identity(keys / "master")), TOKEN, 8080, hosts)


def certificate(keys: Path, name: str) -> bytes:
    return (keys / name / "tls.crt").read_bytes()


@pytest.mark.parametrize(("header", "name"), [
    ("LocalHost", "localhost"), ("localhost.", "localhost"), ("[::1]:80", "::1"), ("[::1]", "::1"),
    ("x" * 300, "x" * 300),
    *((bad, None) for bad in ("[evil.example]:80", "[::1", "[::1]x", "evil.example:80:80", "a:b", "localhost/evil")),
    *((bad, None) for bad in ("localhost:80@evil.example", "x" * 301, "", None)),
])  # fmt: skip
def test_the_name_in_a_host_header(header: str | None, name: str | None) -> None:
    assert access.host_name(header) == name


@pytest.mark.parametrize(("header", "insecure", "with_keys"), [
    ("127.0.0.1:1", True, True), ("[::1]:1", True, True), ("localhost:1", True, True), ("10.0.0.5:1", False, True),
    ("dips-master:1", False, True), ("status.example:1", True, True), ("evil.example:1", False, False),
    ("localhost.evil.example:1", False, False), ("127.0.0.1.evil.example", False, False), ("0", False, False),
    (None, False, False),
])  # fmt: skip
def test_only_names_of_this_master_answer(header: str | None, insecure: bool, with_keys: bool, keys: Path) -> None:
    assert access.PageAccess(Access(INSECURE), TOKEN, 1, ["Status.example"]).host_is_ours(header) is insecure
    assert keyed(keys, "Status.example").host_is_ours(header) is with_keys


@pytest.mark.parametrize("token", ["", "x", TOKEN[:-1], TOKEN + "t", "\u00fc" * 43, TOKEN.upper()])
def test_another_token_is_refused(token: str, keys: Path) -> None:
    gate = keyed(keys)
    for link, cookies in ((token, {}), (None, {gate.cookie: token}), (None, {"dips-page": TOKEN})):
        with pytest.raises(Refused, match="without a certificate"):
            gate.admit(None, link, cookies)


def test_without_keys_there_is_nobody_to_tell_apart() -> None:
    gate = access.PageAccess(Access(INSECURE), TOKEN, 1)
    assert gate.admit(None, None, {}).who == "this machine"
    assert not gate.checks


def test_the_token_stays_its_owners_or_is_refused(tmp_path: Path) -> None:
    first = access.load_secret(tmp_path)
    assert len(first.token) == 43
    assert access.load_secret(tmp_path).token != first.token  # nothing is kept until it is saved
    access.save_secret(tmp_path, access.Secret(first.token, 4711))
    assert access.load_secret(tmp_path) == access.Secret(first.token, 4711)
    access.write_page_address(tmp_path, "https://127.0.0.1:4711/?link=x", 1)
    assert access.read_page_url(tmp_path) == "https://127.0.0.1:4711/?link=x"
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    access.save_secret(tmp_path, access.Secret(TOKEN, 1))
    (tmp_path / gates.SECRET_NAME).chmod(0o644)
    with pytest.raises(ConfigError, match=r"can be read by other users of this machine.*: remove it"):
        access.load_secret(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps({"token": "short", "port": 1}), json.dumps({"port": 1})])
def test_a_torn_token_is_made_anew(content: str, tmp_path: Path) -> None:
    (tmp_path / gates.SECRET_NAME).write_text(content)
    (tmp_path / gates.SECRET_NAME).chmod(0o600)
    assert len(access.load_secret(tmp_path).token) == 43


def test_charts_are_the_published_library_with_its_licence() -> None:
    for name, checksum in UPLOT.items():
        assert sha256((STATIC / "vendor" / "uplot" / name).read_bytes()).hexdigest() == checksum, name
    assert "MIT License" in static_files()["vendor/uplot/LICENSE"].body.decode()


def test_all_that_the_page_asks_for_is_in_the_package() -> None:
    files = static_files()
    asked = set()
    for name in ("index.html", "locked.html"):
        asked |= set(re.findall(r'(?:src|href)="/static/([^"]+)"', files[name].body.decode()))
    for name, file in files.items():
        if name.endswith(".js") and "/" not in name:
            asked |= set(re.findall(r'from "\./([\w.]+)"', file.body.decode()))
    assert "page.js" in asked
    assert "charts.js" in asked
    assert asked <= set(files)


def test_the_page_asks_no_other_host_and_holds_no_script_or_style_that_the_policy_would_refuse() -> None:
    for name, file in static_files().items():
        text = file.body.decode()
        if "/" not in name:
            assert not re.search(r"(?:src|href|url|import|fetch)\W{1,3}(?:https?:)?//", text), name
        if name.endswith(".html"):
            # The policy has the hash of each <script> without attributes.
            assert not re.search(r"<script(?!>|[^>]*\bsrc=)|<style|\sstyle=|\son\w+=", text), name
            assert 'lang="en"' in text


def test_no_script_of_the_page_makes_markup_of_text() -> None:
    dangerous = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|setHTML")
    scripts = [path for path in STATIC.glob("*.js")]
    assert len(scripts) > 5
    assert not [path.name for path in scripts if dangerous.search(path.read_text())]
