"""Draws a simulated run: which clusters' accelerators took part when, like Figure 8 of the Di-PS paper.

It must draw only what the report holds. Colours are those of Okabe and Ito, which colour-blind people can distinguish.
"""

from __future__ import annotations

from pathlib import Path

from dips.sim.scale.report import ScaleReport

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000", "#999999")
_INCHES = (9.0, 5.0)
_DPI = 130
_DAY_S = 86_400.0


def draw_resources(path: Path, report: ScaleReport) -> None:
    """Write the picture as PNG: accelerators that take part, cluster upon cluster, over the run's days."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
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
