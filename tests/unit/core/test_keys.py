"""An identity is read, and whatever is wrong with one is said with its file and its remedy."""

from __future__ import annotations

import base64
import json
import random
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509 import load_pem_x509_certificate

from dips.core.errors import ConfigError
from dips.core.net import keys
from dips.core.net.security import INSECURE, ProcessKnobs, Role
from dips.local.authority import Authority, ensure_keys

NOW = datetime.now(UTC)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for name in ("ours", "theirs"):
        ensure_keys(folder / name, ["a"], ["s0"])
    return folder


@pytest.fixture
def identity(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "ours" / "a", tmp_path / "a"))


def refused(directory: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        keys.load_identity(directory)
    sentence = str(caught.value)
    assert str(directory) in sentence
    assert "\n" not in sentence
    return sentence


def test_an_identity_says_role_and_name_and_shows_no_key(made: Path) -> None:
    found = keys.load_identity(made / "ours" / "a")
    assert (found.role, found.name, str(found)) == (Role.CLUSTER, "a", "cluster a")
    assert "BEGIN" not in repr(found)
    assert keys.load_identity(made / "ours" / "master").role is Role.MASTER


@pytest.mark.parametrize("name", ["ca.crt", "tls.crt", "tls.key"])
@pytest.mark.parametrize("content", [b"", b"garbage", b"-----BEGIN CERTIFICATE-----\nA\n-----END CERTIFICATE-----\n"])
def test_a_garbled_or_missing_file_is_named(identity: Path, name: str, content: bytes) -> None:
    (identity / name).write_bytes(content)
    assert name in refused(identity)
    (identity / name).unlink()
    assert f"{name} cannot be read: No such file or directory" in refused(identity)


def test_a_file_that_never_ends_is_not_read(identity: Path) -> None:
    with (identity / "ca.crt").open("wb") as file:
        file.truncate(keys.MAX_FILE_BYTES + 1)
    assert "ca.crt is longer than" in refused(identity)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o666])
def test_a_key_that_everybody_can_reach_is_refused(identity: Path, mode: int) -> None:
    (identity / "tls.key").chmod(mode)
    assert f"chmod 600 {identity / 'tls.key'}" in refused(identity)


def test_only_a_key_on_an_elliptic_curve_is_taken() -> None:
    form = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    keys.load_private_key(ec.generate_private_key(ec.SECP256R1()).private_bytes(*form), "tls.key")
    with pytest.raises(ConfigError, match=r"tls\.key is not a key on an elliptic curve"):
        keys.load_private_key(ed25519.Ed25519PrivateKey.generate().private_bytes(*form), "tls.key")


def test_a_key_of_another_certificate_is_refused(made: Path, identity: Path) -> None:
    shutil.copy(made / "ours" / "s0" / "tls.key", identity / "tls.key")
    assert "does not belong to" in refused(identity)


def test_a_certificate_of_another_authority_is_refused(made: Path, identity: Path) -> None:
    for name in ("tls.crt", "tls.key"):
        shutil.copy(made / "theirs" / "a" / name, identity / name)
    assert "was signed by none of the authorities" in refused(identity)


@pytest.mark.parametrize(("began_days_ago", "words"), [(398, "expired on"), (-2, "does not hold before")])
def test_a_certificate_out_of_its_time_is_refused(tmp_path: Path, began_days_ago: int, words: str) -> None:
    Authority.create(tmp_path / "keys", NOW - timedelta(days=500))
    with Authority(tmp_path / "keys", NOW - timedelta(days=began_days_ago)).locked() as authority:
        place = authority.add(Role.CLUSTER, "old")
    sentence = refused(place)
    assert words in sentence
    if began_days_ago > 0:
        assert "dips keys renew KEYS old" in sentence


@pytest.mark.parametrize("insecure", [True, False])
def test_keys_or_insecure_and_never_both_nor_nothing(made: Path, insecure: bool) -> None:
    with pytest.raises(ValueError, match=r"--keys \(or DIPS_KEYS\) and --insecure \(or DIPS_INSECURE\)"):
        ProcessKnobs(keys=made / "ours" / "a", insecure=True)
    if insecure:
        assert keys.security_from(None, True, "the test") is INSECURE
    else:
        with pytest.raises(ConfigError, match=r"the test has no keys: give --keys DIR .* or say --insecure"):
            keys.security_from(None, False, "the test")


def test_renewed_keys_are_seen_and_bad_ones_change_nothing(made: Path, identity: Path) -> None:
    first = keys.load_identity(identity)
    used = keys.UsedKeys(first)
    assert not used.renewed
    assert keys.reloaded(first) == first
    (identity / "tls.crt").write_bytes(b"half a certifi")
    assert used.renewed
    assert keys.reloaded(first) is first
    shutil.copytree(made / "ours" / "s0", identity, dirs_exist_ok=True)
    assert keys.reloaded(first) is first  # keys, but another process's
    shutil.copytree(made / "ours" / "a", identity, dirs_exist_ok=True)
    assert keys.reloaded(first) == first
    (identity / "tls.crt").unlink()
    assert keys.UsedKeys(first).renewed is False
    assert not keys.UsedKeys(INSECURE).renewed


def test_the_list_of_revoked_certificates(tmp_path: Path) -> None:
    file = tmp_path / "revoked.json"
    file.write_text(json.dumps({"revoked": [{"serial": "ff", "reason": "x" * 1000}, {"serial": "10"}]}))
    assert keys.read_revoked(file) == {255: "x" * 200, 16: ""}


def test_what_another_list_revokes_is_added_and_nothing_is_taken_back(tmp_path: Path) -> None:
    file, late = tmp_path / "revoked.json", NOW + timedelta(days=1)
    rows = [
        {"serial": "1", "not_after": NOW.isoformat()},
        {"serial": "2", "not_after": late.isoformat()},
        {"serial": "3"},
    ]
    lists = [json.dumps({"revoked": some}).encode() for some in (rows, rows[1:2], [{"serial": "4", "reason": "lost"}])]
    added = [keys.add_revoked(file, one, NOW) for one in lists]
    assert added == [True, False, True]
    assert keys.read_revoked(file) == {2: "", 3: "", 4: "lost"}, "the first one has lapsed"
    before = file.read_bytes()
    for wrong in (b"", b"[]", json.dumps({"revoked": [{"serial": "5", "reason": "x" * keys.MAX_FILE_BYTES}]}).encode()):
        with pytest.raises(ConfigError):
            keys.add_revoked(file, wrong, NOW)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"revoked": 3}', '{"revoked": ["ff"]}', '{"revoked": [{"serial": "no"}]}', "[" * 100_000, "\x00"],
)
def test_a_list_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "revoked.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="is not a list of revoked certificates"):
        keys.read_revoked(file)


def certificate_for(*uris: str) -> bytes:
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 7, NOW, NOW + timedelta(days=1))
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])
    return builder.add_extension(names, critical=False).sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


def test_a_certificate_names_its_holder_in_one_uri() -> None:
    found = keys.parse_certificate(certificate_for("dips://slave/s0"), "its")
    assert (found.role, found.name, found.serial) == (Role.SLAVE, "s0", 7)
    for uris in (
        ("dips://slave/s0", "dips://master/m"),
        ("https://slave/s0",),
        ("dips://slave/s0?as=m",),
        ("dips://slave/s0#m",),
        ("dips://nobody/s0",),
        ("dips://slave/../m",),
        (),
    ):
        with pytest.raises(ConfigError, match="its is not a certificate of a process of dips"):
            keys.parse_certificate(certificate_for(*uris), "its")


@pytest.mark.parametrize("name", ["ca.crt", "tls.crt"])
def test_a_certificate_of_an_unknown_version_is_refused(identity: Path, name: str) -> None:
    """cryptography's error for it is no ValueError."""
    spoil(identity / name, b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x0a")
    assert "is not a valid X509 version" in refused(identity)


@pytest.mark.parametrize(("name", "why"), [("tls.crt", "Invalid key"), ("ca.crt", "is not what was signed")])
def test_a_certificate_whose_key_is_no_point_of_its_curve_is_refused(identity: Path, name: str, why: str) -> None:
    """cryptography reads the key only when it is asked for it."""
    uncompressed = b"\x03\x42\x00\x04"
    spoil(identity / name, uncompressed, b"\x03\x42\x00\x05")
    assert why in refused(identity)


def spoil(file: Path, old: bytes, new: bytes) -> None:
    der = load_pem_x509_certificate(file.read_bytes()).public_bytes(Encoding.DER)
    assert old in der
    wrong = base64.encodebytes(der.replace(old, new, 1))
    file.write_bytes(b"-----BEGIN CERTIFICATE-----\n" + wrong + b"-----END CERTIFICATE-----\n")


def meaning(name: str, data: bytes) -> object:
    """What was signed, and the signature; a key's own bytes. None when it is no certificate, or no key."""
    try:
        if name == "tls.key":
            key = load_pem_private_key(data, None)
            return key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
        found = load_pem_x509_certificate(data)
    except (ValueError, UnsupportedAlgorithm):
        return None
    return found.tbs_certificate_bytes, found.signature


@pytest.mark.filterwarnings("ignore::cryptography.utils.CryptographyDeprecationWarning")
@pytest.mark.parametrize("name", ["ca.crt", "tls.crt", "tls.key"])
def test_a_single_bit_that_changed_is_refused(identity: Path, name: str) -> None:
    whole, rng = (identity / name).read_bytes(), random.Random(name)
    for _ in range(200):
        data = bytearray(whole)
        at, bit = rng.randrange(len(whole)), rng.randrange(8)
        data[at] ^= 1 << bit
        if meaning(name, bytes(data)) == meaning(name, whole):
            continue
        (identity / name).write_bytes(data)
        refused(identity)


def test_how_long_the_own_certificate_still_holds(made: Path) -> None:
    identity = keys.load_identity(made / "ours" / "a")
    ends = load_pem_x509_certificate(identity.cert_pem).not_valid_after_utc
    for left_s in (3600.0, 0.5, 0.0, -5.0):
        assert keys.certificate_left_s(identity, ends - timedelta(seconds=left_s)) == max(0.0, left_s)
    assert keys.certificate_left_s(identity) == pytest.approx((ends - NOW).total_seconds(), abs=3600)
    assert keys.certificate_left_s(INSECURE) is None
