"""The commands of the laboratory, which `dips` finds by the entry point of this package (pyproject.toml)."""

from __future__ import annotations

from dips.cli.commands import MODEL, Command

COMMANDS: tuple[Command, ...] = (
    Command(
        "simulate",
        "dips.lab.commands.simulate",
        "A run at full size under a virtual clock: goodput, downtime, bytes.",
        MODEL,
        ("dips simulate paper-33-days --picture resources.png", "dips simulate two-sites --hours 24 --json"),
    ),
    Command(
        "compare",
        "dips.lab.commands.compare",
        "Methods side by side: loss at equal tokens, virtual time, bad clusters.",
        MODEL,
        (
            "dips compare --seeds 1,2,3",
            "dips compare --methods diloco-clip,dips --data ~/texts --gaps 0,50,100 --tokens 300k",
            "dips compare --methods dips,dynamic --inject nan",
            "dips compare --figure 2b --setup larger --run-dir runs/larger",
            "dips compare --list",
        ),
    ),
)
