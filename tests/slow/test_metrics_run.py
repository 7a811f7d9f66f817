"""Real processes that are scraped: every metric of every role's list is there, and what a run drives changes."""

from __future__ import annotations

import json
import math
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.waiting import NO_LIMIT_S, until
from support.whole_run import LEASED, NumpyCluster, WholeRun

from dips.core.net.security import INSECURE
from dips.core.observe.metrics import Spec
from dips.local.operator_client import OperatorClient
from dips.master import metrics as master
from dips.slave import metrics as slave
from dips.worker import metrics as worker

ABSENT = {
    "dips_master_certificate_expires_seconds",
    "dips_slave_certificate_expires_seconds",
    "dips_worker_certificate_expires_seconds",  # no keys
    "dips_worker_checkpoint_age_seconds",
    "dips_worker_checkpoint_seconds",  # no checkpoints
    "dips_master_cluster_score",  # after warm_up_pushes alone
    "dips_worker_link_refusals_total",
    "dips_master_refused_calls_total",
    "dips_worker_refused_calls_total",
    "dips_slave_refused_messages_total",  # a run without refusals is possible
    "dips_master_push_landed_bytes",  # while a push is open
    "dips_worker_rank_bytes_total",
    "dips_worker_rank_transfer_seconds",  # of clusters of several ranks
}
"""What need not have a series in this run; the families are there all the same."""

DRIVEN = {
    "master": (
        *("version", "tokens_applied_total", "rounds_total", "verdicts_total", "round_seconds", "round_phase_seconds"),
        "cluster_tokens_applied_total",
        *("calls_total", "journal_append_seconds", "journal_entries_total", "pulls_total", "push_attempts_total"),
        *("data_tokens", "departures_total"),
    ),
    "slave": (
        *("version", "staged_bytes_total", "cluster_staged_bytes_total", "served_bytes_total", "staged_pushes_total"),
        *("job_seconds", "snapshot_seconds", "update_seconds"),
    ),
    "cluster": (*("transfers_total", "transfer_seconds", "link_bytes_total", "calls_total", "waited_seconds_total"),),
}
"""By role, what has to be another number after some rounds and the eviction of a cluster."""

LISTS: dict[str, tuple[str, tuple[Spec, ...]]] = {
    "master": (master.PREFIX, master.METRICS),
    "slave": (slave.PREFIX, slave.METRICS),
    "cluster": (worker.PREFIX, worker.METRICS),
}

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Scrape:
    """What one target answered: families by name with their type, and all series."""

    def __init__(self, file: Path) -> None:
        (target,) = json.loads(file.read_text())
        self.role = target["labels"]["role"]
        with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics", timeout=NO_LIMIT_S) as answer:
            text = answer.read().decode()
        self.types: dict[str, str] = {}
        self.series: Series = {}
        for family in text_string_to_metric_families(text):
            name = family.name + ("_total" if family.type == "counter" else "")
            self.types[name] = family.type
            for sample in family.samples:
                self.series[sample.name, tuple(sorted(sample.labels.items()))] = sample.value

    def of(self, name: str) -> Series:
        """The series of a family: of a histogram its counts."""
        return {key: value for key, value in self.series.items() if key[0] in (name, f"{name}_count")}


class Run:
    def __init__(self, whole: WholeRun, a: NumpyCluster, b: NumpyCluster) -> None:
        self.whole, self.a, self.b = whole, a, b
        folder = whole.directory
        self.files = {
            "master": folder / "master" / "metrics.json",
            "slave": folder / "s0" / "metrics.json",
            "cluster": folder / "a.metrics.json",
        }

    def scrape(self) -> dict[str, Scrape]:
        return {role: Scrape(file) for role, file in self.files.items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A master, two slaves and the clusters a and b, all of which serve metrics."""
    folder = tmp_path_factory.mktemp("metrics") / "run"
    whole = WholeRun(folder, plan=LEASED, metrics_listen="127.0.0.1:0")
    whole.slave["metrics_listen"] = "127.0.0.1:0"
    with whole:
        clusters = []
        for seed, name in enumerate("ab"):
            listen = {"metrics_listen": "127.0.0.1:0", "metrics_file": folder / f"{name}.metrics.json"}
            whole.client = listen
            clusters.append(whole.cluster(name, seed, step_s=0.01))
        yield Run(whole, *clusters)
        for cluster in clusters:
            cluster.driver.request_stop("enough")
            cluster.join()


def test_every_metric_is_there_and_what_the_run_drives_changes(run: Run) -> None:
    run.whole.wait_for_version(2)
    before = run.scrape()
    assert [scrape.role for scrape in before.values()] == list(before)
    with OperatorClient(run.whole.address, security=INSECURE) as operator:
        operator.evict("b", "a test")
    wait_until_none(lambda: lacking(run.scrape()), "these have no value")
    wait_until_none(lambda: standing_still(before, run.scrape()), "these do not change")
    after = run.scrape()
    for role, (prefix, specs) in LISTS.items():
        for spec in specs:
            _check(after[role], prefix + spec.name, spec)
    departures = {key[1]: value for key, value in after["master"].of("dips_master_departures_total").items() if value}
    assert departures == {(("cluster", "b"), ("how", "evict")): 1.0}
    assert "process_resident_memory_bytes" in after["slave"].types


def wait_until_none(left: Callable[[], list[str]], what: str) -> None:
    until(lambda: not left(), what, lambda: ", ".join(left()))


def lacking(now: dict[str, Scrape]) -> list[str]:
    """Metrics that have no series yet, though this run has to give them one."""
    names = [(role, prefix + spec.name) for role, (prefix, specs) in LISTS.items() for spec in specs]
    return [name for role, name in names if name not in ABSENT and not now[role].of(name)]


def standing_still(before: dict[str, Scrape], now: dict[str, Scrape]) -> list[str]:
    """Driven metrics that are what they were."""
    names = [(role, LISTS[role][0] + name) for role, driven in DRIVEN.items() for name in driven]
    return [name for role, name in names if before[role].of(name) == now[role].of(name)]


def _check(scrape: Scrape, name: str, spec: Spec) -> None:
    assert scrape.types.get(name) == spec.kind, name
    for (_, labels), value in scrape.of(name).items():
        assert {label for label, _ in labels} == set(spec.labels), name
        assert math.isfinite(value), name


def test_no_label_holds_anything_but_names_of_the_run_and_fixed_words(run: Run) -> None:
    run.whole.wait_for_version(1)
    names = {"a", "b", "s0", "s1", "test", "none"}  # none: an alarm that is about the run
    for scrape in run.scrape().values():
        for (name, _), labels in ((key, dict(key[1])) for key in scrape.series if key[0].startswith("dips_")):
            assert {labels.get("cluster", "a"), labels.get("slave", "s0"), labels.get("run", "test")} <= names, name
