"""Who may call what, judged by certificate: every method by every role, and certificates that stop to hold."""

from __future__ import annotations

import asyncio
import json
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from dips.core.errors import ConfigError, RefusalCode, Refused
from dips.core.net.keys import load_identity
from dips.core.net.security import INSECURE
from dips.local.authority import Authority, ensure_keys
from dips.master.access import Access, check_is_own
from dips.master.state.effects import Revoked
from dips.protos import clusters_pb2, operator_pb2, slaves_pb2

CLUSTERS = {"cluster"}
READERS = {"cluster", "operator"}
EVERYBODY = {"cluster", "slave", "operator", "master"}
ALLOWED = {
    f"/dips.v1.{service}/{method}": roles
    for service, methods, roles in (
        ("Clusters", "Join Heartbeat BeginPush FinishPush AwaitVerdict LeaseData ReturnData Leave", CLUSTERS),
        ("Clusters", "BeginPull FinishPull", READERS),
        ("Slaves", "Attach", {"slave"}),
        ("Operator", "Status Watch", EVERYBODY),
        ("Operator", "Pause Resume Stop Evict Drain Reshard Extend", {"operator"}),
    )
    for method in methods.split()
}
NAME_OF_ROLE = {"cluster": "a", "slave": "s0", "operator": "operator", "master": "master"}
JOIN, STATUS = "/dips.v1.Clusters/Join", "/dips.v1.Operator/Status"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("access")
    ensure_keys(folder / "keys", ["a", "b"], ["s0"])
    ensure_keys(folder / "foreign", ["a"])
    return folder


@pytest.fixture
def keys(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(made / "keys", tmp_path / "keys"))


def pem(keys: Path, name: str) -> bytes:
    return (keys / name / "tls.crt").read_bytes()


def access_of(keys: Path, now: datetime | None = None) -> Access:
    return Access(load_identity(keys / "master"), now=None if now is None else lambda: now)


def refused(access: Access, method: str, certificate: bytes | None) -> str:
    with pytest.raises(Refused) as caught:
        access.admit(method, certificate)
    assert caught.value.code is RefusalCode.IDENTITY
    assert caught.value.retry_after_s == 0
    return caught.value.sentence


def test_the_table_names_every_method_of_every_service() -> None:
    services = [
        clusters_pb2.DESCRIPTOR.services_by_name["Clusters"],
        slaves_pb2.DESCRIPTOR.services_by_name["Slaves"],
        operator_pb2.DESCRIPTOR.services_by_name["Operator"],
    ]
    methods = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert methods == set(ALLOWED)


@pytest.mark.parametrize("role", sorted(EVERYBODY))
def test_each_role_may_call_its_methods_and_no_others(made: Path, role: str) -> None:
    access, name = access_of(made / "keys"), NAME_OF_ROLE[role]
    for method, roles in ALLOWED.items():
        if role in roles:
            assert access.admit(method, pem(made / "keys", name)).name == name
        else:
            sentence = refused(access, method, pem(made / "keys", name))
            assert f"the certificate of {role} {name} (serial " in sentence
            assert access.refused[method] == 1
            assert "may not call" in access.last_refused


@pytest.mark.parametrize("method", ["/dips.v1.Unheard/Of", "/dips.v1.Operator/Unheard", "nonsense", ""])
def test_a_method_that_nobody_knows_is_an_operators(made: Path, method: str) -> None:
    refused(access_of(made / "keys"), method, pem(made / "keys", "a"))


@pytest.mark.parametrize("certificate", [None, b"", b"garbage"])
def test_without_a_certificate_nothing_is_permitted(made: Path, certificate: bytes | None) -> None:
    refused(access_of(made / "keys"), STATUS, certificate)


def test_a_certificate_of_another_authority_is_refused_even_if_tls_let_it_in(made: Path) -> None:
    sentence = refused(access_of(made / "keys"), JOIN, pem(made / "foreign", "a"))
    assert "was signed by an authority that this run does not trust" in sentence


@pytest.mark.parametrize(("days", "words"), [(400, "expired on"), (-1, "does not hold before")])
def test_a_certificate_out_of_its_time_is_refused(made: Path, days: int, words: str) -> None:
    access = access_of(made / "keys", datetime.now(UTC) + timedelta(days=days))
    assert words in refused(access, JOIN, pem(made / "keys", "a"))


@pytest.mark.parametrize(("name", "says", "own"), [("a", "a", True), ("a", "b", False), ("operator", "export", True)])
def test_a_request_speaks_for_the_holder_of_the_certificate(made: Path, name: str, says: str, own: bool) -> None:
    async def ask() -> None:
        access = access_of(made / "keys")
        with access.serving(access.admit("/dips.v1.Clusters/BeginPull", pem(made / "keys", name))):
            check_is_own(says, "Join")

    if own:
        asyncio.run(ask())
        return
    with pytest.raises(Refused, match="says it comes from 'b', but the certificate is that of cluster a"):
        asyncio.run(ask())
    check_is_own(says, "Join")  # outside of a call with a certificate, as on an insecure master


async def test_a_revocation_ends_open_calls_and_names_its_holder_once(keys: Path) -> None:
    access = access_of(keys)
    of_a, of_b = (access.admit(JOIN, pem(keys, name)) for name in "ab")
    with access.serving(of_a) as call_of_a, access.serving(of_b) as call_of_b:
        assert access.look() == []
        Authority(keys).revoke("b", "stolen")
        assert access.look() == [Revoked("cluster", "b", "stolen")]
        assert not call_of_a.ended.done()
        assert "cluster b (serial" in call_of_b.ended.result().sentence
        assert "was revoked (stolen)" in call_of_b.ended.result().sentence
        assert access.look() == []
    assert "was revoked (stolen)" in refused(access, STATUS, pem(keys, "b"))
    Authority(keys).renew("b", new_key=True)
    assert access.admit(JOIN, pem(keys, "b")).name == "b"
    Authority(keys).revoke("a", "")
    assert access.look() == [Revoked("cluster", "a", "")]


async def test_taking_back_a_certificate_that_is_no_longer_used_evicts_nobody(keys: Path) -> None:
    access = access_of(keys)
    access.admit(JOIN, pem(keys, "b"))
    old = Authority(keys).certificate("b").serial_hex
    Authority(keys).renew("b")
    access.admit(JOIN, pem(keys, "b"))
    (keys / "master" / "revoked.json").write_text(json.dumps({"revoked": [{"serial": old}]}))
    assert access.look() == []


@pytest.mark.parametrize("harm", ["garbage", "gone"])
async def test_an_unreadable_list_leaves_the_last_one(keys: Path, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    Authority(keys).revoke("b", "stolen")
    access, file = access_of(keys), keys / "master" / "revoked.json"
    if harm == "garbage":
        file.write_text("{")
    else:
        file.unlink()
    assert access.look() == []
    assert "the old one stays" in caplog.text
    assert "was revoked (stolen)" in refused(access, JOIN, pem(keys, "b"))


def test_a_list_that_was_named_must_be_there(keys: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Access(load_identity(keys / "master"), tmp_path / "no.json")
    elsewhere = tmp_path / "revoked.json"
    Authority(keys).revoke("b", "stolen")
    shutil.move(keys / "master" / "revoked.json", elsewhere)
    access = Access(load_identity(keys / "master"), elsewhere)
    assert "stolen" in refused(access, JOIN, pem(keys, "b"))


async def test_a_retired_authority_is_out_on_open_calls_too(keys: Path) -> None:
    access, authority = access_of(keys), Authority(keys)
    old = pem(keys, "a")
    with access.serving(access.admit(JOIN, old)) as call:
        authority.new_authority()
        access.look()
        assert not call.ended.done()
        for name in authority.names():
            authority.renew(name)
        authority.retire_old()
        access.look()
        assert "an authority that this run does not trust" in call.ended.result().sentence
    assert access.admit(JOIN, pem(keys, "a")).name == "a"
    refused(access, JOIN, old)


def test_a_certificate_of_a_new_authority_counts_before_the_next_look(keys: Path) -> None:
    access, authority = access_of(keys), Authority(keys)
    authority.new_authority()
    authority.renew("a")
    assert access.admit(JOIN, pem(keys, "a")).name == "a"


def test_without_keys_nothing_is_judged() -> None:
    access = Access(INSECURE)
    assert not access.checks
    assert access.look() == []


@pytest.fixture(autouse=True)
def loud(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
