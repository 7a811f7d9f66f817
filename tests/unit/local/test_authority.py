"""The authority: who gets keys, what a renewal and a revocation change, and what nobody else can read."""

from __future__ import annotations

import json
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from dips.cli import main
from dips.core.errors import ConfigError
from dips.core.net.keys import load_identity, read_revoked
from dips.core.net.security import Role
from dips.local.authority import Authority, ensure_keys


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ensure_keys(tmp_path / "keys", ["a", "b"], ["s0"])
    return tmp_path / "keys"


def test_everybody_has_one_directory_and_every_key_is_its_owners_alone(folder: Path) -> None:
    assert Authority(folder).names() == ["a", "b", "master", "operator", "s0"]
    private = [folder / "ca" / "ca.key", *folder.glob("*/tls.key")]
    assert len(private) == 6
    for file in private:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert not list(folder.glob("*/ca.key"))[1:]
    assert not [path for path in folder.rglob(".*")]


def test_a_certificate_serves_under_its_roles_name_and_only_the_masters_is_good_for_no_client(folder: Path) -> None:
    """Whoever calls the master asks for its name, which no other certificate has; the others serve metrics alone."""
    authority = Authority(folder)
    for name in authority.names():
        certificate = authority.certificate(name).x509
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        role = authority.certificate(name).role
        assert names.get_values_for_type(x509.DNSName) == [f"dips-{role.value}"]
        uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert [*uses] == [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        limits = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
        assert limits.critical
        assert not limits.value.ca


def test_keys_that_are_there_stay_and_missing_ones_are_made(folder: Path) -> None:
    before = {name: Authority(folder).certificate(name).serial for name in Authority(folder).names()}
    ensure_keys(folder, ["a", "c"], ["s0", "s1"])
    after = {name: Authority(folder).certificate(name).serial for name in Authority(folder).names()}
    assert set(after) - set(before) == {"c", "s1"}
    assert {name: after[name] for name in before} == before
    with pytest.raises(ConfigError, match=r"holds keys of cluster a .* not of a slave: rename one of the two"):
        ensure_keys(folder, [], ["a"])


@pytest.mark.parametrize(
    ("name", "words"),
    [("ca", "authority's own folder"), ("a", "is there already"), ("../x", "is not a name"), ("A b", "is not a name")],
)
def test_names_that_cannot_be(folder: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Authority(folder).add(Role.CLUSTER, name)
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b", "ca", "master", "operator", "s0"]


def test_a_renewal_keeps_the_key_unless_a_new_one_is_asked_for(folder: Path) -> None:
    authority = Authority(folder)
    first, key = authority.certificate("a"), (folder / "a" / "tls.key").read_bytes()
    authority.renew("a")
    assert authority.certificate("a").serial != first.serial
    assert (folder / "a" / "tls.key").read_bytes() == key
    authority.renew("a", new_key=True)
    assert (folder / "a" / "tls.key").read_bytes() != key
    assert load_identity(folder / "a").name == "a"


def test_revoking_takes_back_every_certificate_of_a_name_and_no_other(folder: Path) -> None:
    authority = Authority(folder)
    serials = {authority.certificate("b").serial}
    authority.renew("b")
    serials.add(authority.certificate("b").serial)
    assert {int(row.serial, 16) for row in authority.revoke("b", "lost")} == serials
    assert authority.revoke("b", "again") == []
    for place in (folder / "ca", folder / "master", folder / "a"):
        assert read_revoked(place / "revoked.json") == dict.fromkeys(serials, "lost")
    authority.renew("b", new_key=True)
    assert authority.certificate("b").serial not in read_revoked(folder / "ca" / "revoked.json")
    authority.add(Role.CLUSTER, "late")
    assert read_revoked(folder / "late" / "revoked.json") == dict.fromkeys(serials, "lost")


def test_a_revoked_certificate_stays_on_the_list_until_it_has_lapsed(tmp_path: Path) -> None:
    begin = datetime.now(UTC)
    with Authority.create(tmp_path, begin).locked() as authority:
        authority.add(Role.CLUSTER, "a")
        authority.revoke("a", "lost")
    assert len(Authority(tmp_path, begin + timedelta(days=396)).revoked()) == 1
    assert Authority(tmp_path, begin + timedelta(days=398)).revoked() == []
    assert Authority(tmp_path, begin + timedelta(days=398)).issued() == []


def test_a_list_that_is_damaged_is_never_replaced_by_an_empty_one(folder: Path) -> None:
    Authority(folder).revoke("a", "lost")
    kept = json.loads((folder / "ca" / "revoked.json").read_text())
    kept["revoked"][0]["not_after"] = "tomorrow"
    for text in ('{"revoked": [{"serial": "1"}', json.dumps(kept)):
        (folder / "ca" / "revoked.json").write_text(text)
        with pytest.raises(ConfigError, match=r"revoked\.json is damaged"):
            Authority(folder).revoke("b", "lost too")
        assert len(read_revoked(folder / "master" / "revoked.json")) == 1


def test_another_authority_in_three_steps_leaves_nobody_out(folder: Path) -> None:
    authority = Authority(folder)
    authority.new_authority()
    for name in authority.names():
        load_identity(folder / name)
        assert (folder / name / "ca.crt").read_bytes().count(b"BEGIN CERTIFICATE") == 2
    with pytest.raises(ConfigError, match="signed by an older authority; first `dips keys renew --all`"):
        authority.retire_old()
    for name in authority.names():
        authority.renew(name)
        load_identity(folder / name)
    assert authority.retire_old() == 1
    for name in authority.names():
        load_identity(folder / name)
        assert (folder / name / "ca.crt").read_bytes().count(b"BEGIN CERTIFICATE") == 1


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = str(tmp_path / "keys")

    def said(*words: str) -> str:
        assert main.run(["keys", *words]) == 0
        return capsys.readouterr().out

    made = said("init", keys, "--cluster", "a", "--slave", "s0", "--operator", "me")
    assert all(f"keys of {whose}" in made for whose in ("cluster a", "slave s0", "operator me", "master master"))
    assert "keys of cluster b" in said("add", keys, "--cluster", "b")
    assert "revoked" in said("revoke", keys, "b", "--reason", "stolen")
    twice = said("revoke", keys, "b", "me", "--reason", "left").splitlines()
    assert (twice[0], twice[1].startswith("me: revoked ")) == ("b: was revoked already", True)
    assert "keys of cluster a" in said("renew", keys, "a", "--new-key")
    assert "signs from now on" in said("renew", keys, "--new-ca")
    said("renew", keys, "--all")
    assert "1 old authorities are no longer trusted" in said("renew", keys, "--retire-old-ca")
    assert "revoked: stolen" not in said("show", keys)  # b was renewed with all the others
    told = json.loads(said("show", keys, "--json"))
    assert [row["name"] for row in told["identities"]] == ["a", "b", "master", "me", "s0"]
    assert [row["revoked"] for row in told["identities"]] == [False] * 5


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["init", "KEYS"], "holds keys already"),
        (["add", "KEYS"], "no process is named"),
        (["renew", "KEYS"], "no one is named"),
        (["renew", "KEYS", "ghost"], "has no keys of 'ghost'; it has a, b, master, operator, s0"),
        (["revoke", "KEYS", "ghost"], "issued no certificate to 'ghost'"),
        (["revoke", "KEYS", "master"], "the master's certificate cannot be revoked"),
        (["show", "KEYS/none"], "make them with `dips keys init"),
        (["nonsense"], "No such command 'nonsense'"),
    ],
)
def test_a_slip_is_one_sentence(
    folder: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["keys", *(word.replace("KEYS", str(folder)) for word in words)]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert len(error.splitlines()) == 1


def test_an_authority_whose_key_is_kept_elsewhere_signs_nothing(folder: Path) -> None:
    (folder / "ca" / "ca.key").unlink()
    with pytest.raises(ConfigError, match="made where the authority's key is kept"):
        Authority(folder).add(Role.CLUSTER, "c")
    Authority(folder).revoke("a", "still possible")


def test_a_file_that_cannot_be_read_is_one_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a" / "tls.key").unlink()
    (folder / "a" / "tls.key").mkdir()
    assert main.run(["keys", "renew", str(folder), "a"]) == 2
    assert capsys.readouterr().err == f"dips: {folder / 'a' / 'tls.key'} cannot be read or written: Is a directory\n"
