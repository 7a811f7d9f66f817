"""The metrics of a cluster's process; docs/metrics.md is made from this list. Labels: slaves of the run, fixed words.

HELDOUT has the metrics of `dips eval --follow`, which does not train.
"""

from __future__ import annotations

from dips.core.observe.metrics import CERTIFICATE, Spec

PREFIX = "dips_worker_"

_SLAVE = ("slave",)
_LINK = ("slave", "direction")

METRICS: tuple[Spec, ...] = (
    # ---- the session ----
    Spec("info", "gauge", "1; the labels say which cluster of which run", "1", ("run", "cluster", "version")),
    Spec("phase", "gauge", "1 for the phase that the session is in", "training most of the time", ("phase",)),
    Spec("waiting", "gauge", "1 while the training loop waits for an exchange or for data",
         "0 most of the time"),
    Spec("waited_seconds_total", "counter", "Time that the training loop waited: for an exchange, or for data",
         "below a tenth of the time", ("what",), "s"),
    Spec("beat_age_seconds", "gauge", "Time since the master last answered a heartbeat", "below two heartbeats (4)",
         (), "s", "it has answered one"),
    Spec("joins_total", "counter", "Times that this process joined, also again after a fence", "1"),
    Spec("calls_total", "counter", "Calls to the master by result: done, refused, failed (no answer)",
         "failed and refused only while the master is restarted", ("result",)),
    Spec("refused_calls_total", "counter", "Calls that the master refused, by code (docs/protocol.md)",
         "FENCED after a restart of the master", ("code",)),
    CERTIFICATE,
    # ---- training ----
    Spec("steps_total", "counter", "Inner steps that this process made", "rises"),
    Spec("tokens_total", "counter", "Tokens that this process trained on", "rises", (), "tokens"),
    Spec("tokens_per_second", "gauge", "Speed, of computing alone, over the last 32 steps", "steady", (), "tokens/s"),
    Spec("steps_per_second", "gauge", "The same in inner steps", "steady", (), "steps/s"),
    Spec("loss", "gauge", "Mean training loss of the last 32 steps", "falls", (), "nats/token", "the loop reports it"),
    Spec("local_steps", "gauge", "Inner steps between two pushes (H_j)", "sync_every, or as the master fits it"),
    Spec("pending_tokens", "gauge", "Tokens trained on that are in no version yet", "below two rounds' worth", (),
         "tokens"),
    Spec("base_version", "gauge", "Version that was pulled last", "follows the published one", (), "",
         "one was pulled"),
    Spec("base_timeline", "gauge", "Timeline of that version", "constant", (), "", "one was pulled"),
    Spec("staleness_versions", "gauge", "Versions that the base is behind the published one", "0 to 2", (), "versions",
         "one was pulled on the published timeline"),
    Spec("verdicts_total", "counter", "Verdicts that this process received", "applied alone", ("verdict",)),
    Spec("stale_pushes_total", "counter", "Pushes whose base was too old or replaced: versions, fence, timeline",
         "no increase", ("kind",)),
    # ---- transfers ----
    Spec("transfers_total", "counter", "Transfers that ended, by direction (push, pull) and result: done, failed",
         "done alone", ("direction", "result")),
    Spec("transfer_seconds", "histogram", "Time of transfers that were done", "below a tenth of a round",
         ("direction",), "s"),
    Spec("push_retries_total", "counter", "Attempts of pushes after the first one", "no increase"),
    Spec("link_bytes_total", "counter", "Parameter bytes that were sent (push, once acknowledged) or fetched (pull)",
         "rises with each push and pull", _LINK, "bytes"),
    Spec("link_resumed_bytes_total", "counter", "Bytes that the slave held already when an attempt began",
         "no increase", _SLAVE, "bytes"),
    Spec("link_bytes_per_second", "gauge", "Rate of the transfer under way, or of the last one",
         "near the link's; a share of it when clusters share one", _LINK, "bytes/s", "there was a transfer"),
    Spec("link_round_trip_seconds", "gauge", "Smallest time from a request to its answer in that transfer",
         "the link's delay", _SLAVE, "s", "there was a transfer"),
    Spec("link_reconnects_total", "counter", "New connections after the slave was silent or closed one", "no increase",
         _SLAVE),
    Spec("link_refusals_total", "counter", "Requests that the slave refused, by code (docs/protocol.md)",
         "UNKNOWN_PUSH a few, when a ticket is faster than its opening", ("slave", "code")),
    # ---- checkpoints ----
    Spec("checkpoint_age_seconds", "gauge", "Time since this process wrote a checkpoint",
         "below two checkpoint_every_s", (), "s", "it wrote one"),
    Spec("checkpoint_seconds", "histogram", "Time to write a checkpoint, during training", "below checkpoint_every_s",
         (), "s"),
)  # fmt: skip

HELDOUT: tuple[Spec, ...] = (
    CERTIFICATE,
    Spec("heldout_loss", "gauge", "Held-out loss of the newest version that was evaluated", "falls", (), "nats/byte",
         "one was evaluated"),
    Spec("heldout_version", "gauge", "That version", "follows the published one", (), "", "one was evaluated"),
    Spec("heldout_tokens", "gauge", "Tokens that it was trained on", "rises", (), "tokens", "one was evaluated"),
    Spec("heldout_age_seconds", "gauge", "Time since that evaluation", "below three publish intervals", (), "s",
         "one was evaluated"),
    Spec("heldout_evaluations_total", "counter", "Versions that were evaluated", "rises"),
)  # fmt: skip
