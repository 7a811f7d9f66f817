"""`dips simulate`: simulates a run at full size under a virtual clock, or many small runs with every fault."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from dips.core.errors import ConfigError
from dips.core.units import format_bytes, format_count, format_seconds
from dips.lab.sim.scale.scenario import find, load_scenario, shipped

if TYPE_CHECKING:
    from dips.lab.sim.scale.run import ClusterReport, ScaleReport

# ---- simulate picture ------------------------------------------------------------------------------------------------
#
# Draws a simulated run: which clusters' accelerators took part when, like Figure 8 of the Di-PS paper.
#
# It must draw only what the report holds. Colours are those of Okabe and Ito, which colour-blind people can
# distinguish.


_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000", "#999999")
_INCHES = (9.0, 5.0)
_DPI = 130
_DAY_S = 86_400.0


def draw_resources(path: Path, report: ScaleReport) -> None:
    """Write the picture as PNG: accelerators that take part, cluster upon cluster, over the run's days."""
    from dips.lab.compare.pictures import empty_figure

    figure = empty_figure(_INCHES, _DPI)
    axes = figure.add_subplot()
    times_s, stacks = stacked(report)
    days = [at_s / _DAY_S for at_s in times_s]
    below = [0] * len(days)
    for index, cluster in enumerate(report.clusters):
        above = [low + height for low, height in zip(below, stacks[cluster.id], strict=True)]
        colour = _COLOURS[index % len(_COLOURS)]
        axes.fill_between(days, below, above, step="post", color=colour, linewidth=0, label=cluster.id)
        below = above
    axes.set_xlabel("days")
    axes.set_ylabel("accelerators that take part")
    axes.set_xlim(0, report.hours / 24)
    axes.set_ylim(0, None)
    axes.grid(alpha=0.3)
    axes.set_title(f"{report.scenario}: {report.share_of_ideal:.1%} of ideal, overhead {report.overhead_total:.1%}")
    figure.legend(loc="outside lower center", ncols=min(9, len(report.clusters)), fontsize="small", frameon=False)
    figure.savefig(path, format="png")


def stacked(report: ScaleReport) -> tuple[list[float], dict[str, list[int]]]:
    """All times at which a cluster came or went, and each cluster's accelerators from then on."""
    end_s = report.hours * 3600.0
    times_s = sorted({at_s for cluster in report.clusters for at_s, _ in cluster.presence} | {0.0, end_s})
    stacks: dict[str, list[int]] = {}
    for cluster in report.clusters:
        changes = dict(cluster.presence)
        here, heights = False, []
        for at_s in times_s:
            here = changes.get(at_s, here)
            heights.append(cluster.npus if here else 0)
        stacks[cluster.id] = heights
    return times_s, stacks


# ---- simulate --------------------------------------------------------------------------------------------------------


PROGRESS_EVERY_S = 1.0


def simulate(
    scenario: Annotated[
        str | None, typer.Argument(metavar="FILE|NAME", help="A set-up: a .toml file, or one that --list names.")
    ] = None,
    hours: Annotated[float | None, typer.Option(min=0.01, help="Simulated hours (default: the file's).")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of failures and speeds (default: the file's).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole report on standard output.")] = False,
    picture: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Draw who was there when, like the paper's Figure 8.")
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="Name the set-ups that come with dips.")] = False,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Instead: so many small runs with all faults and all invariants.")
    ] = None,
) -> int:
    """Simulate a run at full size: the real state machines of master, slaves and clusters under a virtual clock.

    Transfers, updates, snapshots and restarts take as long as the set-up's rates say. Nothing is trained. A month of
    nine clusters takes two to three minutes.
    """
    if list_all:
        return _list()
    if seeds is not None:
        if scenario is not None:
            raise ConfigError("--seeds makes its own small runs: leave the set-up out, or leave --seeds out")
        from dips.lab.sim import seeds as run_seeds

        return run_seeds.main(["--seeds", str(seeds), "--first", str(seed or 0)])
    if scenario is None:
        raise ConfigError(f"no set-up is named: give a .toml file, or one of {', '.join(shipped())}")
    chosen = load_scenario(find(scenario), hours=hours, seed=seed)
    if picture is not None:
        _check_picture(picture)
    from dips.lab.sim.scale.run import simulate as simulate_scenario  # all machines: not for --help or a mistake

    began_s = time.monotonic()
    report = simulate_scenario(chosen, _Progress(chosen.run.hours))
    print(f"simulated in {format_seconds(time.monotonic() - began_s)}", file=sys.stderr)
    if picture is not None:
        draw_resources(picture, report)
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        _show(report, picture)
    return 0


def _list() -> int:
    for name in shipped():
        print(f"{name}: {load_scenario(find(name)).run.about}")
    return 0


def _check_picture(path: Path) -> None:
    """Check it before a long simulation. Raises ConfigError, or ModuleNotFoundError, which the command reports."""
    import matplotlib  # noqa: F401

    if not path.parent.is_dir():
        raise ConfigError(f"--picture {path}: the folder {path.parent} does not exist: make it, or choose another")


class _Progress:
    """One line a second on standard error; on a terminal it overwrites itself."""

    def __init__(self, hours: float) -> None:
        self._hours = hours
        self._said_s = time.monotonic()
        self._began_s = self._said_s

    def __call__(self, share: float, tokens: int) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s < PROGRESS_EVERY_S and share < 1:
            return
        self._said_s = now_s
        left_s = (now_s - self._began_s) * (1 - share) / share
        line = f"{share:4.0%}  hour {share * self._hours:.0f} of {self._hours:g}  {format_count(tokens)} tokens"
        if share < 1:
            line += f"  about {format_seconds(left_s)} left"
        terminal = sys.stderr.isatty()
        end = "\n" if share >= 1 or not terminal else ""
        print(f"\r{line:<70}" if terminal else line, end=end, file=sys.stderr, flush=True)


def _show(report: ScaleReport, picture: Path | None) -> None:
    console = Console(file=sys.stdout, highlight=False)
    console.print(f"{report.scenario}: {report.about} (seed {report.seed}, {report.hours:g} h)")
    table = _table("the run", "figure", "here", "stated")
    stated = format_count(report.paper_tokens) if report.paper_tokens else ""
    table.add_row("tokens", format_count(report.tokens), stated)
    table.add_row("tokens/s", format_count(round(report.tokens_per_s)))
    table.add_row("share of ideal (no failure, no overhead)", f"{report.share_of_ideal:.1%}")
    paper = f"{report.paper_overhead:.0%}" if report.paper_overhead else ""
    table.add_row("overhead, of the time that clusters took part", f"{report.overhead_total:.1%}", paper)
    for state, share in report.overhead.items():
        table.add_row(f"  {state}", f"{share:.2%}")
    table.add_row("rounds", ", ".join(f"{count} {kind}" for kind, count in report.rounds.items()))
    table.add_row("clusters merged in a round (mean)", f"{report.merged_mean:.2f}")
    table.add_row("  rounds by clusters merged", _histogram(report.merged))
    table.add_row("staleness in versions: pushes", _histogram(report.staleness))
    table.add_row("failures injected", ", ".join(f"{n} {kind}" for kind, n in report.failures.items()) or "none")
    sent, served = (sum(row[way] for row in report.slave_bytes.values()) for way in ("in", "out"))
    table.add_row("bytes to and from all slaves", f"{format_bytes(sent)}, {format_bytes(served)}")
    console.print(table)
    console.print(_clusters(report.clusters))
    console.print(_downtime(report.clusters))
    if picture is not None:
        console.print(f"picture: {picture}")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _histogram(counts: dict[int, int]) -> str:
    return "  ".join(f"{key}: {count}" for key, count in counts.items()) or "none"


def _clusters(clusters: list[ClusterReport]) -> Table:
    columns = ("cluster", "applied", "excluded", "tokens", "failures", "joins", "up", "down", "overhead")
    table = _table("clusters", *columns)
    for c in clusters:
        table.add_row(
            c.id,
            str(c.pushes["applied"]),
            str(c.pushes["excluded"]),
            format_count(c.tokens_applied),
            str(c.failures),
            str(c.joins),
            format_bytes(c.up_bytes),
            format_bytes(c.down_bytes),
            f"{sum(c.overhead.values()):.1%}",
        )
    return table


def _downtime(clusters: list[ClusterReport]) -> Table:
    causes = list(clusters[0].downtime_s)
    table = _table("downtime by cause", "cluster", *causes, "of its time")
    for c in clusters:
        down_s = sum(c.downtime_s.values())
        total_s = sum(c.seconds.values()) - c.seconds.get("not scheduled", 0.0)
        share = f"{down_s / total_s:.2%}" if total_s else "-"
        table.add_row(c.id, *(format_seconds(round(c.downtime_s[cause])) for cause in causes), share)
    return table
