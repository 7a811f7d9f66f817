"""The loss picture holds what the tapes hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dips.core.ids import Version
from dips.local.log_files import LossPoint
from dips.local.report import CLUSTER, SLAVE, Fault, Moment, PlannedFault, draw_losses
from dips.master.page.history import HeldoutPoint

TRAINING = {
    name: [LossPoint(1000 * step, 5.5 - 0.03 * step + 0.1 * k) for step in range(100)] for k, name in enumerate("abcd")
}
HELDOUT = [HeldoutPoint(Version(1, v), 10_000 * v, 5.5 - 0.3 * v) for v in range(10)]
FAULTS = [
    Fault(PlannedFault(CLUSTER, "b", 0.35), 1, "1.2", Moment(60.0, 35_000, 3), Moment(67.0, 41_000, 4), "1.5"),
    Fault(PlannedFault(SLAVE, "s1", 0.6), 2, "1.1", Moment(110.0, 60_000, 6)),
]


def test_it_shows_what_the_tapes_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_args, **_options: drawn.append(self))
    draw_losses(tmp_path / "loss.png", TRAINING, HELDOUT, FAULTS, "four clusters")
    axes = drawn[0].axes[0]
    labels = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert sum(label.startswith("cluster ") for label in labels) == 4
    assert any("held-out" in label and "2.800" in label for label in labels)
    assert "tokens" in axes.get_xlabel()
    assert "nats per byte" in axes.get_ylabel()
    notes = [text.get_text() for text in axes.texts]
    assert "cluster b killed with SIGKILL at 60 s, back at 67 s" in notes
    assert "slave s1 killed with SIGKILL at 110 s, not back" in notes
    *clusters, held_out = axes.get_lines()[:5]
    assert len({(line.get_color(), str(line.get_linestyle())) for line in clusters}) == 4
    assert len({str(line.get_linestyle()) for line in clusters}) == 4, "colours may be hard to tell apart"
    assert np.asarray(held_out.get_xdata()).tolist() == [point.tokens for point in HELDOUT]
    assert np.asarray(held_out.get_ydata()).tolist() == [point.loss for point in HELDOUT]
