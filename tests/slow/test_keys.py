"""A run with keys: who is let in, what others are told and the master's log says, and keys that change under it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from support.dips_command import dips
from support.waiting import NO_LIMIT_S, until
from support.whole_run import LAYOUT, NumpyModel, WholeRun

from dips.cli import main
from dips.core.errors import KEYS_REFUSED_EXIT, RefusalCode, Refused
from dips.core.messages import DataMode, DataPlan
from dips.core.net.keys import MASTER_DNS_NAME, load_identity
from dips.core.net.security import INSECURE, Identity
from dips.core.net.tls_probe import why_not_let_in
from dips.local.authority import Authority, ensure_keys
from dips.local.operator_client import OperatorClient
from dips.protos import operator_pb2, operator_pb2_grpc
from dips.slave.control import RENEWED
from dips.worker.config import ClientConfig
from dips.worker.shell import ClusterShell


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeRun]:
    """A master, a slave and cluster a, which trains; keys of b too. `foreign` beside `keys`: another authority's."""
    folder = tmp_path_factory.mktemp("keys")
    ensure_keys(folder / "keys", ["a", "b"], ["s0"], ["operator", "ops"])
    ensure_keys(folder / "foreign", ["a"], ["s0"])
    with WholeRun(folder / "run", n_slaves=1, keys=folder / "keys") as whole:
        # The last test leaves it without a slave; and a call has to outlast the master's wait in FinishPush (5 s).
        whole.client = {"leave_wait_s": 8.0, "call_deadline_s": 8.0}
        cluster = whole.cluster("a", seed=1, step_s=0.02)
        whole.wait_for_version(1)
        yield whole
        cluster.driver.request_stop("enough")
        cluster.join()


def keys_of(run: WholeRun, name: str) -> Path:
    assert run.keys is not None
    return run.keys / name


def foreign(run: WholeRun, name: str, into: Path) -> Path:
    """A certificate of another authority in a directory that trusts ours too: our master alone can find it wrong."""
    theirs = keys_of(run, ".").parent / "foreign" / name
    shutil.copytree(theirs, into)
    (into / "ca.crt").write_bytes((theirs / "ca.crt").read_bytes() + (keys_of(run, name) / "ca.crt").read_bytes())
    return into


def log_of_master(run: WholeRun) -> str:
    return (run.directory / "master.log").read_text()


def said(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """Exit code and the one line on standard error of a command."""
    code = main.run([str(word) for word in words])
    error = capsys.readouterr().err.strip()
    assert "Traceback" not in error
    return code, error.splitlines()[-1] if error else ""


def test_a_run_with_keys_trains_and_says_so(run: WholeRun) -> None:
    assert "for those with keys only, as master master" in log_of_master(run)
    assert [cluster.cluster_id for cluster in run.status().clusters] == ["a"]


def test_keys_of_another_run_are_told_so(run: WholeRun, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = keys_of(run, ".").parent / "foreign" / "operator"
    code, error = said(capsys, "status", run.address, "--keys", theirs)
    assert code == KEYS_REFUSED_EXIT
    assert "shows a certificate that the authorities in" in error
    assert "these keys belong to another run" in error


def test_a_foreign_slave_and_a_foreign_cluster_end_with_the_reason(run: WholeRun, tmp_path: Path) -> None:
    own = ("--run-id", "test", "--slave-id", "s0", "--directory", tmp_path / "s0", "--master", run.address)
    told = dips("slave", *own, "--keys", foreign(run, "s0", tmp_path / "keys"))
    assert told.returncode == KEYS_REFUSED_EXIT
    assert "dips slave s0: the master at" in told.stderr
    assert "does not accept the certificate of slave s0" in told.stderr.splitlines()[-1]
    config = ClientConfig(cluster_id="a", master=run.address, keys=foreign(run, "a", tmp_path / "a"))
    with pytest.raises(Refused, match="does not accept the certificate of cluster a"), driver(config) as cluster:
        assert cluster.done


def driver(config: ClientConfig) -> ClusterShell:
    return ClusterShell(config, NumpyModel(seed=2), LAYOUT, DataPlan(DataMode.OWN))


def status_with(run: WholeRun, identity: Identity) -> object:
    """A call by a client that checks nothing itself."""
    credentials = grpc.ssl_channel_credentials(identity.ca_pem, identity.key_pem, identity.cert_pem)
    options = [("grpc.ssl_target_name_override", MASTER_DNS_NAME)]
    with grpc.secure_channel(run.address, credentials, options=options) as channel:
        stub = operator_pb2_grpc.OperatorStub(channel)
        return stub.Status(operator_pb2.StatusRequest(), timeout=NO_LIMIT_S)


def test_keys_are_wanted_where_there_are_keys(run: WholeRun, capsys: pytest.CaptureFixture[str]) -> None:
    code, error = said(capsys, "status", run.address, "--insecure")
    assert code == KEYS_REFUSED_EXIT
    assert "wants keys: give --keys DIR instead of --insecure" in error
    code, error = said(capsys, "status", run.address)
    assert (code, "this command has no keys: give --keys DIR" in error) == (2, True)
    insecure = ClientConfig(cluster_id="b", master=run.address, insecure=True, connect_wait_s=NO_LIMIT_S)
    with pytest.raises(Refused, match="wants keys: give --keys DIR") as refused, driver(insecure) as cluster:
        assert cluster.done
    assert refused.value.code is RefusalCode.IDENTITY


def test_a_master_without_keys_is_not_taken_for_one_with(tmp_path: Path) -> None:
    ensure_keys(tmp_path / "keys")
    with WholeRun(tmp_path / "run", n_slaves=1) as insecure:
        until(lambda: "INSECURE, as configured" in log_of_master(insecure), "the master's first words")
        why = why_not_let_in(insecure.address, load_identity(tmp_path / "keys" / "operator"))
        assert why.startswith(f"the master at {insecure.address} uses no keys: it was started with --insecure")
        assert why_not_let_in(insecure.address, INSECURE) == ""


def test_keys_and_authority_are_replaced_while_the_run_goes_on(run: WholeRun) -> None:
    """No process is restarted, evicted or turned away, and at the end nothing that the old authority signed counts."""
    authority = Authority(keys_of(run, "."))
    old = load_identity(keys_of(run, "operator"))
    before = run.status()
    for step in (authority.new_authority, lambda: renew_all(authority), authority.retire_old):
        n_before = renewals(run)[0]
        step()
        run.wait_for_version(run.version() + 2)
        until(lambda n=n_before: is_attached_again(run, n), "a slave that attaches with its new keys")  # type: ignore[misc]
    after = run.status()
    assert [(c.cluster_id, c.incarnation) for c in after.clusters] == [
        (c.cluster_id, c.incarnation) for c in before.clusters
    ]
    assert after.epoch == before.epoch
    assert "does not trust" not in run.log("s0") + log_of_master(run)
    with pytest.raises(grpc.RpcError):
        status_with(run, old)
    with OperatorClient(run.address, security=load_identity(keys_of(run, "operator"))) as operator:
        assert operator.status().run_id == "test"


def renewals(run: WholeRun) -> tuple[int, int]:
    """How often the slave ended its stream because its keys were renewed, and how often it attached."""
    log = (run.directory / "s0.log").read_text()
    return log.count(RENEWED), log.count("attached to the master")


def is_attached_again(run: WholeRun, n_renewals: int) -> bool:
    """After more renewals than these. On its way it would take the keys of the next step with those of this one."""
    ended, attached = renewals(run)
    return ended > n_renewals and attached == ended + 1


def renew_all(authority: Authority) -> None:
    for name in authority.names():
        authority.renew(name, new_key=True)


def test_a_revoked_slave_ends_with_the_reason(run: WholeRun) -> None:
    """The last test of this run: without its slave it publishes no more."""
    Authority(keys_of(run, ".")).revoke("s0", "the host is gone")
    sentence = "was revoked (the host is gone): ask the operator for new keys"
    until(lambda: sentence in run.log("s0").splitlines()[-1], "the slave's last words")
    assert run.processes["s0"].wait() == Refused(RefusalCode.IDENTITY, "").exit_code
    assert "slave s0: its certificate was revoked (the host is gone)" in log_of_master(run)
