"""Writes docs/metrics.md from the roles' lists of metrics; a test checks that the page is current."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from dips.cli.generated_page import keep_current
from dips.core.observe.counting import SECONDS
from dips.core.observe.metrics import Spec
from dips.core.observe.metrics_server import CONNECTION_S, MOST_CONNECTIONS, SNAPSHOT_S
from dips.master import metrics as master
from dips.master.metrics import PHASES as ROUND_PHASES
from dips.master.metrics_counts import REASONS
from dips.master.state.reasons import WaitingCode
from dips.master.state.status import AlarmKind
from dips.slave import metrics as slave
from dips.slave.metrics import JOBS
from dips.slave.metrics import PHASES as SHARD_PHASES
from dips.worker import metrics as worker
from dips.worker.metrics import PHASES as SESSION_PHASES

ROLES: tuple[tuple[str, str, Sequence[Spec]], ...] = (
    ("Master", master.PREFIX, master.METRICS),
    ("Slave", slave.PREFIX, slave.METRICS),
    ("Cluster", worker.PREFIX, worker.METRICS),
    ("Evaluator", worker.PREFIX, worker.HELDOUT),
)

_INTRODUCTION = f"""\
# Metrics

Written by `make docs` from the lists `METRICS` in `master/metrics.py`, `slave/metrics.py` and `worker/metrics.py`; a
process can export nothing that is not on its list.

## How to get them

Every role takes `--metrics-listen HOST:PORT` (in a settings file `metrics_listen`, in the environment
`DIPS_MASTER_METRICS_LISTEN`, `DIPS_SLAVE_...`, `DIPS_WORKER_...`), and serves its metrics there under `/metrics`.
Without it nothing is served. With port 0 the system chooses a free one. A training loop of your own (`dips.DiLoCo`)
reads the same environment variable. All processes of a run on one machine:

<!-- not run: it trains for three minutes, and `make demo` runs the same -->
```sh
dips demo --metrics
```

`dips up FILE.toml --metrics` does the same, and so does `metrics = true` in the table `[run]` of the file.

Each process writes its address into a file in the form that Prometheus' `file_sd_configs` read, with the labels
`role` (master, slave, cluster or evaluator), `name` and `run`: `metrics.json` in the directory of a master or slave,
or where `--metrics-file` says. A run of `dips up` or `dips demo` has them together:

```yaml
scrape_configs:
  - job_name: dips
    file_sd_configs:
      - files: [runs/demo/metrics/*.json]
```

A file is removed at a clean end and stays after a kill, so that Prometheus sees the target down.

On loopback metrics are plain HTTP. Beyond it they are served in TLS with the process's own keys, and only to those
who show a certificate of the run's authorities that is not revoked ([security.md](security.md)); with `--insecure`
nothing but loopback can be given. Prometheus needs an identity of its own, `dips keys add KEYS --operator prometheus`,
and one job for each role, because the name in a certificate is the role's: `dips-master`, `dips-slave`,
`dips-cluster`, `dips-operator` (the evaluator).

```yaml
scrape_configs:
  - job_name: dips-slaves
    scheme: https
    tls_config:
      ca_file: keys/prometheus/ca.crt
      cert_file: keys/prometheus/tls.crt
      key_file: keys/prometheus/tls.key
      server_name: dips-slave
    static_configs:
      - targets: [slave-0:9400, slave-1:9400]
        labels: {{role: slave, run: big}}
```

Certificates of slaves and clusters that were made by an earlier release are for clients only: `dips keys renew` makes
them good for this.

## What a scrape costs

Values are read when they are scraped. A master and a slave make a snapshot on the event loop that owns their state,
of what it holds already; a loop that does not answer within {SNAPSHOT_S:g} s gives 503, and Prometheus
sees the target down, which it is. A cluster's training thread leaves its numbers behind at each step, one small object,
because a scrape must not wait for a step, and the thread that moves chunks leaves its own four times a second while
something moves. Counting costs an entry in a dictionary for each event of the control flow and each chunk. A server
has at most {MOST_CONNECTIONS} connections at a time, each for at most {CONNECTION_S:g} s.

## How to read the tables

- Every name of a list is in every scrape, with its type and meaning. A series is missing where the value is not
  known; the last column says when it is there.
- Counters (`_total`) never fall while a process runs, also when a ROLLBACK takes tokens back; the master's that
  are in its ledger continue after its restart.
- Histograms are in seconds with the buckets {", ".join(f"{end:g}" for end in SECONDS)}.
- Every process also has prometheus_client's `process_*`: memory, processor time, files, start time.
- Labels are bounded. `cluster` and `slave` are names of the run: of clusters the live ones and, up to `max_clusters`
  in all, those that were here last; what else is counted of a cluster leaves with it. All others are fixed words:

| label | values |
|---|---|
| `reason` of `dips_master_waiting` | {", ".join(WaitingCode)} |
| `kind` of `dips_master_alarm` | {", ".join(AlarmKind)} |
| `phase` of `dips_master_round_*` | {", ".join(ROUND_PHASES)} |
| `phase` of `dips_slave_shard_phase` | {", ".join(SHARD_PHASES)} |
| `phase` of `dips_worker_phase` | {", ".join(SESSION_PHASES)} |
| `kind` of `dips_slave_job_*` | {", ".join(JOBS)} |
| `verdict` | {", ".join(REASONS)} |
| `reason` with applied | {", ".join(REASONS["applied"])} |
| `reason` with excluded | {", ".join(REASONS["excluded"])} |
| `reason` with aborted | {", ".join(REASONS["aborted"])} |
| `reason` with rolled_back | {", ".join(REASONS["rolled_back"])} |
| `code` | the refusal codes of `protos/common.proto`, as BUSY or FENCED |
| `method` | the methods of the master's services ([protocol.md](protocol.md)) |

`norm`: far above the recent ones (the hard gate) · `score`: an outlier in the cluster's own history · `zero`: nothing
was trained · `void`: nothing of the round could be merged · `ticket`: nothing arrived for `ticket_ttl_s` · `gone`:
its cluster left or was evicted · `stale`: its base is too old or was replaced · `ranges`: its data is no longer
lent to it · `digest`: what arrived is not what was sent · `refused`: a slave could not do its part."""


def page() -> str:
    """The text of docs/metrics.md."""
    parts = [_INTRODUCTION]
    for title, prefix, specs in ROLES:
        head = [
            "| name | type | labels | unit | meaning | normal range | there when |",
            "|---|---|---|---|---|---|---|",
        ]
        parts.append(f"## {title}")
        parts.append("\n".join([*head, *_rows(prefix, specs)]))
    return "\n\n".join(parts) + "\n"


def _rows(prefix: str, specs: Iterable[Spec]) -> Iterable[str]:
    for spec in specs:
        labels = ", ".join(spec.labels) or "-"
        cells = (
            f"`{prefix}{spec.name}`",
            spec.kind,
            labels,
            spec.unit or "-",
            spec.meaning,
            spec.normal,
            spec.when or "always",
        )
        yield f"| {' | '.join(cells)} |"


def main() -> int:
    return keep_current(__doc__, lambda _: page())


if __name__ == "__main__":
    sys.exit(main())
