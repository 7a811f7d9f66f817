"""A run that has ended can still be exported: from the slaves' snapshots, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dips.cli import main
from dips.core.errors import ConfigError
from dips.core.ids import RoundId, SlaveId, Version
from dips.core.layout import Layout, Parameter
from dips.core.messages import SnapshotInfo
from dips.core.placement import Placement
from dips.local.model_folder import load_stored
from dips.master.state.ledger import Ledger
from dips.slave.ring import SnapshotStore
from dips.slave.snapshot_files import SnapshotManifest, decode, encode
from dips.trainer.export import read_export

SHAPES = {"embedding": (8, 4), "layers.0": (5, 4), "layers.1": (7,)}
PARAMETERS = (Parameter(f"{layer}.weight", shape, "float32", layer) for layer, shape in SHAPES.items())
LAYOUT = Layout(tuple(PARAMETERS), block_elems=10)
PLACEMENT = Placement((SlaveId("s0"), SlaveId("s1")), (0, 1, 0, 1, 0, 1, 0)[: len(LAYOUT.blocks)])


def model(v: int) -> NDArray[np.float32]:
    return np.arange(LAYOUT.n_elems, dtype=np.float32) + 1000 * v


def store(run_dir: Path, v: int, committed: bool = True, slaves: tuple[str, ...] = ("s0", "s1")) -> None:
    """What the slaves write for version 1:v of 100 * v tokens."""
    digests = {slave: f"{v:02x}{i:02x}" for i, slave in enumerate(PLACEMENT.slaves)}
    ledger = Ledger("mine", LAYOUT, slaves={s: 1 << 20 for s in PLACEMENT.slaves}, placement=PLACEMENT, tokens=100 * v)
    record = json.dumps({"digests": digests, "ledger": json.loads(ledger.to_json(with_commit=False))})
    for slave in map(SlaveId, slaves):
        theta = np.concatenate([model(v)[b.start_elem : b.stop_elem] for b in PLACEMENT.blocks_of(slave, LAYOUT)])
        hashes = LAYOUT.layout_hash, PLACEMENT.placement_hash, bytes.fromhex(digests[slave])
        info = SnapshotInfo(Version(1, v), RoundId(1, v + 1), *hashes, committed=False)
        snapshots = SnapshotStore(run_dir / "slaves" / slave, "mine", slave, 9)
        try:
            snapshots.scan()
            snapshots.ring.make(theta.size)
            snapshots.ring.write_shadow(info, theta, np.zeros_like(theta))
            if committed:
                snapshots.ring.commit(info, b"", record.encode())
        finally:
            snapshots.close()


def snapshot_file(run_dir: Path, slave: str, v: int) -> Path:
    """Versions were stored in their order, from 3 on, into the files of the ring one after the other."""
    versions = sorted(manifest_body(path)["version"] for path in (run_dir / "slaves" / slave).glob("manifest-*"))
    return run_dir / "slaves" / slave / f"ring-{versions.index(f'1:{v}')}.safetensors"


def manifest_of(file: Path) -> Path:
    return file.with_name(file.name.replace("ring", "manifest")).with_suffix(".json")


def manifest_body(path: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(path.read_text())["body"]
    return body


def rewrite_manifest(path: Path, change: Callable[[SnapshotManifest], SnapshotManifest]) -> None:
    """Another manifest, whole in itself."""
    path.write_bytes(encode(change(decode(path.read_bytes(), str(path)))))


def test_the_newest_version_of_all_slaves_is_put_together_or_one_that_is_named(tmp_path: Path) -> None:
    store(tmp_path, 3)
    store(tmp_path, 4)
    for asked, v in ((None, 4), (Version(1, 3), 3)):
        stored = load_stored(tmp_path, asked)
        assert (stored.run_id, stored.version, stored.tokens) == ("mine", Version(1, v), 100 * v)
        assert stored.layout == LAYOUT
        np.testing.assert_array_equal(stored.flat, model(v))
    with pytest.raises(ConfigError, match="no snapshot of version 1:9, only of 1:3, 1:4"):
        load_stored(tmp_path, Version(1, 9))
    with pytest.raises(ConfigError, match="has no snapshots of slaves"):
        load_stored(tmp_path / "nowhere")


def test_the_command_exports_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for v in (3, 4):
        store(tmp_path, v)
    file = tmp_path / "m.safetensors"
    assert main.run(["export", str(tmp_path), "--to", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: version 1:4 of run mine, 400 tokens\n"
    assert read_export(file).version == Version(1, 4)
    assert main.run(["export", str(tmp_path), "--to", str(file), "--version", "1:3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "file": str(file), "format": "safetensors", "run_id": "mine", "timeline": 1, "version": 3, "tokens": 300,
        "elements": LAYOUT.n_elems, "filled": 0, "lacking": 0, "not_checked": "",
    }  # fmt: skip


def test_a_version_that_one_slave_lacks_or_that_was_never_committed_is_not_used(tmp_path: Path) -> None:
    store(tmp_path, 3)
    store(tmp_path, 4, slaves=("s0",))
    store(tmp_path, 5, committed=False)
    assert load_stored(tmp_path).version == Version(1, 3)
    with pytest.raises(ConfigError, match="slave s1 has no committed snapshot of it"):
        load_stored(tmp_path, Version(1, 4))


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-60] ^= 1
    file.write_bytes(data)


def of_another_commit(file: Path) -> None:
    rewrite_manifest(manifest_of(file), lambda found: replace(found, info=replace(found.info, digest=b"\xff\xff")))


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (flipped, "not those that were written"),
        (lambda file: file.write_bytes(file.read_bytes()[:-8]), "it is torn"),
        (lambda file: file.unlink(), "No such file"),
        (of_another_commit, "does not hold what the COMMIT record"),
        (lambda file: file.write_bytes(file.with_name("ring-0.safetensors").read_bytes()), "not the file that its"),
    ],
    ids=["flipped", "torn", "missing", "of another commit", "another whole one"],
)
def test_a_snapshot_that_is_not_what_was_committed_is_not_used(
    tmp_path: Path, harm: Callable[[Path], object], says: str
) -> None:
    store(tmp_path, 3)
    store(tmp_path, 4)
    harm(snapshot_file(tmp_path, "s1", 4))
    with pytest.raises(ConfigError, match=says):
        load_stored(tmp_path, Version(1, 4))
    assert load_stored(tmp_path).version == Version(1, 3)


@pytest.mark.parametrize("text", ["", "{}", '{"body": {}}', '{"body": {"commit_record": "{"}}'])
def test_a_file_that_is_no_manifest_is_told(tmp_path: Path, text: str) -> None:
    store(tmp_path, 4)
    (tmp_path / "slaves" / "s0" / "manifest-1.json").write_text(text)
    with pytest.raises(ConfigError, match="is not a manifest of a slave"):
        load_stored(tmp_path)


@pytest.mark.parametrize("change", [{"layout": None}, {"placement": None}, {"tokens": "many"}, {"slaves": 5}])
def test_a_record_that_does_not_say_where_blocks_stand_is_told(tmp_path: Path, change: dict[str, object]) -> None:
    store(tmp_path, 4)
    for slave in PLACEMENT.slaves:
        manifest = manifest_of(snapshot_file(tmp_path, slave, 4))
        record = json.loads(manifest_body(manifest)["commit_record"])
        record["ledger"].update(change)
        rewrite_manifest(manifest, partial(replace, record=json.dumps(record)))
    with pytest.raises(ConfigError, match=r"the COMMIT record next to .* cannot be read"):
        load_stored(tmp_path)
