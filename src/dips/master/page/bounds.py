"""Every bound of the status page in one place, with what it costs.

The page must never cost the run anything that grows: not memory, not time of the control loop, not connections.
"""

from __future__ import annotations

SAMPLE_S = 1.0
"""How often the state is looked at: 0.2 ms of the control loop with 8 clusters, about 1 ms with 64."""

MAX_STREAMS = 32
"""Open pages. Each costs one connection and, for each sample, one write of a few KB."""

MAX_CONNECTIONS = 256
"""Connections of all kinds; further ones are closed at once. 50 KB each with TLS: 13 MB."""

SILENT_S = 15.0
"""A connection that has not sent a whole request by then is closed."""

WRITE_S = 20.0
"""A stream whose reader takes nothing for so long is ended; the browser connects again."""

MAX_ROWS = 1200
"""Samples that the curves are drawn from. When they are full, every second one is dropped, and from then on samples
are taken half as often: 1200 rows hold the first minutes of a run or its third month alike."""

CHARTED_CLUSTERS = 24
"""Clusters whose losses are kept and drawn: 24 x 1200 numbers, 230 KB. The page says so when there are more."""

MAX_HELDOUT = 600
"""Held-out losses, thinned the same way."""

MAX_EVENTS = 400
"""Lines of the timeline, 100 KB."""

MAX_ROUNDS = 240
"""Rounds of the timeline."""

MAX_TEXT = 300
"""Characters of any sentence that somebody else wrote: reasons, notes, names."""

TAPE_TAIL_BYTES = 512 * 1024
"""Of the master's tape, read once at the start, so that the timeline survives a restart."""
