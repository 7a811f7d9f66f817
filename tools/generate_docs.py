"""Writes the generated pages of docs/ (`make docs`): api.md, assumptions.md, metrics.md, settings.md, parts of
protocol.md.

Tests check that the pages are current.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from google.protobuf.descriptor import ServiceDescriptor

import dips
from dips import planner
from dips.core import assumptions as assumed
from dips.core.config import Knobs, Name, environment_name, groups_of
from dips.core.errors import ConfigError
from dips.core.machine import TransitionTable
from dips.core.net.security import VARIABLES, Address, AddressOrEmpty
from dips.core.observe.metrics import SECONDS, Spec
from dips.core.observe.metrics_server import CONNECTION_S, MOST_CONNECTIONS, SNAPSHOT_S
from dips.core.protocol import CAPABILITIES, PROTOCOL_MIN, PROTOCOL_VERSION
from dips.core.units import BitsPerSecond, Bytes, Count, Seconds, format_bytes, format_seconds, parse_bytes
from dips.deploy.deploy_file import DeployedClusterKnobs, DeployKnobs, ModelKnobs, SiteKnobs
from dips.local.processes import RunKnobs
from dips.local.run_file import ClusterKnobs
from dips.local.tracking import TrackKnobs
from dips.master import metrics as master
from dips.master.config import MasterConfig
from dips.master.metrics import PHASES as ROUND_PHASES
from dips.master.metrics import REASONS
from dips.master.state.reasons import STANDING, WaitingCode
from dips.master.state.records import PUSH_TABLE, RECOVERY_TABLE, RESHARD_TABLE, ROUND_TABLE, SLAVE_TABLE
from dips.protos import clusters_pb2, operator_pb2, replicas_pb2, slaves_pb2
from dips.slave import metrics as slave
from dips.slave.config import BackupConfig, SlaveConfig
from dips.slave.metrics import JOBS
from dips.slave.metrics import PHASES as SHARD_PHASES
from dips.slave.state.shard import SAVE_TABLE, SHARD_TABLE
from dips.slave.state.slave import LINK_TABLE
from dips.trainer.config import TrainConfig
from dips.worker import metrics as worker
from dips.worker.config import ClientConfig
from dips.worker.metrics import PHASES as SESSION_PHASES
from dips.worker.state.shared import SESSION_TABLE

# ---- protocol.md -----------------------------------------------------------------------------------------------------
#
# Versions, refusals, calls, and each transition table as a diagram. A part is between `<!-- generated: NAME -->` and
# `<!-- end -->`; what stands between the parts is written by hand.


TABLES: dict[str, TransitionTable[Any]] = {
    "round": ROUND_TABLE,
    "push": PUSH_TABLE,
    "slave": SLAVE_TABLE,
    "recovery": RECOVERY_TABLE,
    "reshard": RESHARD_TABLE,
    "slave-link": LINK_TABLE,
    "slave-shard": SHARD_TABLE,
    "slave-save": SAVE_TABLE,
    "session": SESSION_TABLE,
}

_PART = re.compile(r"(<!-- generated: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def diagram(table: TransitionTable[Any]) -> str:
    """The table as a Mermaid state diagram; arrows between the same two phases share one line."""
    labels: dict[tuple[str, str], list[str]] = {}
    for start, name, end in table.arrows():
        labels.setdefault((start.value, end.value), []).append(name.replace("_", " "))
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {table.initial.value}"]
    lines += [f"    {start} --> {end}: {', '.join(names)}" for (start, end), names in sorted(labels.items())]
    return "\n".join([*lines, "```"])


def versions() -> str:
    capabilities = ", ".join(f"`{name}`" for name in sorted(CAPABILITIES))
    return f"Protocol version {PROTOCOL_VERSION}, understood from {PROTOCOL_MIN} on. Capabilities: {capabilities}."


def refusals() -> str:
    """The refusal codes with the sentences that protos/common.proto gives them."""
    text = (Path(dips.__file__ or "").parent / "protos" / "common.proto").read_text()
    rows = re.findall(r"^  REFUSAL_(\w+) = (\d+);\s+// \"(.*)\"$", text, re.MULTILINE)
    body = [f"| {number} | `{name}` | {sentence} |" for name, number, sentence in rows]
    return "\n".join(["| code | name | what it says |", "|---|---|---|", *body])


def calls() -> str:
    services: list[ServiceDescriptor] = [
        module.DESCRIPTOR.services_by_name[name]
        for module, name in (
            (clusters_pb2, "Clusters"),
            (slaves_pb2, "Slaves"),
            (replicas_pb2, "Replicas"),
            (operator_pb2, "Operator"),
        )
    ]
    rows = [
        f"| {service.name} | `{method.name}` | {_arrow(method)} |" for service in services for method in service.methods
    ]
    return "\n".join(["| service | call | request and answer |", "|---|---|---|", *rows])


def _arrow(method: Any) -> str:
    up = ("stream of " if method.client_streaming else "") + method.input_type.name
    down = ("stream of " if method.server_streaming else "") + method.output_type.name
    return f"{up} → {down}"


PARTS: dict[str, Callable[[], str]] = {
    "versions": versions,
    "refusals": refusals,
    "calls": calls,
    **{name: functools.partial(diagram, table) for name, table in TABLES.items()},
}


def protocol(text: str) -> str:
    """The document with every generated part made again. Raises ConfigError for an unknown or a missing part."""
    found = [match.group(2) for match in _PART.finditer(text)]
    if sorted(found) != sorted(PARTS):
        odd = sorted(set(found) ^ set(PARTS)) or sorted({name for name in found if found.count(name) > 1})
        raise ConfigError(f"the document's generated parts are not those that exist; look at: {', '.join(odd)}")
    return _PART.sub(lambda match: f"{match.group(1)}{PARTS[match.group(2)]()}\n{match.group(3)}", text)


# ---- assumptions.md --------------------------------------------------------------------------------------------------


WIDTH = 118

_ASSUMPTIONS = """\
# What settings assume of each other

Written by `make docs` from `core/assumptions.py`. Each line is an inequality between settings of one process. It is
checked when the settings are read, before anything starts; settings that break one are refused with the name, the
values, what would go wrong and what to change, and exit code 2. A line that names `grace_s` does not apply while it
is `auto`.

Of the times by which failures are recognised, only two are chosen: `heartbeat_s` (2 s), by which dead peers are
distinguished from live ones, and `round_timeout_s` (30 s), the time for slaves to answer a step of a round. The others
are `auto` and follow from these two, or from what is measured ([decision 0020](decisions/0020-recovery-times.md)).
Other times have fixed defaults: `lease_ttl_s`, `connect_wait_s`, `checkpoint_every_s`.

| setting | `auto` | with the defaults |
|---|---|---|
| master `verdict_wait_s` | as long as a cluster's exchanges lately took, at most `round_timeout_s` | 30 s at most |
| master `ticket_ttl_s` | `2 * round_timeout_s`, at least `evict_after_beats * heartbeat_s` | 1 min |
| master `linger_s` | 3 x `evict_after_beats` x `heartbeat_s` | 30 s |
| master `grace_s` | a tenth of the fastest cluster's round | 1 s at least |
| cluster `call_deadline_s` | `evict_after_beats * heartbeat_s`, at least 6 s | 10 s |
| cluster `retry_max_s` | `heartbeat_s / 2` | 1 s |
| cluster `data_stall_s` | `round_timeout_s`, at least `evict_after_beats * heartbeat_s` | 30 s |
| cluster `leave_wait_s` | the same, twice the last push and pull, and until the push's window closes | 30 s at least |
| cluster `data_silence_s` | `heartbeat_s` | 2 s |

Where one of them is set, those that must not be shorter or longer follow it.

Some conditions are no inequality of one process, or hold for some values only. They are refused in the same way:

- `chunk_bytes` must be a multiple of 4, the size of a parameter. Checked in `master/config.py`.
- With `grace = "sliding"` and a `grace_s` that is set, a window may last `3 * grace_s`. That must be less than
  `round_timeout_s` and than `verdict_wait_s`. Checked in `master/config.py`.
- `min_clusters_per_round` and `round_deadline_s` are set together or not at all. Checked in `master/config.py`.
- `chunk_bytes` of the master must not be above `max_chunk_bytes` of a slave. With `durability = "async"`,
  `snapshots_kept` of a slave must be above `async_lag_versions` of the master. `dips up` and `dips deploy` check both
  before anything starts; a slave that is started by hand refuses them when the first cluster joins (in
  `slave/state/checks.py`)."""

_TITLES = {"master": "Master", "slave": "Slave", "worker": "Cluster"}


def assumptions() -> str:
    """The text of docs/assumptions.md."""
    parts = [_ASSUMPTIONS]
    for role, rows in assumed.ROLES.items():
        parts += [f"## {_TITLES[role]}", "\n".join(_item(role, row) for row in rows)]
    return "\n\n".join(parts) + "\n"


def _item(role: str, row: assumed.Assumption) -> str:
    text = f"`{row.text}` ({row.name}): {row.why}. Otherwise {row.harm}; {row.remedy}. Checked in `{role}/config.py`."
    return textwrap.fill(
        text, WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


# ---- metrics.md ------------------------------------------------------------------------------------------------------


ROLES: tuple[tuple[str, str, Sequence[Spec]], ...] = (
    ("Master", master.PREFIX, master.METRICS),
    ("Slave", slave.PREFIX, slave.METRICS),
    ("Cluster", worker.PREFIX, worker.METRICS),
    ("Evaluator", worker.PREFIX, worker.HELDOUT),
)

_METRICS = f"""\
# Metrics

Written by `make docs` from the lists `METRICS` in `master/metrics.py`, `slave/metrics.py` and `worker/metrics.py`; a
process can export nothing that is not on its list.

## How to get them

Every role takes `--metrics-listen HOST:PORT` (in a settings file `metrics_listen`, in the environment
`DIPS_MASTER_METRICS_LISTEN`, `DIPS_SLAVE_...`, `DIPS_WORKER_...`), and serves its metrics there under `/metrics`.
Without it nothing is served. The evaluator takes the option and `DIPS_WORKER_METRICS_LISTEN`, not the settings file.
With port 0 the system chooses a free one. A training loop of your own (`dips.DiLoCo`) reads the same environment
variable. All processes of a run on one machine:

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
      - targets: [slave-0:9400]
        labels: {{run: big, role: slave, name: s0}}
      - targets: [slave-1:9400]
        labels: {{run: big, role: slave, name: s1}}
    relabel_configs:
      - {{target_label: job, replacement: dips}}   # alarms and dashboards ask for this job
```

Certificates of slaves and clusters that were made by an earlier release are for clients only: `dips keys renew` makes
them good for this.

## What a scrape costs

Values are read when they are scraped. A master and a slave make a snapshot on the event loop that owns their state,
of what it holds already. A loop that does not answer within {SNAPSHOT_S:g} s gives 503, and Prometheus
sees the target down, which it is. A cluster's training thread leaves its numbers behind at each step, one small object,
because a scrape must not wait for a step. The thread that moves chunks leaves its own four times a second while
something moves. Counting costs an addition for each event of the control flow and each chunk. A server
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
| `kind` of `dips_master_alarm` | {", ".join(STANDING)} |
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


def metrics() -> str:
    """The text of docs/metrics.md."""
    parts = [_METRICS]
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


# ---- settings.md -----------------------------------------------------------------------------------------------------


_SETTINGS = """\
# Settings

Written by `make docs` from the classes that declare them; there are no others.

A setting of a role has four sources. From strongest to weakest: the command line (`--memory-bytes`), the environment
(`DIPS_SLAVE_MEMORY_BYTES`), the role's table in a TOML file (`memory_bytes` in `[slave]`), the default. Master, slave
and `dips train` print at their start what they use, and where each value came from. A setting that is unknown, wrong or
missing ends the command with exit code 2 and a sentence with its place, the value and the remedy.

Some settings also have a short variable, the same for all roles, which is stronger than the long one: `DIPS_MASTER`
(`master`), `DIPS_CLUSTER` (`cluster_id`), `DIPS_RUN` (`run_id`), `DIPS_KEYS` (`keys`), `DIPS_INSECURE` (`insecure`),
`DIPS_FILES_GROUP` (`files_group`).
The commands of the roles also read `DIPS_LOG_LEVEL` (`log_level`) and `DIPS_LOG_FORMAT` (`log_format`). A variable that
is empty counts as not given.

Sizes, times, rates and counts are numbers in the base unit (bytes, seconds, bits/s, one) or texts with a unit:
`"64 MB"`, `"1 MiB"`, `"1 h 30 min"`, `"10 Gbit/s"`, `"1.5M"`. In a variable, a list is written with commas or as JSON.
Where a table says `(required)` a value must be given; `dips up` and `dips deploy` give some of a role's settings
themselves."""

_ROLE_TABLES: tuple[tuple[str, type[Knobs], str], ...] = (
    ("master", MasterConfig, "`dips master`"),
    ("slave", SlaveConfig, "`dips slave`"),
    ("worker", ClientConfig, "`dips train` with a master, and a loop of your own"),
    ("train", TrainConfig, "`dips train`"),
    ("backup", BackupConfig, "`dips backup`, and `dips up` where the file has this table"),
)
_FILE_TABLES: tuple[tuple[str, str, tuple[tuple[str, type[Knobs]], ...]], ...] = (
    (
        "The file of `dips up`",
        "It also has the tables of the roles, above. Each setting of `[run]` is read from the environment as "
        "well, such as `DIPS_RUN_SLAVES`. A table `[[clusters]]` may also set every setting of `[worker]` and, without "
        "`command`, of `[train]` for its cluster. A command of your own gets the settings of `[worker]` as variables "
        "`DIPS_WORKER_...`.",
        (("[run]", RunKnobs), ("[[clusters]]", ClusterKnobs), ("[track]", TrackKnobs)),
    ),
    (
        "The file of `dips deploy`",
        "It also has the tables of the roles, above, and is not read from the environment. A table `[[clusters]]` has "
        "the settings below only: those of `[worker]` and `[train]` are the same for all clusters.",
        (
            ("[deploy]", DeployKnobs),
            ("[model]", ModelKnobs),
            ("[[sites]]", SiteKnobs),
            ("[[clusters]]", DeployedClusterKnobs),
        ),
    ),
)

_CHECKED = {
    typing.get_args(kind)[1]: word
    for kind, word in (
        *((Bytes, "size"), (Seconds, "time"), (Count, "count"), (BitsPerSecond, "rate")),
        *((Name, "name"), (Address, "HOST:PORT"), (AddressOrEmpty, "HOST:PORT")),
    )
}
"""The words for types that have a check of their own, by that check."""


def _size(n_bytes: int) -> str:
    """A size in a form that can be typed and is the same value."""
    for text in (format_bytes(n_bytes), f"{n_bytes / 1e6:g} MB"):
        try:
            if parse_bytes(text) == n_bytes:
                return text
        except ConfigError:  # a rounded text may be no whole number of bytes
            continue
    return str(n_bytes)


_FORMS: dict[str, Callable[[Any], str]] = {"size": _size, "time": format_seconds}
_WORDS = {bool: "yes or no", int: "whole number", float: "number", str: "text", Path: "path"}
_BOUNDS = {Ge: "at least {}", Gt: "more than {}", Le: "at most {}", Lt: "less than {}"}


def settings() -> str:
    """The text of docs/settings.md."""
    parts = [_SETTINGS]
    for section, kind, of in _ROLE_TABLES:
        variable = environment_name(section, "...")
        parts += [f"## `[{section}]`: {of}", f"Variables: `{variable}`.", *_settings_tables(kind)]
    for title, text, tables in _FILE_TABLES:
        parts += [f"## {title}", textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)]
        for name, kind in tables:
            parts += [f"### `{name}`", *_settings_tables(kind)]
    return "\n\n".join(parts) + "\n"


def _settings_tables(kind: type[Knobs]) -> list[str]:
    """A table for each group of settings, with its title."""
    found: list[str] = []
    for title, names in groups_of(kind).items():
        table = _settings_table(kind, names)
        found += [f"**{title}**", table] if title else [table]
    return found


def _settings_table(kind: type[Knobs], names: Iterable[str]) -> str:
    lines = ["| setting | value | default | meaning |", "|---|---|---|---|"]
    for name in names:
        info = kind.model_fields[name]
        values, default = _values(info.annotation, info.metadata), info.get_default(call_default_factory=True)
        shown = "(required)" if info.is_required() else ""
        if not info.is_required() and default not in ("", (), None):
            shown = f"`{_amount(default, values)}`"
        cells = (f"`{name}`", values, shown, info.description or "")
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def _amount(value: Any, of: str) -> str:
    """A value as a person writes it; of: the words for its type."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float) and value >= 1:
        form = next((form for word, form in _FORMS.items() if word in of), str)
        return form(value)
    return str(value)


def _values(hint: Any, metadata: Iterable[Any] = ()) -> str:
    """What may be written for a setting of this type, with its bounds."""
    of, arguments = typing.get_origin(hint), typing.get_args(hint)
    if of is typing.Annotated:
        return _values(arguments[0], [*arguments[1:], *metadata])
    if of in (types.UnionType, typing.Union):
        return " or ".join(_values(one, metadata) for one in arguments if one is not types.NoneType)
    if of is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if of in (tuple, list):
        return f"list: {_values(arguments[0])}"
    # A FieldInfo inside of Annotated has metadata of its own.
    flat = [inner for one in metadata for inner in (one, *getattr(one, "metadata", ()))]
    word = next((_CHECKED[one] for one in flat if one in _CHECKED), _WORDS.get(hint, "text"))
    bounds = [
        text.format(_amount(getattr(one, kind.__name__.lower()), word))
        for one in flat
        for kind, text in _BOUNDS.items()
        if isinstance(one, kind)
    ]
    return ", ".join([word, *bounds])


# ---- api.md ----------------------------------------------------------------------------------------------------------


_API = """\
# Python API

Written by `make docs` from the docstrings. For whoever writes a training loop, gives a trainer a callback, or plans
from a program. Type first:

```sh
python -c 'import dips; help(dips.DiLoCo)'
```

[integrations](integrations.md) shows whole loops and trainers, [planner](planner.md) whole plans. `ConfigError`,
`Refused` and `RetryLater` (import them from `dips.core.errors`) say in one sentence what is wrong, where, and what to
change; a program that does not catch one ends with that sentence and the [exit code](start.md#exit-codes) 2, 3 (8 for
`NAME_TAKEN`) or 4. An argument that is left out takes its variable, where it has one, then the default."""

_ARGUMENT = re.compile(r"^    (\w+): ")


def api() -> str:
    """The text of docs/api.md."""
    parts = [_API]
    for name in (name for name in dips.__all__ if not name.startswith("_")):
        kind = getattr(dips, name)
        parts += [f"## `dips.{name}`", *_described(kind, inspect.signature(kind))]
        parts += _members(kind)
    for name in planner.__all__:
        function = getattr(planner, name)
        parts += [f"## `dips.planner.{name}`", *_described(function, inspect.signature(function))]
    return "\n\n".join(parts) + "\n"


def _described(documented: Any, signature: inspect.Signature) -> list[str]:
    """The paragraphs of a docstring, and its arguments as a table in their place."""
    text, _, rest = inspect.cleandoc(documented.__doc__ or "").partition("\nArgs:\n")
    lines = rest.splitlines()
    end = next((n for n, line in enumerate(lines) if line and not line.startswith("    ")), len(lines))
    meanings: dict[str, str] = {}
    for line in lines[:end]:
        if found := _ARGUMENT.match(line):
            name = found[1]
            meanings[name] = line[found.end() :]
        elif line:
            meanings[name] += f" {line.strip()}"
    if set(meanings) - set(signature.parameters) or (meanings and len(meanings) < len(signature.parameters)):
        raise ConfigError(f"Args of {documented.__qualname__} are not its arguments: {', '.join(meanings)}")
    table = ["| argument | default | variable | meaning, and what a mistake gives |", "|---|---|---|---|"]
    for name, meaning in meanings.items():
        ours = documented is dips.DiLoCo and name in ClientConfig.model_fields
        parameter = signature.parameters[name]
        default = ClientConfig.model_fields[name].default if ours else parameter.default
        shown = "(required)" if default is inspect.Parameter.empty else f"`{default!r}`"
        if default in (None, "") or parameter.kind is inspect.Parameter.VAR_KEYWORD:
            shown = ""
        variable = f"`{VARIABLES.get(name) or environment_name('worker', name)}`" if ours else ""
        cells = (f"`{name}`", shown, variable, _linked(meaning))
        table.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    shown_paragraphs = [_paragraph(part) for part in (*text.split("\n\n"), *"\n".join(lines[end:]).split("\n\n"))]
    return [*(part for part in shown_paragraphs if part), *(["\n".join(table)] if meanings else [])]


def _paragraph(text: str) -> str:
    """One of a docstring; code that is indented becomes a block."""
    if text.startswith("    "):
        return f"```python\n{textwrap.dedent(text)}\n```"
    return textwrap.fill(_linked(" ".join(text.split())), WIDTH, break_long_words=False, break_on_hyphens=False)


def _linked(text: str) -> str:
    return re.sub(r"docs/([a-z]+)\.md", r"[\1](\1.md)", text)


def _members(kind: type[Any]) -> list[str]:
    """What a loop may read and call, each with the first paragraph of its docstring."""
    rows = []
    for name, member in vars(kind).items():
        function = member.fget if isinstance(member, property) else member
        if name.startswith(("_", "on_")) or not inspect.isfunction(function):
            continue
        how = (
            name
            if isinstance(member, property)
            else f"{name}({', '.join([*inspect.signature(function).parameters][1:])})"
        )
        first = " ".join(inspect.cleandoc(function.__doc__ or "").split("\n\n")[0].split())
        rows.append(f"| `{how}` | {first} |")
    return ["\n".join(["| member | what |", "|---|---|", *rows])] if rows else []


# ---- command ---------------------------------------------------------------------------------------------------------


PAGES: Mapping[str, Callable[[str], str]] = {
    "api.md": lambda _: api(),
    "protocol.md": protocol,
    "assumptions.md": lambda _: assumptions(),
    "metrics.md": lambda _: metrics(),
    "settings.md": lambda _: settings(),
}
"""The page as it is ("" where there is none) -> as it should be."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages of a folder, or compare them; returns the exit code. 1: one is stale."""
    parser = argparse.ArgumentParser(prog="python tools/generate_docs.py", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true", help="write the pages; else exit 1 when one is stale")
    given = parser.parse_args(arguments)
    stale = False
    for name, page in PAGES.items():
        file: Path = given.folder / name
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        try:
            fresh = page(text)
        except ConfigError as error:
            print(f"{file}: {error}", file=sys.stderr)
            return error.exit_code
        if given.write:
            file.write_text(fresh, encoding="utf-8")
        elif fresh != text:
            print(f"{file} is not current: run `make docs`", file=sys.stderr)
            stale = True
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
