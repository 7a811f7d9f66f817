"""A person's own loop as two clusters of a run that `dips up` starts, on real processes, to its end."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from safetensors.numpy import load_file
from support.dips_command import ROOT, dips, dips_started, ended, master_file, pid_of, started, until

OWN_LOOP = ROOT / "examples" / "own_loop.py"

RUN = """
[run]
id = "mine"
directory = "{directory}"
slaves = 1
evaluate = false
keys_for = ["a", "b"]

[slave]
memory_bytes = "64 MiB"

[master]
sync_every = 8
min_clusters = 2
tk_max = "80k"
"""


def test_own_loop_as_two_clusters_while_master_and_slave_get_sigterm(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN.format(directory=tmp_path / "run"))
    own_loop = tmp_path / "own_loop.py"  # its own 200 steps may be over on a fast machine before the master is back
    own_loop.write_text(OWN_LOOP.read_text().replace("steps=200", "steps=100_000"))
    assert "steps=100_000" in own_loop.read_text()
    log, run_dir = tmp_path / "up.log", tmp_path / "run"
    logs = {name: tmp_path / f"{name}.log" for name in "ab"}
    with dips_started("up", file, log=log) as up:
        until(lambda: "address" in master_file(run_dir), "the master's address", log=log)
        there = {"DIPS_MASTER": master_file(run_dir)["address"]}
        of = {name: {**there, "DIPS_CLUSTER": name, "DIPS_KEYS": str(run_dir / "keys" / name)} for name in "ab"}
        with (
            started(sys.executable, own_loop, log=logs["a"], cwd=tmp_path, **of["a"]) as a,
            started(sys.executable, own_loop, log=logs["b"], cwd=tmp_path, **of["b"]) as b,
        ):
            until(lambda: "version 1:" in logs["a"].read_text(), "a version", log=logs["a"])
            for name in ("s0", "master"):  # not sent by their supervisor: it starts them again
                os.kill(pid_of(run_dir, name), signal.SIGTERM)
            assert ended(a, 100, logs["a"]) == 0
            assert ended(b, 100, logs["b"]) == 0
        assert ended(up, 60, log) == 0, log.read_text()
    assert log.read_text().count("was ended by SIGTERM (exit code 143), is started again") == 2
    for name in "ab":
        assert "the run has ended" in logs[name].read_text()
        assert "version 1:" in logs[name].read_text()
    assert "DIPS_CLUSTER=a DIPS_KEYS=" in log.read_text()
    told = dips("export", run_dir, "--to", tmp_path / "m.safetensors", "--json")
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["tokens"] >= 80_000
    assert load_file(tmp_path / "m.safetensors")["embedding.weight"].shape == (256, 64)
