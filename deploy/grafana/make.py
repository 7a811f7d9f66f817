"""Writes the dashboards: python deploy/grafana/make.py, or --check to see whether the files are current.

Each dashboard answers one question (docs/observe.md); each panel says in its description what is normal, and what a
departure from it means. Expressions name metrics of docs/metrics.md and records of deploy/prometheus/rules alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from panels import BLUE, GREEN, RED, YELLOW, Dashboard, Panel, Query, Row, Variable

FOLDER = Path(__file__).parent / "dashboards"

RUN = Variable("run", "Run", "label_values(dips_master_info, run)")
CLUSTER = Variable("cluster", "Cluster", 'label_values(dips_master_cluster_up{run="$run"}, cluster)')
SLAVE = Variable("slave", "Slave", 'label_values(dips_master_slave_up{run="$run"}, slave)')

R = 'run="$run"'
C = f'{R}, cluster=~"$cluster"'
S = f'{R}, slave=~"$slave"'
CN = f'{R}, name=~"$cluster"'
"""A cluster's own metrics: its name is the target's."""
SN = f'{R}, name=~"$slave"'
RATE = "$__rate_interval"

UP = {0.0: ("away", RED), 1.0: ("here", GREEN)}
NO_YES = {0.0: ("no", GREEN), 1.0: ("yes", RED)}


def rate(metric: str, of: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}{{{of}}}[{RATE}]))"


def share(part: float, metric: str, of: str, by: str) -> str:
    """A quantile of a histogram."""
    return f"histogram_quantile({part}, {rate(f'{metric}_bucket', of, f'{by}, le' if by else 'le')})"


def rises(metric: str, of: str, by: str) -> str:
    """How often something happened lately."""
    return f"sum by ({by}) (increase({metric}{{{of}}}[5m]))"


OVERVIEW = Dashboard(
    "overview",
    "Di-PS overview",
    "Does the run move, how fast, and is anybody missing?",
    [RUN],
    [
        Row("Now", [
            Panel("Version", "The published version. It rises by one a round.",
                  [Query(f"dips_master_version{{{R}}}")], kind="stat", width=3, height=4, decimals=0),
            Panel("Since the last version", "Normal: below three times the usual interval. Yellow from three, red from "
                  "five times on: the alarm DipsNothingPublished.",
                  [Query(f"dips_master_published_age_seconds{{{R}}}")], "s", "stat", 3, 4),
            Panel("As a multiple of usual", "Time since the last version, divided by the usual time between two.",
                  [Query(f"dips:published_age:ratio{{{R}}}")], "none", "gauge", 3, 4, 1, 0, 8,
                  [(None, GREEN), (3, YELLOW), (5, RED)]),
            Panel("Tokens", "Tokens that the newest version was trained on.",
                  [Query(f"dips_master_tokens{{{R}}}")], "short", "stat", 3, 4, 2),
            Panel("Of the run's end", "Tokens, as a share of tk_max; nothing when the run has no end.",
                  [Query(f"dips_master_tokens{{{R}}} / (dips_master_tokens_limit{{{R}}} > 0)")],
                  "percentunit", "stat", 3, 4, 1),
            Panel("Held-out loss", "Nats per byte of the newest version that was evaluated.",
                  [Query(f"dips_worker_heldout_loss{{{R}}}")], "none", "stat", 3, 4, 3),
            Panel("Clusters", "Clusters that take part now, by state. Quarantined: pushes were excluded three times in "
                  "a row.", [Query(f"dips_master_clusters{{{R}}}", "{{state}}")], kind="stat", width=3, height=4),
            Panel("Slaves", "Publishing needs all of them.",
                  [Query(f"dips_master_slaves{{{R}}}", "{{state}}"),
                   Query(f"dips_master_slaves_expected{{{R}}}", "expected")], kind="stat", width=3, height=4),
            Panel("What the run does", "The phase of the round. Not one phase but idle for long; idle for long means "
                  "that no one pushes.", [Query(f"dips_master_round_phase{{{R}}} == 1", "{{phase}}")],
                  "none", "state-timeline", 12, 7, values={1.0: ("now", BLUE)}),
            Panel("What it waits for", "The one thing that the run waits for; `none` while it goes on.",
                  [Query(f"dips_master_waiting{{{R}}} == 1", "{{reason}}")],
                  "none", "state-timeline", 12, 7, values={1.0: ("now", YELLOW)}),
        ]),
        Row("Who is here", [
            Panel("Clusters", "Red: evicted after evict_after_beats missed heartbeats, or left.",
                  [Query(f"dips_master_cluster_up{{{R}}}", "{{cluster}}")], "none", "state-timeline", 8, 7, values=UP),
            Panel("Slaves", "Red: no version is published until it is back.",
                  [Query(f"dips_master_slave_up{{{R}}}", "{{slave}}")], "none", "state-timeline", 8, 7, values=UP),
            Panel("Scraped", "Red: Prometheus does not reach the process's metrics.",
                  [Query(f'up{{job="dips", {R}}}', "{{role}} {{name}}")], "none", "state-timeline", 8, 7, values=UP),
        ]),
        Row("Progress", [
            Panel("Tokens per second", "Applied: tokens that ended in a version. Computed: what live clusters compute. "
                  "The gap is exclusions, waits and losses.",
                  [Query(f"dips:applied_tokens_per_second:rate5m{{{R}}}", "applied"),
                   Query(f"dips_master_tokens_per_second{{{R}}}", "computed")]),
            Panel("Goodput", "Applied over computed. Normal: 0.8 to 1; swings with short runs and after changes of "
                  "speed.", [Query(f"dips:goodput_ratio:rate5m{{{R}}}", "goodput")], "percentunit", least=0),
            Panel("Rounds per minute", "By result. Normal: commit alone. void: no one was accepted. abort: given up, "
                  "and tried again.", [Query(f"dips:rounds_per_minute:rate5m{{{R}}}", "{{result}}")], stacked=True),
            Panel("Loss", "Training loss of each cluster, in nats per token, and the held-out loss in nats per byte.",
                  [Query(f"dips_master_cluster_loss{{{R}}}", "{{cluster}}"),
                   Query(f"dips_worker_heldout_loss{{{R}}}", "held out")], "none", decimals=3),
            Panel("Where a round's time goes", "Mean time of each phase in the last five minutes. window is the grace "
                  "window; prepare and commit are mostly disks.",
                  [Query(f"dips:round_phase_seconds:mean5m{{{R}}}", "{{phase}}")], "s", stacked=True),
            Panel("Time of a round", "From the window's opening to the published version.",
                  [Query(f"dips:round_seconds:mean5m{{{R}}}", "mean"),
                   Query(share(0.9, "dips_master_round_seconds", R, ""), "90 %")], "s"),
        ]),
        Row("What went wrong", [
            Panel("Alarms", "Each has a section of its name in docs/operations.md.",
                  [Query(f'ALERTS{{alertname=~"Dips.*", {R}}}')], kind="table", width=12, height=8),
            Panel("Faults in the last five minutes", "Losses of slaves, evictions, sentences of the master that "
                  "somebody should read, times that it stood still. Normal: nothing.",
                  [Query(rises("dips_master_slave_losses_total", R, "slave"), "lost {{slave}}"),
                   Query(rises("dips_master_departures_total", R, "cluster, how"), "{{how}} {{cluster}}"),
                   Query(rises("dips_master_alarms_total", R, "run"), "alarms"),
                   Query(rises("dips_master_stalls_total", R, "run"), "stalls")], width=12),
            Panel("Lives of the master, and timelines", "The epoch rises at each start of the master; the timeline "
                  "changes when the run went back to an older version.",
                  [Query(f"dips_master_epoch{{{R}}}", "epoch"), Query(f"dips_master_timeline{{{R}}}", "timeline"),
                   Query(f"dips_master_rollbacks_total{{{R}}}", "rollbacks")], decimals=0),
            Panel("Somebody's doing", "Paused, stopping, recovering, resharding.",
                  [Query(f"dips_master_paused{{{R}}}", "paused"), Query(f"dips_master_stopping{{{R}}}", "stopping"),
                   Query(f"dips_master_recovery_active{{{R}}}", "recovery"),
                   Query(f"dips_master_reshard_active{{{R}}}", "reshard")],
                  "none", "state-timeline", values=NO_YES),
            Panel("Certificates", "Days until each process's certificate lapses; alarm DipsCertificateExpires comes "
                  "at 21. Nothing without keys.",
                  [Query(f"dips_master_certificate_expires_seconds{{{R}}} / 86400", "{{name}}"),
                   Query(f"dips_slave_certificate_expires_seconds{{{R}}} / 86400", "{{name}}"),
                   Query(f"dips_worker_certificate_expires_seconds{{{R}}} / 86400", "{{name}}")], "none", "bargauge",
                  decimals=0, least=0, steps=[(None, RED), (21, YELLOW), (60, GREEN)]),
            Panel("Releases", "What runs: all processes should show the same release.",
                  [Query(f"dips_master_info{{{R}}}"), Query(f"dips_slave_info{{{R}}}"),
                   Query(f"dips_worker_info{{{R}}}")], kind="table"),
        ]),
    ],
)  # fmt: skip

CLUSTERS = Dashboard(
    "clusters",
    "Di-PS clusters",
    "Which cluster is slow, away, behind or excluded, and why?",
    [RUN, CLUSTER],
    [
        Row("Members", [
            Panel("Here", "Red: evicted or left.", [Query(f"dips_master_cluster_up{{{C}}}", "{{cluster}}")],
                  "none", "state-timeline", values=UP),
            Panel("What each does", "The phase of the session. Normal: training most of the time.",
                  [Query(f"dips_worker_phase{{{CN}}} == 1", "{{name}} {{phase}}")], "none", "state-timeline",
                  values={1.0: ("now", BLUE)}),
            Panel("Since the last heartbeat", "Normal: below two heartbeats. At the dashed line a cluster is evicted.",
                  [Query(f"dips_master_cluster_beat_age_seconds{{{C}}}", "{{cluster}}"),
                   Query(f"dips_master_evict_after_seconds{{{R}}}", "evicted at"),
                   Query(f"dips_worker_beat_age_seconds{{{CN}}}", "{{name}}'s own view")], "s"),
            Panel("Lives", "Joins of each cluster. A step is a restart or an eviction.",
                  [Query(f"dips_master_cluster_incarnations_total{{{C}}}", "{{cluster}}")], decimals=0),
            Panel("Departures in five minutes", "evict: silent for too long. leave: in order.",
                  [Query(rises("dips_master_departures_total", C, "cluster, how"), "{{cluster}} {{how}}")]),
            Panel("Calls in five minutes", "failed: no one answered. refused: see the next panel.",
                  [Query(rises("dips_worker_calls_total", CN, "name, result"), "{{name}} {{result}}")]),
            Panel("Refused calls in five minutes", "FENCED and STALE_EPOCH after restarts; IDENTITY, LAYOUT and "
                  "DATA_PLAN need somebody.",
                  [Query(rises("dips_worker_refused_calls_total", CN, "name, code"), "{{name}} {{code}}"),
                   Query(rises("dips_master_refused_calls_total", R, "method, code"), "{{method}} {{code}}")]),
            Panel("Ranks", "Processes of a cluster, each of which moves its share. late: a transfer waits for them, "
                  "long after the others are done. Normal: none late.",
                  [Query(f"dips_master_cluster_ranks{{{C}}}", "{{cluster}}"),
                   Query(f"dips_master_cluster_late_ranks{{{C}}}", "{{cluster}} late")], decimals=0),
            Panel("Asked to leave, or judged out", "draining: an operator's word. quarantined: excluded three times "
                  "in a row. direction: it goes against the others.",
                  [Query(f"dips_master_cluster_draining{{{C}}}", "{{cluster}} draining"),
                   Query(f"dips_master_cluster_quarantined{{{C}}}", "{{cluster}} quarantined"),
                   Query(f"dips_master_cluster_direction_alarm{{{C}}}", "{{cluster}} direction")],
                  "none", "state-timeline", values=NO_YES),
        ]),
        Row("Speed", [
            Panel("Computed tokens per second", "Of computing alone. Normal: steady.",
                  [Query(f"dips_master_cluster_tokens_per_second{{{C}}}", "{{cluster}}")], stacked=True),
            Panel("Applied tokens per second", "What ended in a version.",
                  [Query(f"dips:cluster_applied_tokens_per_second:rate5m{{{C}}}", "{{cluster}}")], stacked=True),
            Panel("Time stood still", "Share of the time in which the training loop waited. Normal: below a tenth. "
                  "exchange: for transfers and verdicts. data: for leases.",
                  [Query(f"dips:cluster_waited_ratio:rate5m{{{CN}}}", "{{name}} {{what}}")], "percentunit", least=0),
            Panel("Inner steps between two pushes", "H_j: sync_every, or fitted to the cluster's speed.",
                  [Query(f"dips_master_cluster_local_steps{{{C}}}", "{{cluster}}")], decimals=0),
            Panel("Steps per second", "Over the last 32 steps.",
                  [Query(f"dips_worker_steps_per_second{{{CN}}}", "{{name}}")]),
            Panel("Versions behind", "Normal: 0 to 2. Above the limit a push is refused as stale.",
                  [Query(f"dips_master_cluster_staleness_versions{{{C}}}", "{{cluster}}"),
                   Query(f"dips_master_staleness_limit_versions{{{R}}}", "limit")], decimals=0),
            Panel("Time of the last push and pull", "Normal: below a tenth of a round.",
                  [Query(f"dips_master_cluster_push_seconds{{{C}}}", "{{cluster}} push"),
                   Query(f"dips_master_cluster_pull_seconds{{{C}}}", "{{cluster}} pull")], "s"),
            Panel("Tokens under way", "Trained, and in no version yet; and lent by the master.",
                  [Query(f"dips_worker_pending_tokens{{{CN}}}", "{{name}} trained"),
                   Query(f"dips_master_cluster_leased_tokens{{{C}}}", "{{cluster}} lent")]),
        ]),
        Row("Judgement", [
            Panel("Verdicts per minute", "Normal: applied alone, alike for all clusters of one speed.",
                  [Query(f"60 * {rate('dips_master_verdicts_total', C, 'cluster, verdict')}",
                         "{{cluster}} {{verdict}}")], stacked=True),
            Panel("Reasons in five minutes", "Why pushes were excluded or aborted. score, norm: far from usual. "
                  "not_finite: NaN. slave_lost: sent again.",
                  [Query(rises("dips_master_verdicts_total", f'{C}, verdict!="applied"', "cluster, reason"),
                         "{{cluster}} {{reason}}")]),
            Panel("Excluded", "Share of judged pushes in the last hour. Above 0.2: the alarm DipsPushesExcluded.",
                  [Query(f"dips:cluster_excluded_ratio:1h{{{C}}}", "{{cluster}}")], "percentunit", least=0,
                  steps=[(None, GREEN), (0.2, RED)], lines=True),
            Panel("Norms", "Of the last pseudo-gradient, for an average number of tokens. Normal: within a factor of "
                  "two.",
                  [Query(f"dips_master_cluster_norm{{{C}}}", "{{cluster}}")], "none", log_scale=True),
            Panel("Scores", "z-score of the norm in the cluster's own history. Above tau a push is excluded.",
                  [Query(f"dips_master_cluster_score{{{C}}}", "{{cluster}}"),
                   Query(f"dips_master_threshold{{{R}}}", "tau")], "none"),
            Panel("Directions", "Cosine with the way of the others: the last push, and the median of the last seven. A "
                  "good cluster is above 0.", [Query(f"dips_master_cluster_cosine{{{C}}}", "{{cluster}} last"),
                  Query(f"dips_master_cluster_usual_cosine{{{C}}}", "{{cluster}} usual")], "none", least=-1, most=1),
            Panel("Stale pushes in five minutes", "versions: older than s_max. fence, timeline: the base was replaced.",
                  [Query(rises("dips_worker_stale_pushes_total", CN, "name, kind"), "{{name}} {{kind}}")]),
        ]),
        Row("Machines", [
            Panel("Age of the checkpoint", "What is lost if the cluster dies now, back to its last pull.",
                  [Query(f"dips_worker_checkpoint_age_seconds{{{CN}}}", "{{name}}")], "s"),
            Panel("Time to write a checkpoint", "Beside training.",
                  [Query(share(0.9, "dips_worker_checkpoint_seconds", CN, "name"), "{{name}}")], "s"),
            Panel("Memory of the processes", "Resident bytes; the model and its optimizer are most of it.",
                  [Query(f'process_resident_memory_bytes{{job="dips", {CN}}}', "{{name}}")], "bytes"),
        ]),
    ],
)  # fmt: skip

LINKS = Dashboard(
    "links",
    "Di-PS links",
    "How fast are the links between clusters and slaves, and which of them fails?",
    [RUN, CLUSTER, SLAVE],
    [
        Row("Rates of each link", [
            Panel("Pushes", "Rate of the transfer under way or of the last one, cluster to slave. Normal: near the "
                  "link's own, or a share of it.",
                  [Query(f'dips_worker_link_bytes_per_second{{{CN}, slave=~"$slave", direction="push"}}',
                         "{{name}} → {{slave}}")], "Bps", width=12),
            Panel("Pulls", "The same from slave to cluster.",
                  [Query(f'dips_worker_link_bytes_per_second{{{CN}, slave=~"$slave", direction="pull"}}',
                         "{{name}} ← {{slave}}")], "Bps", width=12),
            Panel("Use", "Bytes over time, pauses included: how much of a link the run takes.",
                  [Query(f'dips:link_bytes_per_second:rate5m{{{CN}, slave=~"$slave"}}',
                         "{{name}} {{slave}} {{direction}}")], "Bps", stacked=True),
            Panel("Now, of the last day's mean", "Below 0.25 most of the time, for 15 minutes: the alarm DipsLinkSlow.",
                  [Query(f'dips_worker_link_bytes_per_second{{{CN}, slave=~"$slave"}} / '
                         f"on (run, name, slave, direction) (dips:link_bytes_per_second:mean1d{{{R}}} > 0)",
                         "{{name}} {{slave}} {{direction}}")],
                  "percentunit", steps=[(None, RED), (0.25, GREEN)], lines=True),
            Panel("As the master sees them", "Mean rate of each link's last push and pull, from the first byte to the "
                  "last. Also of clusters that serve no metrics.",
                  [Query(f'dips_master_link_push_bytes_per_second{{{C}, slave=~"$slave"}}', "{{cluster}} → {{slave}}"),
                   Query(f'dips_master_link_pull_bytes_per_second{{{C}, slave=~"$slave"}}', "{{cluster}} ← {{slave}}")],
                  "Bps"),
            Panel("Round trip", "Smallest time from a request to its answer in the last transfer: the link's delay.",
                  [Query(f'dips_worker_link_round_trip_seconds{{{CN}, slave=~"$slave"}}', "{{name}} {{slave}}")], "s"),
        ]),
        Row("Transfers", [
            Panel("Time of transfers", "Half and nine tenths of them took less.",
                  [Query(share(0.5, "dips_worker_transfer_seconds", CN, "name, direction"),
                         "{{name}} {{direction}} 50 %"),
                   Query(share(0.9, "dips_worker_transfer_seconds", CN, "name, direction"),
                         "{{name}} {{direction}} 90 %")], "s"),
            Panel("Transfers per minute", "Normal: done alone.",
                  [Query(f"60 * {rate('dips_worker_transfers_total', CN, 'name, direction, result')}",
                         "{{name}} {{direction}} {{result}}")], stacked=True),
            Panel("Attempts of pushes in five minutes", "again: what is missing is sent once more.",
                  [Query(rises("dips_master_push_attempts_total", C, "cluster, attempt"), "{{cluster}} {{attempt}}"),
                   Query(rises("dips_worker_push_retries_total", CN, "name"), "{{name}}'s own count")]),
            Panel("Landed of open pushes", "Bytes of each open push on each slave: which slave is last.",
                  [Query(f'dips_master_push_landed_bytes{{{C}, slave=~"$slave"}}', "{{cluster}} → {{slave}}")],
                  "bytes"),
            Panel("Open pushes", "At most one for each live cluster.",
                  [Query(f"dips_master_open_pushes{{{R}}}", "undecided")], decimals=0),
            Panel("Bytes that were not sent again", "Held already when an attempt asked what is missing.",
                  [Query(rises("dips_worker_link_resumed_bytes_total", f'{CN}, slave=~"$slave"', "name, slave"),
                         "{{name}} {{slave}}")], "bytes"),
        ]),
        Row("Faults", [
            Panel("New connections in five minutes", "Because a slave was silent or hung up.",
                  [Query(rises("dips_worker_link_reconnects_total", f'{CN}, slave=~"$slave"', "name, slave"),
                         "{{name}} {{slave}}")]),
            Panel("Refused by slaves in five minutes", "By code, as the clusters heard it. UNKNOWN_PUSH: a few are "
                  "normal. CHUNK, DIGEST: spoilt on the way.",
                  [Query(rises("dips_worker_link_refusals_total", f'{CN}, slave=~"$slave"', "name, slave, code"),
                         "{{name}} {{slave}} {{code}}"),
                   Query(rises("dips_slave_refused_messages_total", SN, "name, code"), "{{name}} {{code}}")]),
            Panel("Connections turned away in five minutes", "Without keys that are on the list, or cut at the budget.",
                  [Query(rises("dips_slave_refused_connections_total", SN, "name"), "{{name}}")]),
        ]),
        Row("Slaves' side", [
            Panel("Landed by cluster", "Bytes of pushes, each second.",
                  [Query(rate("dips_slave_cluster_staged_bytes_total", SN, "name, cluster"), "{{cluster}} → {{name}}")],
                  "Bps", stacked=True),
            Panel("Landed and served", "Bytes of pushes in, bytes of versions out.",
                  [Query(rate("dips_slave_staged_bytes_total", SN, "name"), "{{name}} in"),
                   Query(rate("dips_slave_served_bytes_total", SN, "name"), "{{name}} out")], "Bps"),
            Panel("Pulls per minute", "One a round and cluster; readers are `dips export` and the evaluator.",
                  [Query(f"60 * {rate('dips_master_pulls_total', R, 'by')}", "{{by}}")]),
        ]),
    ],
)  # fmt: skip

SLAVES = Dashboard(
    "slaves",
    "Di-PS servers",
    "Have the slaves and the master room, and are they as fast as their machines?",
    [RUN, SLAVE],
    [
        Row("Slaves", [
            Panel("Here", "Red: no version is published until it is back.",
                  [Query(f"dips_master_slave_up{{{S}}}", "{{slave}}")], "none", "state-timeline", values=UP),
            Panel("What each does", "Normal: ready most of the time.",
                  [Query(f"dips_slave_shard_phase{{{SN}}} == 1", "{{name}} {{phase}}")], "none", "state-timeline",
                  values={1.0: ("now", BLUE)}),
            Panel("Versions", "What each slave holds, and what is on its disk. Normal: the published one; with "
                  "durability async the disk is a few behind.",
                  [Query(f"dips_slave_version{{{SN}}}", "{{name}}"),
                   Query(f"dips_slave_durable_version{{{SN}}}", "{{name}} on disk"),
                   Query(f"dips_master_durable_version{{{R}}}", "on every disk")], decimals=0),
            Panel("Lost in five minutes", "Streams that ended; lives that the master counted.",
                  [Query(rises("dips_master_slave_losses_total", S, "slave"), "{{slave}} lost"),
                   Query(rises("dips_slave_link_losses_total", SN, "name"), "{{name}}'s own count")]),
            Panel("Since the last heartbeat", "Normal: below two heartbeats.",
                  [Query(f"dips_master_slave_beat_age_seconds{{{S}}}", "{{slave}}")], "s"),
            Panel("Refused jobs in five minutes", "Normal: none. A full or failing disk, or a result that is not "
                  "finite.",
                  [Query(rises("dips_slave_job_failures_total", SN, "name, kind"), "{{name}} {{kind}}")]),
        ]),
        Row("Memory and disks", [
            Panel("Process and budget", "The slave keeps its process below the budget: it cuts connections first.",
                  [Query(f"dips_slave_resident_bytes{{{SN}}}", "{{name}}"),
                   Query(f"dips_slave_budget_bytes{{{SN}}}", "{{name}} budget")], "bytes"),
            Panel("Share of the budget, without the arrays", "What the process uses besides its arrays, of what its "
                  "budget leaves for that. Above 0.9: the alarm DipsSlaveMemory.",
                  [Query(f"dips:slave_other_memory:ratio{{{SN}}}", "{{name}}")], "percentunit", least=0,
                  steps=[(None, GREEN), (0.9, RED)], lines=True),
            Panel("Memory by use", "theta: versions. momentum. staging: one slot for each cluster. The limit is "
                  "memory_bytes.",
                  [Query(f"sum by (use) (dips_slave_memory_bytes{{{SN}}})", "{{use}}"),
                   Query(f"sum(dips_slave_memory_limit_bytes{{{SN}}})", "limit")], "bytes"),
            Panel("Free disk", "Below 1 GB: the alarm DipsDiskLow. A slave claims its ring at the start.",
                  [Query(f"dips_slave_disk_free_bytes{{{SN}}}", "{{name}}"),
                   Query(f"dips_master_disk_free_bytes{{{R}}}", "master")], "bytes", least=0),
            Panel("Snapshots", "Committed ones on disk: snapshots_kept, fewer at the beginning.",
                  [Query(f"dips_slave_snapshots{{{SN}}}", "{{name}}")], decimals=0),
            Panel("Age of the newest snapshot", "Normal: about a round.",
                  [Query(f"dips_slave_snapshot_age_seconds{{{SN}}}", "{{name}}")], "s"),
        ]),
        Row("Speed", [
            Panel("The outer step, and its floor", "Floor: the time in which this machine's memory could move the same "
                  "bytes. Normal: below twice it.",
                  [Query(f"dips_slave_update_seconds{{{SN}}}", "{{name}}"),
                   Query(f"dips_slave_update_floor_seconds{{{SN}}}", "{{name}} floor")], "s", log_scale=True),
            Panel("As a multiple of the floor", "Above 4 for long, on models whose step takes half a second and more: "
                  "the alarm DipsUpdateSlow.",
                  [Query(f"dips:slave_update:ratio{{{SN}}}", "{{name}}")], "none", least=0),
            Panel("Time of jobs", "Nine tenths took less, in the last quarter of an hour. prepare and commit are "
                  "mostly the disk.", [Query(f"dips:slave_job_seconds:p90_15m{{{SN}}}", "{{name}} {{kind}}")], "s",
                  log_scale=True),
            Panel("Time to write a snapshot", "Nine tenths took less.",
                  [Query(share(0.9, "dips_slave_snapshot_seconds", SN, "name"), "{{name}}")], "s"),
            Panel("Pushes", "Being staged now, and complete in five minutes.",
                  [Query(f"dips_slave_staging_open{{{SN}}}", "{{name}} open"),
                   Query(rises("dips_slave_staged_pushes_total", SN, "name"), "{{name}} complete")]),
            Panel("Versions that can be pulled", "2, more while readers hold old ones.",
                  [Query(f"dips_slave_readable_versions{{{SN}}}", "{{name}}"),
                   Query(f"dips_master_pinned_versions{{{R}}}", "pinned")], decimals=0),
        ]),
        Row("Master", [
            Panel("Journal", "journal and its write-ahead log are bounded by journal_records, the archive by "
                  "archive_bytes.", [Query(f"dips_master_journal_bytes{{{R}}}", "{{part}}")], "bytes"),
            Panel("Time to make entries durable", "One fsync each time. Above 1 s: the alarm DipsJournalSlow.",
                  [Query(f"dips:journal_append_seconds:p99_5m{{{R}}}", "99 %")], "s", log_scale=True),
            Panel("Calls per second", "By method.", [Query(rate("dips_master_calls_total", R, "method"), "{{method}}")],
                  stacked=True),
            Panel("Entries per second", "Decisions that were made durable.",
                  [Query(rate("dips_master_journal_entries_total", R, "run"), "entries")]),
            Panel("Times it stood still, in five minutes", "For more than half a heartbeat: its machine is too busy.",
                  [Query(rises("dips_master_stalls_total", R, "run"), "stalls")]),
            Panel("Data", "Tokens of the corpus by state, over all passes.",
                  [Query(f"dips_master_data_tokens{{{R}}}", "{{state}}")]),
        ]),
        Row("Processes", [
            Panel("Processor", "Cores in use.",
                  [Query(f'rate(process_cpu_seconds_total{{job="dips", {R}}}[{RATE}])', "{{role}} {{name}}")]),
            Panel("Open files", "As a share of what each may open.",
                  [Query(f'process_open_fds{{job="dips", {R}}} / process_max_fds{{job="dips", {R}}}',
                         "{{role}} {{name}}")], "percentunit", least=0),
            Panel("Resident memory", "Of every process.",
                  [Query(f'process_resident_memory_bytes{{job="dips", {R}}}', "{{role}} {{name}}")], "bytes"),
        ]),
    ],
)  # fmt: skip

CONVERGENCE = Dashboard(
    "convergence",
    "Di-PS convergence",
    "Does the model learn as it should, and what do rounds do to it?",
    [RUN, CLUSTER],
    [
        Row("Loss", [
            Panel("Held-out loss", "Nats per byte of the published versions. Normal: falls.",
                  [Query(f"dips_worker_heldout_loss{{{R}}}", "held out")], "none", width=12, decimals=3),
            Panel("Training loss", "Of each cluster's last steps, in nats per token. Normal: alike on all clusters. "
                  "Above 1.3 times the median: the alarm DipsLossApart.",
                  [Query(f"dips_master_cluster_loss{{{C}}}", "{{cluster}}"),
                   Query(f"dips:cluster_loss:median{{{R}}}", "median")], "none", width=12, decimals=3),
            Panel("Evaluated", "Version and tokens behind the held-out loss.",
                  [Query(f"dips_worker_heldout_version{{{R}}}", "evaluated version"),
                   Query(f"dips_master_version{{{R}}}", "published version")], decimals=0),
            Panel("Age of the evaluation", "Normal: below three publish intervals, or the evaluator is too slow.",
                  [Query(f"dips_worker_heldout_age_seconds{{{R}}}", "evaluation")], "s"),
            Panel("Tokens", "Of the newest version. A step down is a ROLLBACK.",
                  [Query(f"dips_master_tokens{{{R}}}", "published"), Query(f"dips_worker_heldout_tokens{{{R}}}",
                                                                           "evaluated")]),
        ]),
        Row("What rounds do", [
            Panel("Length of the update", "Norm of the merged pseudo-gradient, before the clip. Normal: steady, "
                  "falling slowly.", [Query(f"dips_master_merged_norm{{{R}}}", "merged")], "none", log_scale=True),
            Panel("Clip factor", "kappa: what the clip leaves of it. Below 0.05 for long: the alarm DipsClipped.",
                  [Query(f"dips_master_clip_factor{{{R}}}", "kappa"),
                   Query(f"dips_master_clip_active_ratio{{{R}}}", "share of rounds that were clipped")],
                  "percentunit", least=0, most=1),
            Panel("Participation", "rho: the share of a full round that the last merge stood for. Near 1 with clusters "
                  "of equal speed.",
                  [Query(f"dips_master_participation{{{R}}}", "rho")], "percentunit", least=0, most=1),
            Panel("Merged rounds", "Share of committed rounds that merged two clusters or more.",
                  [Query(f"sum(increase(dips_master_merged_rounds_total{{{R}}}[15m])) / "
                         f'(sum(increase(dips_master_rounds_total{{{R}, result="commit"}}[15m])) > 0)', "merged")],
                  "percentunit", least=0),
            Panel("Norms", "Of each cluster's last pseudo-gradient.",
                  [Query(f"dips_master_cluster_norm{{{C}}}", "{{cluster}}")], "none", log_scale=True),
            Panel("Directions", "Median cosine of each cluster's last pushes with the others' way. Below 0.15 of what "
                  "is usual among the others: the alarm DipsDirection.",
                  [Query(f"dips_master_cluster_usual_cosine{{{C}}}", "{{cluster}}")], "none", least=-1, most=1),
            Panel("Versions behind", "Staleness of each cluster's base: stale pushes pull towards where the model was.",
                  [Query(f"dips_master_cluster_staleness_versions{{{C}}}", "{{cluster}}"),
                   Query(f"dips_worker_staleness_versions{{{CN}}}", "{{name}}'s own view")], decimals=0),
        ]),
        Row("What was lost", [
            Panel("Excluded pushes in five minutes", "By reason; what they trained is lost.",
                  [Query(rises("dips_master_verdicts_total", f'{C}, verdict="excluded"', "cluster, reason"),
                         "{{cluster}} {{reason}}")]),
            Panel("Tokens by fate", "applied: in the model. excluded: lost. rolled back: lost with a slave's disk.",
                  [Query(f'dips_master_data_tokens{{{R}, state=~"applied|excluded"}}', "{{state}}"),
                   Query(f"dips_master_rolled_back_tokens_total{{{R}}}", "rolled back")]),
            Panel("Rounds in five minutes", "Normal: commit alone.",
                  [Query(rises("dips_master_rounds_total", R, "result"), "{{result}}")], stacked=True),
        ]),
    ],
)  # fmt: skip

DASHBOARDS = (OVERVIEW, CLUSTERS, LINKS, SLAVES, CONVERGENCE)


def files() -> Iterator[tuple[Path, str]]:
    """Each dashboard's file and its text."""
    for dashboard in DASHBOARDS:
        yield FOLDER / f"{dashboard.name}.json", _compact(dashboard.json())


def _compact(document: dict[str, Any]) -> str:
    """JSON with one line for each setting and each panel, so that a changed panel is one changed line."""
    fields = []
    for key, value in document.items():
        text = json.dumps(value, ensure_ascii=False)
        if key == "panels":
            text = "[\n" + ",\n".join(json.dumps(panel, ensure_ascii=False) for panel in value) + "\n]"
        fields.append(f"{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print("python deploy/grafana/make.py [--check]", file=sys.stderr)
        return 2
    old = [path for path, text in files() if not path.exists() or path.read_text() != text]
    if not arguments:
        for path, text in files():
            path.write_text(text)
        print(f"{len(DASHBOARDS)} dashboards, {len(old)} of them new or changed")
        return 0
    for path in old:
        print(f"{path} is not what make.py makes: run python deploy/grafana/make.py", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
