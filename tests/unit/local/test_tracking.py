"""What a run's master recorded reaches a tracker once, whatever is killed or away meanwhile."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest
from support.tracked_tape import SECRET, Held, TrackedTape

from dips.cli import main
from dips.core.errors import ConfigError, FatalError
from dips.core.observe.tape import Tape
from dips.local.log_files import HELDOUT_TAPE, tape_path
from dips.local.tracking import Tracking, TrackKnobs


def tracking(directory: Path, held: Held) -> Tracking:
    return Tracking(directory, TrackKnobs(to="tensorboard"), held.open)


def test_a_point_has_the_facts_of_its_round(tmp_path: Path) -> None:
    tape, held = TrackedTape(tmp_path), Held()
    tape.rounds(0, 5)
    assert tracking(tmp_path, held).look(0.0)
    (points,) = held.points.values()
    values = dict(points[5].values)
    assert values.pop("round_s") > 0
    assert values.pop("tokens_per_s") > 0
    merged = {"version": 5, "tokens": 6000, "loss": 1 / 6, "clusters": 1, "excluded": 0}
    judged = {"kappa": 0.9, "rho": 1.0, "merged_norm": 0.4}
    of_a = {"loss": 1 / 6, "tokens_per_s": 50.0, "staleness": 2, "tokens": 1000, "push_bytes": 1200, "norm": 0.5}
    assert values == {**merged, **judged, **{f"a/{name}": value for name, value in of_a.items()}}
    assert held.settings == {"run_id": "mine", "outer_lr": 0.7}


def test_neither_restarts_nor_outages_leave_a_gap_or_a_double(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tape, held = TrackedTape(tmp_path), Held()
    tape.rounds(0, 4)
    first = tracking(tmp_path, held)
    assert first.look(0.0)
    held.away = True
    tape.rounds(5, 7)
    assert not first.look(1.0)
    assert not first.look(1.5)  # not before a second has passed
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert SECRET not in caplog.text
    held.away = False
    assert first.look(2.0)
    tape.rounds(8, 9)
    second = tracking(tmp_path, held)  # the first one was killed
    tape.rounds(10, 11)
    assert second.look(3.0)
    assert held.steps() == {"": list(range(12))}
    assert not second.ended
    tape.end()
    assert second.look(4.0)
    assert second.ended


def test_timelines_and_heldout_losses_are_runs_of_their_own(tmp_path: Path) -> None:
    tape, held = TrackedTape(tmp_path), Held()
    tape.rounds(0, 5)
    tape.rounds(4, 6, timeline=2)
    follower = tracking(tmp_path, held)
    assert follower.look(0.0)
    with Tape(tape_path(tmp_path, HELDOUT_TAPE), "worker", HELDOUT_TAPE) as heldout:
        for version, loss in (("1:3", 2.0), ("2:5", float("nan")), ("2:6", 1.5)):
            heldout.write("heldout", "-", version=version, tokens=1, loss=loss)
    assert follower.look(1.0)
    streams = {"": [0, 1, 2, 3, 4, 5], "-timeline-2": [4, 5, 6], "-heldout": [3], "-heldout-timeline-2": [6]}
    assert held.steps() == streams
    assert follower.heldout_is_whole


def test_a_tape_that_is_restored_while_it_is_followed_is_read_again(tmp_path: Path) -> None:
    tape, held, path = TrackedTape(tmp_path), Held(), tmp_path / "master" / "master.tape.jsonl"
    tape.rounds(0, 5)
    backup = path.read_bytes()
    tape.rounds(6, 9)
    follower = tracking(tmp_path, held)
    assert follower.look(0.0)
    path.write_bytes(backup)
    tape.rounds(6, 7, timeline=2)
    assert follower.look(1.0)
    assert held.steps() == {"": list(range(10)), "-timeline-2": [6, 7]}


@pytest.mark.parametrize(
    ("line", "sentence"), [("", "has no tape of a master"), ('{"kind":"publish","wall_s":1}\n', "it was changed")]
)
def test_what_is_no_record_of_a_run_is_told(tmp_path: Path, line: str, sentence: str) -> None:
    if line:
        TrackedTape(tmp_path).rounds(0, 1)
        with (tmp_path / "master" / "master.tape.jsonl").open("a") as tape:
            tape.write(line)
    with pytest.raises(ConfigError, match=sentence):
        tracking(tmp_path, Held()).look(0.0)


class Signals:
    """In place of StopSignals: what happens while the command waits."""

    caught: int | None = None
    events: list[str]
    tape: TrackedTape

    def __enter__(self) -> Signals:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait(self, seconds: float) -> None:
        match self.events.pop(0):
            case "rounds":
                self.tape.rounds(3, 5)
            case "end":
                self.tape.end()
            case "signal":
                self.caught = signal.SIGTERM


@pytest.mark.parametrize(
    ("events", "away", "code", "steps"),
    [
        (["rounds", "end"], False, 0, 6),
        (["rounds", "signal"], False, 0, 6),
        (["rounds", "signal"], True, FatalError.exit_code, 0),
    ],
)
def test_the_command_goes_on_until_the_run_or_a_signal_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[str], away: bool, code: int, steps: int
) -> None:
    tape, held = TrackedTape(tmp_path), Held()
    tape.rounds(0, 2)
    held.away = away
    monkeypatch.setattr(Signals, "events", events, raising=False)
    monkeypatch.setattr(Signals, "tape", tape, raising=False)
    monkeypatch.setattr("dips.cli.logs.StopSignals", Signals)
    monkeypatch.setattr("dips.cli.logs.check_tracker", lambda knobs: None)
    monkeypatch.setattr("dips.cli.logs.Tracking", partial(Tracking, open_one=held.open))
    assert main.run(["track", str(tmp_path), "--to", "tensorboard"]) == code
    assert [step for points in held.steps().values() for step in points] == list(range(steps))
    assert events == []


def test_help_names_the_exit_code_of_rounds_that_are_lacking(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["track", "--help"]) == 0
    assert f"Exit code {FatalError.exit_code}: the signal to end came" in " ".join(capsys.readouterr().out.split())
