"""Where a role's settings come from when it is started by its command."""

from __future__ import annotations

from pathlib import Path

import pytest

from dips.core.errors import ConfigError
from dips.local.options import role_settings
from dips.slave.config import SlaveConfig
from dips.worker.config import ClientConfig

GIVEN = {"run_id": "mine", "slave_id": "s0", "directory": "/x"}


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DIPS_MASTER", "DIPS_RUN", "DIPS_CLUSTER", "DIPS_KEYS", "DIPS_INSECURE"):
        monkeypatch.delenv(name, raising=False)


def test_the_short_variables_say_where_and_who(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("DIPS_MASTER", "127.0.0.1:5"), ("DIPS_RUN", "mine"), ("DIPS_CLUSTER", "a")):
        monkeypatch.setenv(name, value)
    client = role_settings(ClientConfig, "worker", None, {}).value
    assert (client.master, client.run_id, client.cluster_id) == ("127.0.0.1:5", "mine", "a")
    monkeypatch.setenv("DIPS_KEYS", "keys/a")
    assert role_settings(ClientConfig, "worker", None, {}).value.keys == Path("keys/a").absolute()
    monkeypatch.setenv("DIPS_INSECURE", "1")
    with pytest.raises(ConfigError, match="both given"):
        role_settings(ClientConfig, "worker", None, {})


def test_the_command_line_wins_over_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert role_settings(SlaveConfig, "slave", None, GIVEN).provenance["master"] == "default"
    monkeypatch.setenv("DIPS_MASTER", "127.0.0.1:5")
    monkeypatch.setenv("DIPS_SLAVE_SNAPSHOTS_KEPT", "5")
    file = tmp_path / "slave.toml"
    file.write_text('[slave]\nmaster = "127.0.0.1:6"\nsnapshots_kept = 6\ndata_port = 6\nmemory_bytes = "6 MB"\n')
    loaded = role_settings(SlaveConfig, "slave", file, {**GIVEN, "master": "127.0.0.1:4", "data_port": "4"})
    slave = loaded.value
    assert (slave.master, slave.data_port, slave.snapshots_kept) == ("127.0.0.1:4", 4, 5)
    assert slave.memory_bytes == 6_000_000
    assert "snapshots_kept  = 5  (environment DIPS_SLAVE_SNAPSHOTS_KEPT)" in loaded.describe()
