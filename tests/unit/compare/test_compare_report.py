"""The tables, the sentences below them, and compare.json."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from support.compare_records import committed, push, record

from dips.lab.compare.record import RunRecord
from dips.lab.compare.report import Comparison, by_method, course_table, loss_table, loss_text, readings, to_json
from dips.lab.compare.setup import load_setup

SETUP = load_setup("small")


def comparison(records: Sequence[RunRecord], inject: str = "", clean: Sequence[RunRecord] = ()) -> Comparison:
    ideal = SETUP.ideal_tokens
    seeds = tuple(sorted({record.seed for record in records}))
    summaries, before = by_method(records, ideal), by_method(clean, ideal)
    return Comparison(SETUP, seeds, inject, "dips compare", summaries, records, before)


def shown(table: Table) -> list[list[str]]:
    """The table's words, row by row, as on a terminal of 80 columns."""
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table)
    lines = [line.split() for line in capture.get().splitlines()]
    return [words for words in lines if words and not set(words[0]) <= {"─", "╶"}]


THREE = [record("dp", 1, 2.2, 120.0), record("diloco-clip", 1, 2.25, 110.0), record("dips", 1, 2.3, 100.0)]


def test_losses_stand_beside_the_references() -> None:
    title, above, head, dp, clip, dips = shown(loss_table(comparison(THREE)))
    assert " ".join(title) == "held-out loss after 786.4k tokens"
    assert " ".join(above) == "minus minus virtual of"
    assert " ".join(head) == "method loss diloco-clip dp time ideal speed"
    assert dp[:4] == ["dp", "2.200", "-0.050", "+0.000"]
    assert clip[-1] == "1.00x"
    assert dips[:4] == ["dips", "2.300", "+0.050", "+0.100"]
    assert dips[-1] == "1.10x"


def test_runs_that_ended_early_are_shown_as_what_they_are() -> None:
    found = comparison([*THREE, record("async", 1, None)])
    *_, row = shown(loss_table(found))
    assert " ".join(row) == "async not finite - - - - -", "nor a time that would look short"
    assert row[-2:] == ["-", "-"], "neither a share of ideal nor a speed of what has not finished"
    assert any("Not finite: async" in sentence for sentence in readings(found))
    assert (
        loss_text(by_method([record(), record(seed=2, loss=None)], SETUP.ideal_tokens)["dips"]) == "not finite (1 of 2)"
    )
    found = comparison([*THREE, record("paper-literal", 1, None, ended="locked out")], "nan")
    assert loss_text(found.summaries["paper-literal"]) == "locked out"
    (told,) = [sentence for sentence in readings(found) if "paper-literal" in sentence]
    assert told == "Locked out: paper-literal: the penalty refused every push from some time on, good ones too."
    both = comparison([record(seed=1, loss=None), record("edit", 1, None, ended="locked out")])
    assert "Not finite: dips: the model was lost during the run. Locked out: edit: the" in " ".join(readings(both))


def test_data_parallel_has_no_rounds_and_the_columns_fit() -> None:
    title, _, head, clip, dips = shown(course_table(comparison(THREE)))
    assert " ".join(title) == "rounds and pushes"
    assert head == ["method", "rounds", "merged", "stale", "most", "clip", "out", "alarms"]
    assert clip[0] == "diloco-clip"
    assert dips == ["dips", "2", "1.50", "1.00", "2", "50%", "0", "0"]


def test_with_injection_flags_are_counted_and_the_clean_run_stands_beside() -> None:
    rounds = (committed(1, push("a", 1), push("b", 1, excluded=True, bad=True)), committed(2, push("b", 2, bad=True)))
    spoilt = record("dips", 1, 2.37, judged=rounds, voids=1)
    found = comparison([spoilt], "x30", clean=[record("dips", 1, 2.3)])
    _, above, head, row = shown(course_table(found))
    assert above == ["bad", "good", "bad"]
    assert head[2:] == ["void", "merged", "stale", "most", "clip", "out", "out", "in", "alarms"]
    assert row[-4:] == ["1", "0", "1", "0"]
    assert "+0.070" in shown(loss_table(found))[3]
    assert any(sentence.startswith("bad out: excluded spoilt pushes") for sentence in readings(found))


def test_compare_json_has_null_for_what_is_not_finite() -> None:
    found = comparison([*THREE, record("async", 1, None)])
    plain = json.loads(json.dumps(to_json(found), allow_nan=False))
    lost = plain["methods"]["async"]
    assert (lost["loss_mean"], lost["seeds"]["1"]["loss"], lost["not_finite"]) == (None, None, 1)
    assert lost["seeds"]["1"]["ended"] == "diverged"
    assert plain["methods"]["dp"]["seeds"]["1"]["flags"] == {"true": None, "false": None, "missed": None}
