"""Every failpoint of a slave's disk is reached, and an error there is a refusal and no crash."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.slave_bench import prepare
from support.slave_values import snapshot

from dips.core.errors import DipsError
from dips.core.ids import RoundId, Version
from dips.core.observe import failpoints
from dips.core.observe.failpoints import SLAVE, expand
from dips.slave import data_server
from dips.slave.push_evidence import PushEvidence
from dips.slave.ring import SnapshotStore

N = 40
NAMES = [name for pattern in SLAVE for name in expand(pattern)]
OF_THE_DISK = [name for name in NAMES if name.split(".")[1] not in ("link", "data")]


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.clear()


def live(directory: Path, first: int = 0) -> None:
    """A store that is made, promises, keeps evidence, and goes once around its ring, from this version on."""
    with contextlib.closing(SnapshotStore(directory, "run", "s0", 2)) as store:
        store.scan()
        store.promise.save(store.promise.epoch + 1)
        store.ring.make(N)
        rows = np.zeros((1, N), np.float32)
        for v in range(first, first + 4):
            what = snapshot(Version(1, v), RoundId(1, v + 1), committed=False)
            body = prepare(what.round, what.version, None)
            PushEvidence(directory, "run", "s0").write(body, what, [rows[0]], 1024)
            store.ring.write_shadow(what, rows[0] + v, rows[0])
            store.ring.tidy(store.ring.commit(what, b"h", b"{}"))


def newest(directory: Path) -> int:
    with contextlib.closing(SnapshotStore(directory, "run", "s0", 2)) as store:
        assert store.scan() == []
        return store.ring.infos()[0].version.v


def test_every_failpoint_of_the_disk_is_reached(tmp_path: Path) -> None:
    with failpoints.armed(";".join(f"{name}=off" for name in OF_THE_DISK)):
        live(tmp_path)
        assert {name for name, count in failpoints.hits().items() if count} == set(OF_THE_DISK)


@pytest.mark.parametrize("name", OF_THE_DISK)
@pytest.mark.parametrize("turns", ["", "3*off->"])
def test_an_error_there_is_said_and_what_was_durable_stays(tmp_path: Path, name: str, turns: str) -> None:
    with failpoints.armed(f"{name}={turns}1*error"):
        with contextlib.suppress(DipsError, OSError):
            live(tmp_path)
    live(tmp_path, first=4)
    assert newest(tmp_path) == 7


def test_an_answer_of_one_frame_can_be_garbled_too() -> None:
    with failpoints.armed("slave.data.before_answer=corrupt"):
        assert data_server._through_failpoint([b"ack"]) == [[b"acj"]]
