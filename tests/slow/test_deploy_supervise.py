"""`dips deploy supervise` with a real master and real slaves; the pods alone are a stand-in of the API server's."""

from __future__ import annotations

import signal
from datetime import UTC, datetime
from pathlib import Path

from support.api_stand_in import StandIn, write_kubeconfig
from support.dips_command import dips
from support.waiting import until
from support.whole_run import WholeRun

from dips.local.authority import ensure_keys

LONG_READY = datetime(2026, 1, 1, tzinfo=UTC).isoformat()


def pod(name: str) -> dict[str, object]:
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": LONG_READY}
    return {"kind": "Pod", "metadata": {"name": name, "uid": f"uid-{name}"}, "status": {"conditions": [ready]}}


def test_a_slave_that_hangs_while_its_pod_is_ready_is_ended(tmp_path: Path) -> None:
    ensure_keys(tmp_path / "keys", [], ["s0", "s1", "supervisor"], ["operator"])
    with StandIn() as here, WholeRun(tmp_path / "run", n_slaves=2, keys=tmp_path / "keys") as whole:
        write_kubeconfig(tmp_path / "kubeconfig", {"here": here.url})
        run_id = whole.status().run_id
        names = [f"{run_id}-slave-{index}" for index in range(2)]
        here.objects.update({("dips", "Pod", name): pod(name) for name in names})
        until(lambda: sum(slave.alive for slave in whole.status().slaves) == 2, "both slaves")
        config = str(tmp_path / "kubeconfig")
        watch = ["deploy", "supervise", "--master", whole.address, "--keys", str(tmp_path / "keys" / "supervisor")]
        watch += ["--run-id", run_id, "--namespace", "dips", "--slaves", "2", "--context", "here"]
        watch += ["--gone", "200 ms", "--every", "300 ms", "--looks", "3"]
        assert dips(*watch, KUBECONFIG=config).returncode == 0
        assert here.of_kind("Pod") == names
        whole.processes["s1"].send_signal(signal.SIGSTOP)
        try:
            until(lambda: sum(slave.alive for slave in whole.status().slaves) == 1, "the master misses s1")
            done = dips(*watch, KUBECONFIG=config)
        finally:
            whole.processes["s1"].send_signal(signal.SIGCONT)
        assert here.of_kind("Pod") == names[:1]
        assert {call for call in here.calls if call[0] != "GET"} == {("DELETE", "Pod")}
    assert done.returncode == 0, done.stderr
    assert f"slave s1: pod {names[1]} is ended: its pod has been ready for" in done.stderr
