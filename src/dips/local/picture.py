"""Draws the losses of a run: each cluster's training loss and the held-out loss over the run's tokens.

Colours are those of Okabe and Ito, which colour-blind people can distinguish; line styles differ as well. It
must draw only what the tapes hold: nothing is invented between or beyond the points, beyond a running mean
that it names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dips.local.demo_faults import Fault
from dips.local.tapes import HeldoutPoint, LossPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_STYLES = ("-", "--", "-.", ":")
_MEAN_OF = 9
_INCHES = (9.0, 5.6)
_DPI = 130
_LEGEND_COLUMNS = 3


def draw_losses(
    path: Path,
    training: Mapping[str, Sequence[LossPoint]],
    heldout: Sequence[HeldoutPoint],
    faults: Sequence[Fault] = (),
    title: str = "",
) -> None:
    """Write the picture as PNG. training: cluster id -> its points; all losses in nats per byte."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (name, points) in enumerate(sorted(training.items())):
        _draw_training(axes, index, name, points)
    _draw_heldout(axes, heldout)
    for fault in faults:
        _draw_fault(axes, fault)
    axes.set_xlabel("tokens (bytes of text) applied by the whole run")
    axes.set_ylabel("loss, nats per byte")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.legend(loc="outside lower center", ncols=_LEGEND_COLUMNS, fontsize="small", frameon=False)
    figure.savefig(path, format="png")


def running_mean(points: Sequence[LossPoint], of: int = _MEAN_OF) -> list[float]:
    """The mean of each point's loss and up to `of` - 1 before it."""
    losses = [point.loss for point in points]
    windows = (losses[max(0, i + 1 - of) : i + 1] for i in range(len(losses)))
    return [sum(window) / len(window) for window in windows]


def _draw_training(axes: Axes, index: int, name: str, points: Sequence[LossPoint]) -> None:
    axes.plot(
        [point.tokens for point in points],
        running_mean(points),
        color=_COLOURS[index % len(_COLOURS)],
        linestyle=_STYLES[index % len(_STYLES)],
        linewidth=1.1,
        alpha=0.85,
        label=f"cluster {name}, training (mean of {_MEAN_OF})",
    )


def _draw_heldout(axes: Axes, heldout: Sequence[HeldoutPoint]) -> None:
    tokens, losses = [p.tokens for p in heldout], [p.loss for p in heldout]
    label = "held-out text, published versions"
    if heldout:
        label += f" (last {losses[-1]:.3f})"
    axes.plot(tokens, losses, color="black", linewidth=2.2, marker="o", markersize=3, label=label)


def _draw_fault(axes: Axes, fault: Fault) -> None:
    back = fault.back.tokens if fault.back else None
    axes.axvline(fault.when.tokens, color="#D55E00", linewidth=1.0, linestyle=(0, (4, 3)))
    if back is not None:
        axes.axvspan(fault.when.tokens, back, color="#D55E00", alpha=0.12, linewidth=0)
    until = f", back at {fault.back.seconds:.0f} s" if fault.back else ", not back"
    axes.annotate(
        f"{fault.what} at {fault.when.seconds:.0f} s{until}",
        xy=(fault.when.tokens, 0.98),
        xycoords=("data", "axes fraction"),
        xytext=(3, 0),
        textcoords="offset points",
        rotation=90,
        fontsize="x-small",
        color="#A04000",
        va="top",
    )
