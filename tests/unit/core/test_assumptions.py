"""Every inequality between settings is checked where its row says, and refused with cause and remedy."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dips.core.assumptions import ROLES, Assumption, violations
from dips.core.config import Knobs, load
from dips.core.errors import ConfigError
from dips.master.config import MasterConfig
from dips.slave.config import SlaveConfig
from dips.worker.config import ClientConfig

CONFIGS: Mapping[str, tuple[type[Knobs], dict[str, object]]] = {
    "master": (MasterConfig, {"run_id": "demo", "directory": "d"}),
    "slave": (SlaveConfig, {"run_id": "demo", "slave_id": "s0", "directory": "d"}),
    "worker": (ClientConfig, {}),
}

WRONG: Mapping[str, dict[str, object]] = {
    "beats": {"heartbeat_s": 0}, "eviction": {"evict_after_beats": 2}, "round-step": {"round_timeout_s": 3.9},
    "grace-in-round": {"grace_s": 30, "verdict_wait_s": 31}, "verdict-wait": {"verdict_wait_s": 5, "grace_s": 5},
    "ticket": {"ticket_ttl_s": 9.9}, "lease": {"lease_ttl_s": 60, "ticket_ttl_s": 60}, "linger": {"linger_s": 1.9},
    "smallest-chunk": {"chunk_bytes": 4092}, "largest-chunk": {"chunk_bytes": (64 << 20) + 4, "window_chunks": 1},
    "window": {"chunk_bytes": 64 << 20, "window_chunks": 17}, "smallest-message": {"max_message_bytes": (1 << 20) - 1},
    "largest-message": {"max_message_bytes": (1 << 30) + 1}, "enough-clusters": {"min_clusters": 9},
    "enough-for-each-round": {"min_clusters_per_round": 9, "round_deadline_s": 60},
    "deadline-after-grace": {"min_clusters_per_round": 2, "round_deadline_s": 5, "grace_s": 5},
    "async-lag": {"async_lag_versions": 0}, "journal": {"journal_records": 15},
    "archive": {"archive_bytes": (4 << 20) - 1}, "snapshots": {"snapshots_kept": 1},
    "data-frame": {"max_chunk_bytes": 1023}, "largest-data-frame": {"max_chunk_bytes": (64 << 20) + 1},
    "silence": {"data_silence_s": 30, "data_stall_s": 30}, "leaving-call": {"call_deadline_s": 31, "leave_wait_s": 30},
    "leaving-retry": {"retry_max_s": 31, "leave_wait_s": 30},
}  # fmt: skip
"""For each row the least that breaks it, beside the defaults; of a cluster's times, none is set by default."""

ROWS = [(role, row) for role, rows in ROLES.items() for row in rows]
each_row = pytest.mark.parametrize(("role", "row"), ROWS, ids=[row.name for _, row in ROWS])


def configured(role: str, knobs: Mapping[str, object]) -> Knobs:
    kind, needed = CONFIGS[role]
    return load(kind, role, environment={}, overrides={**needed, **knobs}).value


@each_row
def test_a_violation_is_refused_by_the_settings_with_cause_and_remedy(role: str, row: Assumption) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(role, WRONG[row.name])
    sentence = str(caught.value)
    assert f"{row.text.partition(' <')[0].partition(' >')[0]} is " in sentence
    assert row.harm in sentence
    assert row.remedy in sentence


def test_a_row_over_a_setting_that_is_a_word_does_not_apply() -> None:
    row = next(row for _, row in ROWS if row.name == "grace-in-round")
    assert row.broken({"grace_s": "auto", "round_timeout_s": 1.0}) is None
    assert row.broken({"grace_s": 1.0, "round_timeout_s": 1.0}) is not None


def test_all_that_is_wrong_is_named_at_once() -> None:
    values = configured("slave", {}).model_dump() | {"snapshots_kept": 1, "max_chunk_bytes": 1}
    assert [said.partition(",")[0] for said in violations("slave", values)] == [
        "snapshots_kept is 1", "max_chunk_bytes is 1 B",
    ]  # fmt: skip
    assert not violations("slave", configured("slave", {}).model_dump())


@pytest.mark.parametrize(("text", "a_s"), [
    ("a_s > 2 * b_s + 1", 5.1), ("a_s - b_s < 3", 4.9), ("a_s <= b_s", 2.0), ("b_s >= a_s", 2.0),
])  # fmt: skip
def test_only_what_does_not_hold_is_said(text: str, a_s: float) -> None:
    row = Assumption("x", text, "why", "it breaks", "raise it")
    assert str(row.broken({"a_s": 5.0, "b_s": 2.0})).endswith(": it breaks; raise it")
    assert row.broken({"a_s": a_s, "b_s": 2.0}) is None
