"""`dips demo`: its options and its output at the end."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dips.cli.run_options import insecure_asked
from dips.core.clock import SystemClock
from dips.core.ids import Version
from dips.core.units import format_count, format_seconds
from dips.local.demo import FULL_MINUTES, DemoOptions, DemoResult, run_demo
from dips.local.options import MetricsOption
from dips.local.report import failed_checks
from dips.local.view import FittingTable


def demo(
    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data", metavar="PATH", show_default="Python's own", help="Text file or folder; again for more."
        ),
    ] = None,
    clusters: Annotated[int, typer.Option(min=1, max=26, help="How many clusters, of unequal speed.")] = 4,
    slaves: Annotated[int, typer.Option(min=1, max=16, help="How many slaves hold the model.")] = 2,
    minutes: Annotated[float, typer.Option(min=0.3, max=1440.0, help="About how long to train.")] = FULL_MINUTES,
    run_dir: Annotated[Path, typer.Option(metavar="DIR", help="Directory for the run's files.")] = Path("runs/demo"),
    faults: Annotated[bool, typer.Option(help="Kill one cluster and one slave during the run.")] = True,
    parallel: Annotated[
        bool,
        typer.Option(
            "--parallel",
            help="Clusters of several ranks in turn: one process, two FSDP ranks, two tensor-parallel ranks, two "
            "pipeline ranks. All pushes are recorded, and every version is computed again from them at the end.",
        ),
    ] = False,
    cut_link: Annotated[
        bool,
        typer.Option(
            "--cut-link", help="Also cut the link of one cluster for 12 s; needs root and `ip netns` (Linux)."
        ),
    ] = False,
    model_size: Annotated[
        str | None,
        typer.Option(
            metavar="tiny|small|medium|wide",
            show_default="tiny; with --parallel wide, whose heads two ranks can share",
            help="Size of the model.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of first parameters and order of the text.")] = 0,
    record_pushes: Annotated[
        bool, typer.Option("--record-pushes", help="Slaves keep what each round merged, for `dips verify`.")
    ] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Make and use no keys: nothing is encrypted, loopback only.")
    ] = False,
    page: Annotated[bool, typer.Option(help="The status page for browsers, while the run goes on.")] = True,
    metrics: MetricsOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="The report on standard output, progress elsewhere.")] = False,
) -> int:
    """Train a small language model on this machine: one master, slaves, and clusters of unequal speed.

    All are processes of their own. One cluster and one slave are killed during the run and come back. It ends
    with report.json and loss.png in the run's directory, and exit code 0 if everything held that should.
    """
    texts, no_keys = tuple(data or ()), insecure_asked(insecure)
    wanted = DemoOptions(
        texts, clusters, slaves, minutes, run_dir, faults, model_size, seed, record_pushes, no_keys, page, metrics,
        parallel, cut_link,
    )  # fmt: skip
    result = run_demo(wanted, Console(stderr=True), SystemClock())
    if as_json:
        print(json.dumps(result.report, allow_nan=False))
    else:
        _tell(result)
    failed = failed_checks(result.report)
    for name in failed:
        remedy = _REMEDIES.get(name, "")
        print(f"dips: the run ended, but this does not hold: {name.replace('_', ' ')}{remedy}", file=sys.stderr)
    return 1 if failed else 0


_REMEDIES = {"everything_killed_came_back": " (the run waited for it; its log says what it does)"}


def _tell(result: DemoResult) -> None:
    console, report = Console(), result.report
    # What each cluster did, as a table.
    of_ranks = any(cluster["parallel"] for cluster in report["clusters"].values())
    words = ("cluster", "parallelism") if of_ranks else ("cluster",)
    columns = (*words, "gap", "tokens/s", "steps", "tokens", "applied", "excluded", "starts")
    table = FittingTable("clusters", columns, right=set(columns) - set(words))
    for name, cluster in report["clusters"].items():
        table.add_row(
            name,
            *([cluster["parallel"] or "one process"] if of_ranks else []),
            f"{cluster['speed_gap']:.0%}",
            f"{cluster['measured_speed']:.0f}",
            str(cluster["steps"]),
            format_count(cluster["tokens"]),
            str(cluster["pushes_applied"]),
            str(cluster["pushes_excluded"]),
            str(cluster["incarnations"]),
        )
    console.print(table)
    for fault in report["faults"]:
        away = None if fault["back_when"] is None else fault["back_when"] - fault["when"]
        back = "not back" if away is None else f"back after {away:.1f} s"
        tokens = format_count(fault["when_tokens"])
        console.print(f"{fault['what']} at {fault['when']:.0f} s ({tokens} tokens), {back}", highlight=False)
    name = "none" if report["version"] is None else str(Version(report["timeline"], report["version"]))
    last = report["heldout_loss"][-1][1] if report["heldout_loss"] else None
    lines = [
        f"version {name}: {format_count(report['tokens'])} tokens in {format_seconds(report['seconds'])}, "
        f"{report['rounds']} rounds, {report['merged_rounds']} of them merged from two or more clusters",
        f"held-out loss {last:.4f} nats per byte" if last is not None else "held-out loss: not measured",
        f"verified {report['verify']}: {format_count(sum(report['verified'].values()))} records judged "
        f"(dips verify {result.directory.path})",
        f"report   {result.directory.report}",
        f"picture  {result.directory.picture}",
        f"logs     {result.directory.log('master').parent}",
        *([f"page     ended with the run; it was at {result.page_url.partition('?')[0]}"] if result.page_url else []),
        "next:",
        f"  dips export {result.directory.path} --to model.safetensors",
        f"  {shlex.join(['dips', 'eval', 'model.safetensors', *result.evaluation_options])}",
        *own_model(Path.cwd()),
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def own_model(here: Path) -> list[str]:
    """How to go on with a model of one's own; paths from `here`, if this runs from a checkout."""
    root = Path(__file__).parents[3]
    inside = root == here or root in here.parents
    where = Path(os.path.relpath(root, here)) if inside else root
    at = where if (root / _LOOP).is_file() else Path()
    more = "" if (root / _LOOP).is_file() else "  (in the source archive)"
    return [
        "your own model:",
        f"  loop     {at / _LOOP}: put your model and your batches into a copy of it{more}",
        f"  command  dips up {at / _SERVERS}: a master and a slave; the first lines of the file show how loops join",
        f'  page     {at / _PAGE}, "Your own model"',
    ]


_LOOP, _SERVERS, _PAGE = Path("examples/own_loop.py"), Path("examples/server.toml"), Path("docs/start.md")
