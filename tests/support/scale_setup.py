"""Set-ups for the simulation at scale: a small one as TOML, changed by replacing lines."""

from __future__ import annotations

from pathlib import Path

SMALL = """
[run]
about = "two clusters and two slaves, a few hours"
hours = 6

[model]
parameters = "1B"
layers = 8

[data]
total_tokens = "10B"
chunk_tokens = 4_194_304

[slaves]
count = 2
network = "25 Gbps"
memory = "64 GB"
memory_rate = "8 GB/s"
disk_rate = "1 GB/s"
restart = "30 s"

[master]
sync_every = 16
heartbeat_s = "10 s"
round_timeout_s = "5 min"
ticket_ttl_s = "5 min"
verdict_wait_s = "1 h"
grace_s = "5 s"

[[clusters]]
id = "a"
npus = 8
tokens_per_s = 100_000
tokens_per_step = 1_048_576
up = "10 Gbps"
down = "20 Gbps"
copy_rate = "10 GB/s"

[[clusters]]
id = "b"
npus = 4
tokens_per_s = 60_000
tokens_per_step = 1_048_576
up = "10 Gbps"
down = "10 Gbps"
copy_rate = "10 GB/s"
"""


def write_setup(folder: Path, **lines: str) -> Path:
    """The small set-up with lines replaced, name=whole new line; an unknown name must not pass unnoticed."""
    text = SMALL
    for name, line in lines.items():
        found = [old for old in text.splitlines() if old.startswith(f"{name} =")]
        assert found, f"no line {name} in the set-up"
        text = text.replace(found[0], line, 1)
    path = folder / "small.toml"
    path.write_text(text)
    return path
