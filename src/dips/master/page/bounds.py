"""All bounds of the status page, with their costs.

The page's costs for the run must never grow: memory, time of the control loop, connections.
"""

from __future__ import annotations

SAMPLE_S = 1.0
"""The period of samples of the state: each takes 0.2 ms of the control loop with 8 clusters, about 1 ms with 64."""

MAX_STREAMS = 32
"""The most open pages. Each costs one connection and, for each sample, one write of a few KB."""

MAX_CONNECTIONS = 256
"""The most connections of all kinds; further ones are closed at once. 50 KB each with TLS: 13 MB."""

SILENT_S = 15.0
"""A connection that has not sent a whole request by then is closed."""

WRITE_S = 20.0
"""A stream whose reader takes nothing for this long is ended; the browser connects again."""

MAX_ROWS = 1200
"""The most samples of the curves. When they are full, every second one is dropped, and from then on samples are taken
half as often: 1200 rows are enough for the first minutes of a run and for its third month."""

CHARTED_CLUSTERS = 24
"""The most clusters whose losses are kept and drawn: 24 x 1200 numbers, 230 KB. The page says when there are more."""

MAX_HELDOUT = 600
"""The most held-out losses, reduced in the same way."""

MAX_EVENTS = 400
"""The most lines of the timeline, 100 KB."""

MAX_ROUNDS = 240
"""The most rounds of the timeline."""

MAX_TEXT = 300
"""The most characters of a text from outside: reasons, notes, names."""

TAPE_TAIL_BYTES = 512 * 1024
"""Bytes at the end of the master's tape, read once at the start, so that the timeline survives a restart."""
