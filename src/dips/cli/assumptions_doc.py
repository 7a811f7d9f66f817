"""Writes docs/assumptions.md from the table of core/assumptions.py; a test checks that the page is current."""

from __future__ import annotations

import sys
import textwrap

from dips.cli.generated_page import keep_current
from dips.core.assumptions import ROLES, Assumption

WIDTH = 118

_INTRODUCTION = """\
# What settings assume of each other

Written by `make docs` from `core/assumptions.py`. Each line is an inequality between settings of one process. It is
checked when the settings are read, before anything starts; settings that break one are refused with the name, the
values, what would go wrong and what to change, and exit code 2. A line that names `grace_s` does not apply while it
is `auto`.

Only two times are chosen: `heartbeat_s` (2 s), by which dead peers are distinguished from live ones, and
`round_timeout_s` (30 s), the time for slaves to answer a step of a round. All others are `auto` and follow from these
two, or from what is measured ([decision 0020](decisions/0020-recovery-times.md)):

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

Where one of them is set, those that must not be shorter or longer follow it."""

_TITLES = {"master": "Master", "slave": "Slave", "worker": "Cluster"}


def page() -> str:
    """The text of docs/assumptions.md."""
    parts = [_INTRODUCTION]
    for role, rows in ROLES.items():
        parts.append(f"## {_TITLES[role]}")
        parts.append("\n".join(map(_item, rows)))
    return "\n\n".join(parts) + "\n"


def _item(row: Assumption) -> str:
    text = f"`{row.text}` ({row.name}): {row.why}. Otherwise {row.harm}; {row.remedy}. Checked in `{row.checked}`."
    return textwrap.fill(
        text, WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def main() -> int:
    return keep_current(__doc__, lambda _: page())


if __name__ == "__main__":
    sys.exit(main())
