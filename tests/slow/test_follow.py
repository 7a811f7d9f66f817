"""A run's newest version in a folder and in a live module, on real processes: whole, to the bit, and few bytes."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.dips_command import dips, ended, started
from support.fork_server import ForkServer
from support.waiting import until
from support.whole_run import NumpyCluster, WholeRun

import dips as library
from dips.core.ids import Version, parse_version
from dips.core.layout import Layout, Parameter, layer_of
from dips.core.net.security import INSECURE
from dips.local.followed_folder import NEWEST
from dips.trainer.evaluate import model_from_flat
from dips.trainer.export import ABOUT
from dips.trainer.sizes import ModelConfig, llama_name
from dips.worker.reader import fetch_version

SIZES = ModelConfig(32, 2, 64)
LAYOUT = Layout(
    tuple(Parameter(name, shape, "float32", layer_of(name)) for name, shape in SIZES.parameter_shapes.items()), 4096
)
"""The byte model of `dips train`, so that a folder for from_pretrained can be written."""


def served_bytes(run: WholeRun) -> int:
    return sum(slave.served_bytes for slave in run.status().slaves)


def paused(run: WholeRun, least: Version | None = None) -> Version:
    """The version at which the run stands still, once nobody pulls it."""

    def is_there() -> bool:
        published = run.status().published
        return least is None or (published is not None and published >= least)

    until(is_there, f"version {least}", lambda: run.log("master"))
    with run.operator() as operator:
        operator.pause("the test counts bytes")
    seen: list[tuple[object, int]] = []

    def is_still() -> bool:
        seen.append((run.status().published, served_bytes(run)))
        return len(seen) > 100 and len(set(seen[-100:])) == 1

    until(is_still, "nothing moves", lambda: f"{seen[-3:]}")
    version = run.status().published
    assert version is not None
    return version


def resumed(run: WholeRun) -> None:
    with run.operator() as operator:
        operator.resume("the test has counted")


def flat_of(model: object) -> bytes:
    tensors = dict(model.named_parameters())  # type: ignore[attr-defined]
    return b"".join(tensors[span.parameter.name].detach().numpy().tobytes() for span in LAYOUT.spans)


@pytest.mark.parametrize(("pull_wire", "round_bytes"), [("float32", 115_328), ("int8", 30_636), ("int4", 16_220)])
def test_a_round_costs_a_reader_its_differences(
    pull_wire: str, round_bytes: int, server: ForkServer, tmp_path: Path
) -> None:
    """Of a model of 28,832 parameters, as the slaves count what they send; the numbers are in docs/integrations.md."""
    with WholeRun(tmp_path, server=server, pull_wire=pull_wire) as run:
        cluster = run.cluster("a", 1, step_s=0.2, layout=LAYOUT)
        first = paused(run, Version(1, 1))
        base = fetch_version(run.address, None, "test", INSECURE, version=first)
        resumed(run)
        second = paused(run, first.next())
        behind, before = second.v - first.v, served_bytes(run)
        fetched = fetch_version(run.address, None, "test", INSECURE, version=second, base=base)
        expected = min(round_bytes * behind, LAYOUT.n_bytes) if behind <= 2 else LAYOUT.n_bytes
        until(lambda: served_bytes(run) >= before + expected, "the slaves count it")
        assert served_bytes(run) == before + expected, f"{behind} versions"
        assert fetched.flat.tobytes() in {each.tobytes() for each in cluster.model.installed}
        of_another = replace(base, flat=base.flat + 1)
        again = fetch_version(run.address, None, "test", INSECURE, version=second, base=of_another)
        assert again.flat.tobytes() == fetched.flat.tobytes(), "its differences lead to something else, which is seen"

        module = model_from_flat(LAYOUT, np.zeros(LAYOUT.n_elems, np.float32))
        with library.Follow(module, master=run.address, insecure=True) as follow:
            assert (follow.version, flat_of(module)) == (second, fetched.flat.tobytes())
            assert not follow.update(), "there is no newer one"
            resumed(run)
            until(follow.update, "the next version")
            run.stop(cluster)
            until(lambda: follow.update() or follow.ended, "the end")
            until(lambda: follow.update() or follow.ended, "the end, with nothing left to install")
            assert follow.ended
        assert flat_of(module) == cluster.model.theta.tobytes()


def whole(folder: Path) -> tuple[Version, bytes]:
    """The version in an exported folder, and its parameters."""
    tensors = load_file(folder / "model.safetensors")
    assert (folder / "config.json").exists()
    version = parse_version(json.loads((folder / ABOUT).read_text())["version"])
    return version, b"".join(tensors[llama_name(span.parameter.name)].tobytes() for span in LAYOUT.spans)


@contextmanager
def watched(newest: Path, seen: dict[Version, bytes]) -> Iterator[None]:
    """Meanwhile a reader opens what `newest` leads to, again and again."""
    over, wrong = threading.Event(), list[BaseException]()

    def look() -> None:
        try:
            while not over.wait(0.01):
                if newest.exists():
                    version, flat = whole(newest.resolve())
                    assert seen.setdefault(version, flat) == flat
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert wrong == []


def test_a_folder_follows_through_kills_of_every_process_and_is_whole_at_every_moment(
    server: ForkServer, tmp_path: Path
) -> None:
    to, seen = tmp_path / "to", dict[Version, bytes]()
    command = (sys.executable, "-m", "dips.cli", "follow")

    def in_place() -> Version:
        return whole(to / NEWEST)[0]

    def grown(cluster: NumpyCluster) -> None:
        now = in_place()
        until(lambda: in_place() > now, "a newer version in the folder", tmp_path / "first.log")

    with WholeRun(tmp_path / "run", server=server, pull_wire="int4") as run:
        arguments = (*command, run.address, "--insecure", "--to", to, "--keep", 20)
        cluster = run.cluster("a", 1, step_s=0.2, layout=LAYOUT)
        with watched(to / NEWEST, seen):
            with started(*arguments, log=tmp_path / "first.log") as first:
                until((to / NEWEST).exists, "a first version", tmp_path / "first.log")
                grown(cluster)
                second = dips("follow", run.address, "--insecure", "--to", to)
                assert (second.returncode, "follows a run in" in second.stderr) == (2, True), second.stderr
                run.kill("master")
                run.start_master()
                run.kill("s1")
                run.start_slave("s1")
                grown(cluster)
                version = paused(run)
                until(lambda: in_place() == version, "the newest version", tmp_path / "first.log")
                first.kill()
                first.wait()
            arguments = (*command, run.address, "--insecure", "--to", to, "--keep", 20)
            with started(*arguments, log=tmp_path / "next.log") as following:
                log = tmp_path / "next.log"
                resumed(run)
                grown(cluster)
                following.send_signal(signal.SIGINT)
                assert ended(following, log) == 130
            with started(*arguments, log=tmp_path / "last.log") as last:
                grown(cluster)
                run.stop(cluster)
                assert ended(last, tmp_path / "last.log") == 0
        version, flat = whole(to / NEWEST)
        assert flat == cluster.model.theta.tobytes(), "the last version"
        published = {each.tobytes() for each in cluster.model.installed}
        assert {*seen.values()} <= published
        assert version in seen
        assert "differences to version" in (tmp_path / "first.log").read_text()
        other = dips("follow", run.address, "--insecure", "--to", tmp_path, "--once")
        assert (other.returncode, "holds something else" in other.stderr) == (2, True), other.stderr
