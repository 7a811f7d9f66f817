"""Every panel, every rule and every alarm has data of a real run that a real Prometheus scrapes.

The run is a small one with keys, on which all that the dashboards are for happens (support/watched_run.py). One slave
and one cluster are scraped as the Prometheus operator would, by the monitors of `dips deploy`. What must hold: each
expression of each panel and rule had data at some moment; the alarms of what was done to the run were true, and the
metrics of what was done have changed. `make dashboards-test` prints the numbers.
"""

from __future__ import annotations

import functools
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.dashboards import DASHBOARDS, filled, panel_expressions, panels, rules, selectors
from support.deploy_files import written
from support.operator_targets import Object, live_job
from support.prometheus_server import WHY_NOT, Prometheus, is_installed
from support.watched_run import RUN, WatchedRun, targets_of

from dips.deploy.deploy_file import read_deploy_file
from dips.deploy.rollout import stages

pytestmark = [
    pytest.mark.skipif(not is_installed(), reason=WHY_NOT),
]

MONITORED = ("s1", "a")
"""Scraped by a ServiceMonitor in TLS, and by a PodMonitor in the clear."""

CUT_S = 4.0
"""Longer than it takes to be evicted (2.5 s): whoever was cut off is refused at first when it is back."""

RATE_INTERVAL = "10s"

DRIVEN_ALARMS = (
    *("DipsMasterDown", "DipsTargetDown", "DipsRunPaused", "DipsRolledBack", "DipsMasterAlarm", "DipsSlaveAway"),
    *("DipsClusterAway", "DipsCallsRefused", "DipsPushesExcluded", "DipsClusterQuarantined", "DipsDirection"),
)
"""Alarms whose condition the story brings about. How long it must last before one rings is promtool's to test, and
DipsLinkSlow, whose condition is of ten minutes."""

DRIVEN_CHANGES = (
    "dips_master_epoch",
    "dips_master_timeline",
    "dips_master_version",
    "dips_master_paused",
    'dips_master_slave_up{slave="s0"}',
    'dips_master_cluster_up{cluster="b"}',
    'dips_master_cluster_quarantined{cluster="c"}',
    'dips_master_cluster_direction_alarm{cluster="c"}',
    'sum(dips_master_verdicts_total{cluster="c", verdict="excluded"})',
    "dips_master_alarms_total",
    'sum(dips_master_rounds_total{result="commit"})',
    'sum(dips_master_departures_total{cluster="b", how="evict"})',
    'sum(dips_master_refused_calls_total{code="IDENTITY"})',
    'sum(dips_worker_calls_total{result="failed"})',
    'sum(dips_worker_link_reconnects_total{slave="s1"})',
    "dips_worker_heldout_loss",
    'up{name="b"}',
)
"""What must have taken two values, or appeared: the fault, the exclusion and the cut that were made are seen."""

OF_FAULTS_ALONE = re.compile(r'code=~?"[^"]*"(?:, method="[^"]*")?')
"""A matcher of refusals that a good run never has; whether such a series would be seen is promtool's to test."""


@dataclass
class Watched:
    """What a run left in Prometheus. laps: (seconds since the start, what had happened)."""

    prometheus: Prometheus
    begun_s: float
    ended_s: float
    calm_ended_s: float
    slow_begun_s: float
    slow_ended_s: float
    laps: list[tuple[float, str]]


def fastest_pushes(prometheus: Prometheus, begin_s: float, end_s: float) -> list[float]:
    """The fastest push over the link that becomes slow, second by second."""
    rate = 'max(dips_worker_link_bytes_per_second{slave="s1", direction="push"})'
    (series,) = prometheus.range(rate, begin_s, end_s, 1.0)
    return [float(value) for _, value in series["values"]]


def is_slow(prometheus: Prometheus, begun_s: float, slow_begun_s: float) -> bool:
    """Whether all clusters' pushes are; a cluster shows its last push until it makes another."""
    return (
        fastest_pushes(prometheus, slow_begun_s, time.time())[-1]
        < max(fastest_pushes(prometheus, begun_s, slow_begun_s)) / 4
    )


def has_changed(prometheus: Prometheus, expr: str, begun_s: float) -> bool:
    series = prometheus.range(expr, begun_s, time.time(), 1.0)
    return any(len({value for _, value in one["values"]}) > 1 for one in series)


def jobs_of_monitors(run: WatchedRun, folder: Path) -> list[Object]:
    deployment = read_deploy_file(written(folder, changes={'"small"': f'"{RUN}"'}))
    objects = [one for stage in stages(deployment) for one in stage.objects]
    slave, cluster = MONITORED
    return [
        live_job(objects, "ServiceMonitor", slave, run.metrics[slave]),
        live_job(objects, "PodMonitor", cluster, run.metrics[cluster], in_clear=True),
    ]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    begun_s, laps = time.time(), []
    run = WatchedRun(folder / "run")

    def lap(what: str, happen: Callable[[], object]) -> float:
        happen()
        laps.append((time.time() - begun_s, what))
        return time.time()

    with run:
        plain, tls = ([one for one in found if one["labels"]["name"] not in MONITORED] for found in targets_of(run))
        keys, jobs = run.folder / "keys" / "prometheus", jobs_of_monitors(run, folder)
        with Prometheus(folder / "prometheus", plain, tls, keys, jobs) as prometheus:
            calm_ended_s = lap("a dozen versions", functools.partial(run.versions, 12))
            # Early: the more a model has learned, the less do good pushes agree, and the later is a wrong one noticed.
            lap("pushes point the wrong way", run.turn)
            lap("pushes are excluded", run.exclude)
            slow_begun_s = lap("a link is slow", functools.partial(run.slow_link, True))
            lap("versions over it", functools.partial(run.versions, 4))
            lap(
                "every cluster has met it",
                lambda: run.until(lambda _: is_slow(prometheus, begun_s, slow_begun_s), "slow"),
            )
            slow_ended_s = lap("it is not any more", functools.partial(run.slow_link, False))
            lap("a cluster is killed and comes back", run.lose_cluster)
            lap("paused and resumed", run.pause)
            lap("a slave is killed and its newest snapshot spoilt", run.lose_slave)
            lap("links are cut", functools.partial(run.cut, CUT_S))
            lap("the master is killed and comes back", run.lose_master)
            lap("versions afterwards", functools.partial(run.versions, 4))
            lap(
                "the new master was scraped",
                lambda: run.until(lambda _: has_changed(prometheus, "dips_master_epoch", begun_s), "a second epoch"),
            )
            yield Watched(prometheus, begun_s, time.time(), calm_ended_s, slow_begun_s, slow_ended_s, laps)
    shutil.rmtree(folder, ignore_errors=True)


def has_data(watched: Watched, expr: str) -> bool:
    return bool(watched.prometheus.range(expr, watched.begun_s, watched.ended_s, 1.0))


def test_everybody_was_scraped_in_the_clear_and_in_tls(watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [one for file in DASHBOARDS for one in panel_expressions(file)]
    shown = sum(len(panels(file)) for file in DASHBOARDS)
    kinds = [bool(rule.alert) for rule in rules()]
    with capsys.disabled():
        print(f"\n  {len(DASHBOARDS)} dashboards with {shown} panels and {len(asked)} expressions; ", end="")
        print(f"{kinds.count(False)} records, {kinds.count(True)} alarms; what happens to the run:")
        for at_s, what in watched.laps:
            print(f"  {at_s:6.1f} s  {what}")
    seen = {(one["labels"]["name"], one["scrapeUrl"].split(":")[0]) for one in watched.prometheus.targets()}
    assert len(seen) == 7
    assert {name for name, scheme in seen if scheme == "https"} == {"s0", "s1"}
    pods = {one["labels"]["name"]: one["labels"].get("pod", "") for one in watched.prometheus.targets()}
    assert {name for name, pod in pods.items() if pod} == set(MONITORED)
    for name, _ in seen:
        assert has_data(watched, f'up{{name="{name}"}} == 1'), f"{name} was never scraped"


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_every_expression_of_a_panel_has_data(file: Path, watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    found = list(panel_expressions(file))
    empty = [str(one) for one in found if not has_data(watched, filled(one.expr, RUN, RATE_INTERVAL))]
    with capsys.disabled():
        print(f"\n  dashboard {file.stem}: {len(panels(file))} panels, {len(found)} expressions, {len(empty)} empty")
    assert not empty


def test_every_rule_works_and_every_record_has_data(watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = {rule["name"]: rule for rule in watched.prometheus.rules()}
    known = rules()
    assert set(loaded) == {str(rule) for rule in known}
    assert not [name for name, rule in loaded.items() if rule["health"] != "ok" or rule.get("lastError")]
    empty = [rule.record for rule in known if rule.record and not has_data(watched, rule.record)]
    with capsys.disabled():
        print(f"\n  {len(known)} rules, {sum(bool(rule.record) for rule in known)} of them records, {len(empty)} empty")
    assert not empty


def test_everything_that_alarms_look_at_has_data(watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    looked_at = {
        (rule.alert, OF_FAULTS_ALONE.sub("", one)) for rule in rules() if rule.alert for one in selectors(rule.expr)
    }
    empty = sorted((alert, one) for alert, one in looked_at if not has_data(watched, one))
    with capsys.disabled():
        print(f"\n  {len({alert for alert, _ in looked_at})} alarms, {len(looked_at)} selectors, {len(empty)} empty")
    assert not empty


def test_alarms_of_what_was_done_are_true_at_some_moment(watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    of = {rule.alert: rule.expr for rule in rules() if rule.alert}
    true = {name for name, expr in of.items() if has_data(watched, expr)}
    with capsys.disabled():
        print(f"\n  {len(true)} alarms whose condition was true: {', '.join(sorted(true))}")
    assert set(DRIVEN_ALARMS) <= true


@pytest.mark.parametrize("expr", DRIVEN_CHANGES)
def test_what_was_done_to_the_run_is_seen_in_its_metrics(expr: str, watched: Watched) -> None:
    series = watched.prometheus.range(expr, watched.begun_s, watched.ended_s, 1.0)
    values = [{value for _, value in one["values"]} for one in series]
    # A counter of one kind of fault may begin with the first of them.
    begins_s = min((one["values"][0][0] for one in series), default=0.0)
    assert any(len(those) > 1 for those in values) or begins_s > watched.calm_ended_s, values


def test_a_slow_link_is_slow_in_its_metrics(watched: Watched) -> None:
    rates = fastest_pushes(watched.prometheus, watched.begun_s, watched.slow_begun_s)
    assert min(fastest_pushes(watched.prometheus, watched.slow_begun_s, watched.slow_ended_s)) < max(rates) / 4


def test_nothing_rings_on_a_good_run(watched: Watched) -> None:
    # Before the first harm; no time has passed then that a departure would have to last.
    calm_s = watched.calm_ended_s
    for name in ("DipsRolledBack", "DipsDirection", "DipsClusterQuarantined", "DipsPushesExcluded", "DipsRunPaused"):
        (expr,) = [rule.expr for rule in rules() if rule.alert == name]
        assert not watched.prometheus.range(expr, watched.begun_s, calm_s, 1.0), name
