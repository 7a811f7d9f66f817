"""`make papers ARGS="..."`, or `PYTHONPATH=benchmarks python -m papers`: its options and its output."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dips.core.errors import ConfigError, DipsError
from dips.core.observe.logs import say_last
from dips.lab.compare.jobs import write_json
from papers.papers import PAPERS, Paper
from papers.report import Chapter, chapter, page, report_html, report_json
from papers.source import OUT, Outcome, Runner

ALL = "all"
_NEEDED = ("matplotlib", "ortools")
_NEEDED_BY_RUNS = ("numba", "torch")
"""By the commands of the paper that is no planner's."""


def papers(
    paper: Annotated[
        str, typer.Option(metavar="|".join((*PAPERS, ALL)), help="One paper, or all of them.", show_default=True)
    ] = ALL,
    full: Annotated[
        bool,
        typer.Option(
            "--full/--quick",
            help="Whole sizes, some hours; or small ones, about 15 minutes on two cores, whose numbers are coarse.",
        ),
    ] = False,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the report goes, and results are kept.")] = Path(
        "runs/papers"
    ),
    docs: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Also write a page of Markdown for each paper here.")
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORDS",
            help="Leave out commands that contain these words; may be given several times.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="report.json on standard output.")] = False,
) -> None:
    """Every figure and table of five papers, next to what this project does: one report that anyone can make again.

    The papers are Di-PS, JEEVES, CrossPipe, SpanTrain and ScaleAcross Explorer. Each row of the report has the paper's
    number or statement, ours, the ratio, the command that makes it alone, what was assumed where the paper leaves
    something out, and how it was made: measured with real processes here, simulated with the real state machines,
    computed by a formula, or fitted to the paper.

    Writes report.html (one file, pictures inside) and report.json. What a command printed is kept in the folder and
    used again while nothing that it depends on has changed: after ctrl-C, the same command goes on. Some measurements
    need root, for network namespaces: where they cannot be made, the report says why.

    Figures of a larger model take hours: `--full --without "--setup larger"` leaves them out, and the report says so.

    Exit code 1 if a command failed that should have worked; the report is written all the same.
    """
    try:
        code = _report(paper, full, out, docs, without or [], as_json)
    except DipsError as error:
        say_last(str(error))
        code = error.exit_code
    raise typer.Exit(code)


def _report(paper: str, full: bool, out: Path, docs: Path | None, without: Sequence[str], as_json: bool) -> int:
    chosen = _chosen(paper)
    for package in (*_NEEDED, *(_NEEDED_BY_RUNS if PAPERS["di-ps"] in chosen else ())):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{package} is not installed: `make papers` installs what it needs, and runs this")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    runner = Runner(_folder(out), not full, lambda line: console.print(line, markup=False), tuple(without))
    sources = [source for one in chosen for source in one.sources if full or not source.only_full]
    outcomes = runner.run(sources)
    by_name = {outcome.source.name: outcome for outcome in outcomes}
    chapters = [chapter(one, [by_name[s.name] for s in one.sources if s.name in by_name], runner) for one in chosen]
    written = _write(out, docs, chapters, quick=not full)
    if as_json:
        print(json.dumps(report_json(chapters, not full)))
    else:
        _tell(chapters, outcomes, written, quick=not full)
    return int(any(outcome.failed for outcome in outcomes))


def _chosen(name: str) -> list[Paper]:
    if name != ALL and name not in PAPERS:
        raise ConfigError(f"--paper {name!r} is not known: choose one of {', '.join((*PAPERS, ALL))}")
    return list(PAPERS.values()) if name == ALL else [PAPERS[name]]


def _folder(out: Path) -> Path:
    results = out / "results"
    try:
        results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be made: {error.strerror}: choose another folder") from error
    return results


def _write(out: Path, docs: Path | None, chapters: list[Chapter], *, quick: bool) -> list[Path]:
    files = {out / "report.html": report_html(chapters, quick)}
    if docs is not None:
        files |= {docs / f"{one.paper.name}.md": page(one, quick) for one in chapters}
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}: choose another folder") from error
    write_json(out / "report.json", report_json(chapters, quick), OUT)
    return [*files, out / "report.json"]


def _tell(chapters: list[Chapter], outcomes: list[Outcome], written: list[Path], *, quick: bool) -> None:
    for one in chapters:
        rows = [row for entry in one.entries for row in entry.rows]
        kinds = {kind: sum(row.kind == kind for row in rows) for kind in dict.fromkeys(row.kind for row in rows)}
        counts = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
        print(f"{one.paper.name}: {len(rows)} rows ({counts or 'none'})")
    left_out = [outcome for outcome in outcomes if outcome.why_not]
    for outcome in left_out:
        print(f"without {outcome.source.command(quick)}: {outcome.why_not}")
    print("written: " + ", ".join(map(str, written)))
    if quick:
        print("These are quick numbers; `make papers ARGS=--full` makes those to quote.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the report that a command line asks for; returns the exit code."""
    app = typer.Typer(pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]})
    app.command()(papers)
    try:
        app(arguments, prog_name="python -m papers")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
