"""`dips compare`: its options and its output."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from dips.core.clock import SystemClock
from dips.core.errors import ConfigError
from dips.core.units import parse_count
from dips.lab.compare.figures import FIGURES, figure_json, run_figure, tell_figure, write_figure
from dips.lab.compare.jobs import ComparisonJob, Results, gather, jobs_of, on_device, write_json
from dips.lab.compare.methods import KINDS, METHODS, find_method
from dips.lab.compare.pictures import draw_cosines, draw_curves, draw_norms
from dips.lab.compare.record import RunRecord
from dips.lab.compare.report import (
    NOTHING,
    REFERENCES,
    Comparison,
    by_method,
    course_table,
    loss_table,
    readings,
    to_json,
)
from dips.lab.compare.setup import ComparisonSetup, load_setup, shipped
from dips.lab.compare.speed import ROUNDS, SPEED_FIGURES, run_speed, speed_json, tell_speed, write_speed

DEFAULT_METHODS = "dp,diloco,diloco-clip,async,paper,safe,dynamic,dips"
DEFAULT_SETUP = "small"
ALL = "all"
ALL_FIGURES = tuple(sorted((*FIGURES, *SPEED_FIGURES), key=lambda name: int(name.rstrip("b"))))

_NEEDED = ("matplotlib", "torch", "numba")

T = TypeVar("T")

_WIDE = 120


def compare(
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME", show_default=DEFAULT_METHODS, help="The methods to compare; `all`; --list names them."
        ),
    ] = None,
    seeds: Annotated[str, typer.Option(metavar="N,N", help="Seeds of first parameters and order of the text.")] = "1",
    gaps: Annotated[
        str | None,
        typer.Option(metavar="%,%", help="How much longer each cluster's step takes; one number for each cluster."),
    ] = None,
    inner_steps: Annotated[int | None, typer.Option(min=1, help="H: inner steps between two pushes.")] = None,
    tokens: Annotated[str | None, typer.Option(metavar="COUNT", help="Tokens of each run, such as 786k.")] = None,
    lr: Annotated[
        float | None,
        typer.Option(metavar="RATE", help="Learning rate of the inner optimizer, the same for all methods."),
    ] = None,
    inner_optimizer: Annotated[
        str | None, typer.Option(metavar="adamw|muon", help="The inner optimizer, the same for all methods.")
    ] = None,
    outer_lr: Annotated[
        float | None,
        typer.Option(
            metavar="RATE",
            show_default="the set-up's",
            help="Learning rate of the outer step, unless a method has its own.",
        ),
    ] = None,
    outer_momentum: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            show_default="the set-up's",
            help="Momentum of the outer step, unless a method has its own.",
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", show_default="Python's own", help="Text file or folder; again for more."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            show_default=",".join(REFERENCES),
            help="The methods whose losses the others' are compared with, seed by seed.",
        ),
    ] = None,
    inject: Annotated[
        str | None,
        typer.Option(metavar="|".join(KINDS), help="Corrupt the pushes of one cluster in this way, after the warm-up."),
    ] = None,
    setup: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", show_default=DEFAULT_SETUP, help="Speeds, links, model, hyper-parameters."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|cuda|auto",
            show_default="the set-up's",
            help="Where models are trained; auto: a CUDA device when there is one.",
        ),
    ] = None,
    figure: Annotated[
        str | None,
        typer.Option(metavar="|".join(ALL_FIGURES), help="Instead: reproduce a figure of the Di-PS paper."),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=6,
            show_default=str(ROUNDS),
            help="Rounds of an average cluster in which figures 9 and 10 measure; more where the slowest needs them.",
        ),
    ] = None,
    run_dir: Annotated[Path, typer.Option(metavar="DIR", help="Where results go and are kept.")] = Path("runs/compare"),
    jobs: Annotated[
        int | None, typer.Option(min=1, show_default="as many as cores", help="Runs at a time, a process each.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Repeat the runs that are kept from before, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="compare.json on standard output, no tables.")] = False,
    list_all: Annotated[
        bool, typer.Option("--list", help="Name the methods and set-ups, with their settings.")
    ] = False,
) -> int:
    """Train a small model with several methods, side by side: what does each cost in loss, and win in time?

    Every method trains the same byte model on the same text for the same number of tokens, on clusters of the same
    speeds and links. Master, slaves and clusters are the real ones, as `dips master` and `dips slave` run
    them, under a virtual clock. So the loss is measured, and the time is that of the set-up, not of this machine.

    A run takes about a minute of one core (786k tokens); methods x seeds runs are done, as many at a time as there are
    cores. Ends with two tables, compare.json, and pictures in the run's directory. Finished runs are kept: the same
    command goes on where it was interrupted, at the beginning of the runs that had not ended, and a second one that
    shares runs with it does not repeat them.

    `--setup larger` trains 10.7 million parameters: more than an hour of one core for a run, or a CUDA device where
    PyTorch finds one. Its figures 2b, 7 and 12 have fewer lines, six runs together.

    How to read it: compare losses with `diloco-clip` (all clusters wait for each other) and `dp` (they communicate in
    every step), and times with the share of ideal. A difference below the spread of the seeds says nothing.
    """
    if list_all:
        return _list(as_json)
    if inject is not None and inject not in KINDS:
        raise ConfigError(f"--inject {inject!r} is not known: choose one of {', '.join(KINDS)}")
    names, numbers = methods_of(methods or DEFAULT_METHODS), seeds_of(seeds)
    place = _Place(run_dir, jobs or len(os.sched_getaffinity(0)), again, as_json)
    if rounds is not None and figure not in SPEED_FIGURES:
        raise ConfigError(f"--rounds is for the figures {' and '.join(SPEED_FIGURES)}: leave it out")
    outer = {"outer_lr": outer_lr, "outer_momentum": outer_momentum}
    if figure is None:
        chosen = on_device(
            setup_of(setup or DEFAULT_SETUP, gaps, inner_steps, tokens, lr, inner_optimizer, outer), device
        )
        references = references_of(against, names)
        return _compare_methods(place, chosen, names, numbers, data or (), inject or "", references)
    check_figure(figure, {"--methods": methods, "--gaps": gaps, "--against": against, "--inject": inject})
    if figure in FIGURES:
        chosen = on_device(
            setup_of(setup or DEFAULT_SETUP, None, inner_steps, tokens, lr, inner_optimizer, outer), device
        )
        check_place(run_dir)
        losses = run_figure(FIGURES[figure], chosen, numbers, data or (), place.gather)
        _tell(place, figure_json(losses), partial(tell_figure, losses), write_figure(losses, run_dir))
        return 0
    several = seeds if len(numbers) > 1 else None
    useless = {
        "--tokens": tokens, "--lr": lr, "--inner-optimizer": inner_optimizer, "--data": data, "--device": device,
        "--outer-lr": outer_lr, "--outer-momentum": outer_momentum,
        "--again": again or None, "several --seeds": several,
    }  # fmt: skip
    check_figure(figure, useless)
    shown = SPEED_FIGURES[figure]
    setups = [setup_of(name, None, inner_steps, None) for name in ([setup] if setup else shown.setups)]
    check_place(run_dir)
    found = run_speed(shown, setups, numbers[0], rounds or ROUNDS, place.processes, Console(stderr=True), SystemClock())
    _tell(place, speed_json(shown, found), partial(tell_speed, shown, found), write_speed(shown, found, run_dir))
    return 0


@dataclass(frozen=True)
class _Place:
    """Where and how everything is run."""

    run_dir: Path
    processes: int
    again: bool
    as_json: bool

    def gather(self, jobs: Sequence[ComparisonJob]) -> list[RunRecord]:
        return gather(jobs, self.run_dir, self.processes, Console(stderr=True), SystemClock(), again=self.again)


def _compare_methods(
    place: _Place,
    setup: ComparisonSetup,
    methods: Sequence[str],
    seeds: Sequence[int],
    data: Sequence[Path],
    inject: str,
    references: tuple[str, ...],
) -> int:
    check_place(place.run_dir)
    jobs = jobs_of(methods, seeds, setup, data, inject)
    records, results = place.gather(jobs), Results(place.run_dir)
    spoilt = [job for job in jobs if job.inject]
    kept = [record for job in spoilt if (record := results.load(replace(job, inject=""))) is not None]
    found = Comparison(
        setup=setup,
        seeds=tuple(seeds),
        inject=inject if spoilt else "",
        command=shlex.join(["dips", *sys.argv[1:]]),
        summaries=by_method(records, setup.ideal_tokens),
        records=records,
        clean=by_method(kept, setup.ideal_tokens),
        references=references,
    )
    plain, file = to_json(found), place.run_dir / "compare.json"
    write_json(file, plain)
    paths = [place.run_dir / f"{name}.png" for name in ("loss-tokens", "loss-time", "norms", "cosines")]
    title = f"{found.setup.name}, H {found.setup.run.inner_steps}"
    title += f", one cluster's pushes corrupted ({found.inject})" if found.inject else ""
    labelled = [(record.method, record) for record in found.records]
    draw_curves(paths[0], labelled, "tokens", title)
    draw_curves(paths[1], labelled, "virtual_s", title)
    first = [record for record in found.records if record.seed == found.seeds[0]]
    draw_norms(paths[2], first)
    draw_cosines(paths[3], first)
    _tell(place, plain, partial(_tell_comparison, found), [file, *paths])
    return 0


# ---- options ----
#
# Texts of the command line to values, with a sentence for every mistake.


def setup_of(
    name: str,
    gaps: str | None,
    inner_steps: int | None,
    tokens: str | None,
    lr: float | None = None,
    inner_optimizer: str | None = None,
    master: Mapping[str, float | None] | None = None,
) -> ComparisonSetup:
    """The set-up with the command line's changes; master: settings of [master], None: as it is. Raises ConfigError."""
    return load_setup(name).with_overrides(
        gaps=None if gaps is None else _numbers("--gaps", gaps, _gap, "0,16,33,50"),
        inner_steps=inner_steps,
        tokens=None if tokens is None else _tokens(tokens),
        lr=lr,
        inner_optimizer=inner_optimizer,
        master={name: value for name, value in (master or {}).items() if value is not None},
    )


def methods_of(text: str) -> tuple[str, ...]:
    """Names of methods, each once. Raises ConfigError with the nearest name for one that is not known."""
    if text.strip() == ALL:
        return tuple(METHODS)
    return _methods_named("--methods", text, DEFAULT_METHODS)


def references_of(text: str | None, methods: Sequence[str]) -> tuple[str, ...]:
    """The methods to compare with. Raises ConfigError for one that is not among `methods`."""
    if text is None:
        return REFERENCES
    names = _methods_named("--against", text, ",".join(REFERENCES))
    for name in names:
        if name not in methods:
            raise ConfigError(f"--against {name}: that method is not in --methods {','.join(methods)}: add it there")
    return names


def _methods_named(option: str, text: str, example: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"{option} {text!r} names no method: write names with commas, such as {example}")
    return tuple(dict.fromkeys(find_method(name).name for name in names))


def seeds_of(text: str) -> tuple[int, ...]:
    """Seeds, each once. Raises ConfigError."""
    return tuple(dict.fromkeys(_numbers("--seeds", text, _seed, "1,2,3")))


def check_figure(figure: str, given: Mapping[str, object]) -> None:
    """Check the figure. Raises ConfigError for an unknown one, and for an option in `given` that a figure sets
    itself."""
    if figure not in ALL_FIGURES:
        raise ConfigError(f"--figure {figure!r} is not known: choose one of {', '.join(ALL_FIGURES)}")
    for option, value in given.items():
        if value is not None:
            raise ConfigError(f"figure {figure} does not use {option}: leave {option} out, or leave --figure out")


def check_place(run_dir: Path) -> None:
    """Check the run's folder and packages before the training. Raises ConfigError, or ModuleNotFoundError, which the
    command reports."""
    for package in _NEEDED:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--run-dir {run_dir} cannot be made: {error.strerror}: choose another folder") from error


def _numbers(option: str, text: str, parse: Callable[[str], T], example: str) -> tuple[T, ...]:
    try:
        return tuple(parse(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: write numbers with commas, such as {example}") from error


def _gap(percent: str) -> float:
    """0.16 from "16" or "16 %"."""
    return float(percent.strip().removesuffix("%")) / 100


def _seed(text: str) -> int:
    seed = int(text)
    if seed < 0:
        raise ValueError("negative")
    return seed


def _tokens(text: str) -> int:
    try:
        return parse_count(text)
    except ConfigError as error:
        raise ConfigError(f"--tokens: {error}") from error


# ---- output ----


def _list(as_json: bool) -> int:
    if as_json:
        print(json.dumps(_listed(), allow_nan=False))
        return 0
    console = Console(highlight=False, width=_WIDE)
    methods = Table(title="methods", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("name", "what it is", "as settings of dips master (+ of each cluster)"):
        methods.add_column(column, no_wrap=column == "name")
    for method in METHODS.values():
        flags = " ".join(method.flags()) or NOTHING
        if of_clusters := method.flags_of_clusters():
            flags += f" (+ {' '.join(of_clusters)})"
        methods.add_row(method.name, f"{method.title}: {method.about}", flags)
    console.print(methods)
    for name in shipped():
        console.print(f"set-up {name}: {load_setup(name).run.about}")
    return 0


def _listed() -> dict[str, Any]:
    methods = {
        m.name: {
            "title": m.title,
            "about": m.about,
            "flags_of_master": m.flags(),
            "flags_of_clusters": m.flags_of_clusters(),
        }
        for m in METHODS.values()
    }
    return {"methods": methods, "setups": {name: load_setup(name).to_json() for name in shipped()}}


def _tell(place: _Place, plain: dict[str, Any], for_people: Callable[[Console], None], files: Sequence[Path]) -> None:
    """Print on standard output: JSON for programs, or text for people with the names of the files below."""
    if place.as_json:
        print(json.dumps(plain, allow_nan=False))
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
    for_people(console)
    console.print()
    for path in files:
        console.print(str(path), soft_wrap=True, markup=False)


def _tell_comparison(found: Comparison, console: Console) -> None:
    for what, value in found.setup.describe():
        console.print(f"{what:<11} {value}", soft_wrap=True, markup=False)
    if found.inject:
        console.print(f"{'injected':<11} {found.inject}, into pushes of cluster {found.setup.cluster_names[0]}")
    console.print(f"{'seeds':<11} {', '.join(map(str, found.seeds))}\n")
    for table in (loss_table(found), course_table(found)):
        if table.row_count:
            console.print(table, "")
    for sentence in readings(found):
        console.print(sentence, markup=False)
