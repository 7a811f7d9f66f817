"""The metrics of a slave; docs/metrics.md is made from this list. Labels: clusters that push here, and fixed words."""

from __future__ import annotations

from dips.core.observe.metrics import CERTIFICATE, Spec

PREFIX = "dips_slave_"

_LOADED = "the slave has its memory"

METRICS: tuple[Spec, ...] = (
    # ---- the link to the master ----
    Spec("info", "gauge", "1; the labels say which slave of which run", "1", ("run", "slave", "version")),
    Spec("attached", "gauge", "1 while the slave is attached to the master", "1"),
    Spec("epoch", "gauge", "Newest epoch that the slave has promised to obey", "equal to the master's"),
    Spec("incarnations_total", "counter", "Incarnations that the master gave to this process",
         "1, and 1 more for each loss of the link"),
    Spec("link_losses_total", "counter", "Streams to the master that ended", "no increase"),
    Spec("refused_commands_total", "counter", "Commands of the master that were refused (older epochs, say)",
         "no increase"),
    CERTIFICATE,
    # ---- parameters ----
    Spec("shard_phase", "gauge", "1 for the phase of the slave's part of the model", "ready most of the time",
         ("phase",)),
    Spec("shard_bytes", "gauge", "Parameters that the slave holds, of one version", "alike on all slaves", (), "bytes",
         _LOADED),
    Spec("version", "gauge", "Version that the slave serves as the newest", "equal to the master's", (), "", _LOADED),
    Spec("timeline", "gauge", "Timeline of that version", "equal to the master's", (), "", _LOADED),
    Spec("durable_version", "gauge", "Newest version on this slave's disk with its COMMIT",
         "equal to version; with durability async a few less", (), "", "there is one"),
    Spec("readable_versions", "gauge", "Versions that can be pulled", "2, more while old ones are read"),
    # ---- memory and disk ----
    Spec("memory_bytes", "gauge", "Memory of the arrays, by use: theta, momentum, staging",
         "constant, but for theta when versions are pinned", ("use",), "bytes", _LOADED),
    Spec("memory_limit_bytes", "gauge", "memory_bytes: what the arrays may use", "above the sum of memory_bytes", (),
         "bytes"),
    Spec("resident_bytes", "gauge", "Memory of the process, without mapped files", "below budget_bytes", (), "bytes"),
    Spec("budget_bytes", "gauge", "The process's budget (docs/budgets.md), which the slave enforces",
         "above resident_bytes", (), "bytes"),
    Spec("snapshots", "gauge", "Committed snapshots on disk", "snapshots_kept, fewer at the beginning"),
    Spec("snapshot_age_seconds", "gauge", "Time since this process made a snapshot durable", "about a round", (), "s",
         "it has made one"),
    Spec("snapshot_seconds", "histogram", "Time to write a snapshot or its manifest durably",
         "what the disk needs for 8 bytes a parameter", (), "s"),
    Spec("disk_free_bytes", "gauge", "Free space on the disk of the slave's directory",
         "above 1 GB; the ring is claimed when it is made", (), "bytes"),
    # ---- rounds ----
    Spec("job_seconds", "histogram", "Time of jobs by kind: load, measure, prepare, commit, list, move",
         "measure and commit: milliseconds to seconds; prepare: with the disk's time", ("kind",), "s"),
    Spec("job_failures_total", "counter", "Jobs that were refused, by kind", "no increase", ("kind",)),
    Spec("update_seconds", "gauge", "Time of the last outer step's arithmetic", "below twice its floor", (), "s",
         "there was one"),
    Spec("update_floor_seconds", "gauge",
         "Time in which this machine's memory, measured at start, could move the same bytes",
         "more than half of update_seconds", (), "s", "there was one"),
    # ---- the data port ----
    Spec("staging_open", "gauge", "Pushes that are being staged", "at most one for each cluster"),
    Spec("staged_bytes_total", "counter", "Bytes of pushes that landed", "rises with each push", (), "bytes"),
    Spec("cluster_staged_bytes_total", "counter", "The same by cluster, of those that pushed last",
         "alike for all clusters", ("cluster",), "bytes"),
    Spec("staged_pushes_total", "counter", "Pushes that were complete here", "one a round and cluster"),
    Spec("served_bytes_total", "counter", "Bytes of versions that were sent", "rises with each pull", (), "bytes"),
    Spec("refused_messages_total", "counter", "Data messages that were refused, by code (docs/protocol.md)",
         "BUSY and UNKNOWN_PUSH a few; CHUNK, KEY and MALFORMED never", ("code",)),
    Spec("refused_connections_total", "counter", "Connections that were refused or closed", "no increase"),
)  # fmt: skip
