"""The commands whose numbers are compared with those of JEEVES, CrossPipe, SpanTrain and ScaleAcross Explorer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dips.core.errors import DipsError
from papers.findings import Finding, Kind, Told
from papers.source import Picture, Source

PLANNED = ("core", "planner")
OUT = ("--out", "{folder}")
MISSED = 1
"""`dips plan validate` ends so when a number is outside of its tolerance, which the report says of it."""


class Section(NamedTuple):
    """The checks of `dips plan validate` whose settings begin with `about` and whose text has `what` in it: at which
    place of the paper they are, and whether an input of theirs was chosen with that paper's numbers known."""

    about: str
    place: str
    fitted: bool = False
    what: str = ""


SECTIONS: Mapping[str, tuple[Section, ...]] = {
    "jeeves": (
        Section("JEEVES, section 4", "Figure 7", fitted=True),
        Section("JEEVES, sections 2 and 4", "Text"),
        Section("JEEVES, the parts of the gain", "Figure 4", fitted=True),
    ),
    "crosspipe": (
        Section("CrossPipe, section 5.1 (Figure 8)", "Figure 8"),
        Section("CrossPipe, Table 5", "Table 5", fitted=True),
        Section("CrossPipe, Table 6", "Table 6", fitted=True),
        Section("CrossPipe, section 5.2 (Figure 9)", "Figure 9", fitted=True),
    ),
    "spantrain": (
        Section("SpanTrain, section 3.2.2 (Figure 5)", "Figure 5", fitted=True, what="setting "),
        Section("SpanTrain, section 3.2.2 (Figure 5)", "Figure 5"),
        Section("SpanTrain, section 3.2:", "Figure 5"),
        Section("SpanTrain, section 3.3.1 (Figure 6)", "Figure 6", fitted=True, what="over slow links"),
        Section("SpanTrain, section 3.3.1 (Figure 6)", "Figure 6", fitted=True, what="where a message takes"),
        Section("SpanTrain, section 3.3.1 (Figure 6)", "Figure 6"),
        Section("SpanTrain, section 3.3.3 (Figure 7)", "Figure 7"),
        Section("SpanTrain, sections 4.2 and 4.3", "Figure 11", what="second level"),
        Section("SpanTrain, sections 4.2 and 4.3", "Figure 11", what="by (GPT-2)"),
        Section("SpanTrain, sections 4.2 and 4.3", "Figure 9"),
        Section("SpanTrain, section 3.4", "Figure 8"),
        Section("SpanTrain, section 4.4 (Figure 12)", "Figure 12", fitted=True),
    ),
    "scaleacross": (
        Section("ScaleAcross Explorer, sections 3.1 and 5", "Text"),
        Section("ScaleAcross Explorer, 17B dense", "Figure 15", what="FSDP"),
        Section("ScaleAcross Explorer, 17B dense", "Figure 15", what="HSDP"),
        Section("ScaleAcross Explorer, 17B dense", "Figure 15", what="the same at 1:16"),
        Section("ScaleAcross Explorer, 17B dense", "Figure 16", what="ZBV"),
        Section("ScaleAcross Explorer, 17B dense", "Figure 16", what="and slower up to"),
        Section("ScaleAcross Explorer, 17B dense", "Figure 17", what="larger chunks"),
        Section("ScaleAcross Explorer, 17B dense", "Figure 5", what="batch"),
        Section("ScaleAcross Explorer, 17B dense", "Figure 4"),
        Section("ScaleAcross Explorer, 40B MoE", "Figure 7", what="experts"),
        Section("ScaleAcross Explorer, 40B MoE", "Figure 7", what="hardly"),
        Section("ScaleAcross Explorer, 40B MoE", "Figure 7", what="longer by so much"),
        Section("ScaleAcross Explorer, 40B MoE", "Figure 23", what="Sailor"),
        Section("ScaleAcross Explorer, 40B MoE", "Figure 23", what="17.4 to 43.2"),
        Section("ScaleAcross Explorer, 40B MoE", "Figure 8"),
        Section("ScaleAcross Explorer, section 5.2", "Figure 18"),
        Section("ScaleAcross Explorer, section 6.3", "Figure 23", what="40B MoE"),
        Section("ScaleAcross Explorer, section 6.3", "Figure 24"),
        Section("ScaleAcross Explorer, 100K dense, section 6.3", "Figure 26", what="Sailor"),
        Section("ScaleAcross Explorer, 100K dense, section 6.3", "Figure 25"),
        Section("ScaleAcross Explorer, 100K dense", "Figure 6"),
    ),
}


def section_of(paper: str, about: str, what: str) -> Section:
    """The first that fits. Raises DipsError for a check that no section knows."""
    for section in SECTIONS[paper]:
        if about.startswith(section.about) and section.what in what:
            return section
    raise DipsError(f"no place of {paper} is known for {about.splitlines()[0]!r}, {what!r}: add it to SECTIONS")


class Checks:
    """Findings of one paper's checks."""

    def __init__(self, paper: str) -> None:
        self._paper = paper

    def __call__(self, told: Told) -> Iterator[Finding]:
        for check in told:
            yield self._finding(check)

    def _finding(self, check: Mapping[str, Any]) -> Finding:
        first, _, assumed = str(check["about"]).partition("\n")
        section = section_of(self._paper, check["about"], check["what"])
        setting = re.sub(r"^[^,]*, ", "", first)
        assumption = "; ".join(filter(None, [setting.rstrip(".;,"), assumed.replace("\n", " ")]))
        kind = Kind.FITTED if section.fitted else None
        if check["statement"]:
            what = str(check["what"]).removesuffix(": DOES NOT HOLD")
            ours = "holds" if check["ours"] == check["published"] else "does not hold"
            return Finding(section.place, what, "holds", ours, "", None, assumption, kind)
        unit = "%" if check["percent"] else ""
        return Finding(
            section.place, check["what"], check["published"], float(check["ours"]), unit, None, assumption,
            kind,
        )  # fmt: skip


def _nothing(told: Told) -> Iterator[Finding]:
    yield from ()


def _validated(paper: str) -> Source:
    return Source(
        f"validate-{paper}", ("plan", "validate", "--paper", paper), Checks(paper), PLANNED, also_ends_with=(MISSED,)
    )  # fmt: skip


def _timeline(setup: str, place: str, what: str) -> Source:
    picture = Picture(
        place, "timeline.png", f"{what}: when each device computes which microbatch, and what links carry"
    )
    return Source(
        f"timeline-{setup}", ("plan", "make", setup), _nothing, PLANNED, files=OUT, json=False,
        pictures=(picture,),
    )  # fmt: skip


def _map() -> Source:
    points = ("--stages", "4", "--microbatches", "8", "--latency", "0,0.25,0.5,1,2", "--bandwidth", "0,0.25,0.5,1,2")
    caption = "Best schedule by latency and a message's time on its link, and how many times faster than 1F1B it is"
    return Source(
        "map-crosspipe", ("plan", "sweep", *points, "--map"), _nothing, PLANNED, files=OUT, json=False,
        pictures=(Picture("Figure 8", "map.png", caption),),
    )  # fmt: skip


def _groups(setup: str, place: str) -> Source:
    picture = Picture(place, "groups.png", "The power of each device, by the number of its group and subgroup")
    return Source(
        f"groups-{setup}", ("plan", "groups", setup), _nothing, PLANNED, pictures=(picture,), draw=draw_groups
    )


def draw_groups(told: Told, folder: Path) -> None:
    """Write groups.png: the power of each device, in the colour of its group. told: of `dips plan groups --json`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), dpi=100, layout="constrained")
    axes, at = figure.add_subplot(), 0
    places: list[int] = []
    labels: list[str] = []
    for number, group in enumerate(told["groups"], 1):
        for second, subgroup in enumerate(group["subgroups"], 1):
            sites = [part["site"] for part in subgroup["parts"] for _ in range(part["devices"])]
            axes.bar(range(at, at + len(sites)), subgroup["power"], 0.9, color=f"C{number - 1}")
            places += range(at, at + len(sites))
            labels += [f"{number}.{second} {site}" for site in sites]
            at += len(sites)
        at += 1  # a gap between groups
    axes.set_xticks(places, labels, rotation=60, ha="right", fontsize="small")
    axes.set_xlabel("group and subgroup, and the device's site")
    axes.set_ylabel(told["power_unit"])
    axes.set_yscale("log")
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(folder / "groups.png")


def _ways(told: Told) -> Iterator[Finding]:
    stages = {choice["pipeline"]: choice["iteration_s"] for choice in reversed(told["choices"])}
    for n in (4, 8, 16):
        if n in stages:
            what = f"iteration with {n} stages over the best of all splits, latency of one forward pass"
            yield Finding("Figure 12", what, "largely invariant", stages[n] / told["choices"][0]["iteration_s"], "x")


_TRADEOFF = Source("tradeoff-crosspipe", ("plan", "tradeoff", "crosspipe-tradeoff-pp4"), _ways, PLANNED)

JEEVES = (_validated("jeeves"), _timeline("jeeves", "Figure 6", "The schedule that JEEVES' greedy makes"))
CROSSPIPE = (
    _validated("crosspipe"), _map(), _TRADEOFF, _timeline("crosspipe-figure-8", "Figure 8", "The best schedule"),
)  # fmt: skip
SPANTRAIN = (
    _validated("spantrain"), _groups("spantrain-figure-5", "Figure 5"),
    _timeline("spantrain-adapter", "Figure 6", "Groups of devices as stages"),
)  # fmt: skip
SCALEACROSS = (_validated("scaleacross"),)
