"""One report of all papers: report.html with its pictures inside, report.json, and a page of Markdown for each."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dips.core.release import software_versions
from dips.papers.findings import KINDS, Finding, Kind, shown
from dips.papers.papers import ONLY_HERE, Paper, Place
from dips.papers.source import Outcome, Picture, Runner

SCHEMA = "dips-papers/1"
COLUMNS = ("what", "the paper", "here", "ratio", "spread", "how")


@dataclass(frozen=True)
class Row:
    """A finding and how it was made. command: makes it alone."""

    finding: Finding
    kind: Kind
    command: str

    def cells(self) -> tuple[str, ...]:
        one = self.finding
        spread = "" if one.spread is None else f"{one.spread:.0%}"
        here, there = shown(one.ours, one.unit), shown(one.published, one.unit)
        return one.what, there, here, one.ratio, spread, str(self.kind)

    def to_json(self) -> dict[str, Any]:
        one = self.finding
        return {
            "what": one.what, "paper": one.published, "here": one.ours, "unit": one.unit, "ratio": one.ratio,
            "spread": one.spread, "kind": str(self.kind), "command": self.command, "assumption": one.assumption,
        }  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A place with all that stands beside it. missing: commands that gave nothing here, each with the reason."""

    place: Place
    rows: tuple[Row, ...]
    pictures: tuple[tuple[Path, Picture, str], ...]
    missing: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Chapter:
    paper: Paper
    entries: tuple[Entry, ...]


def chapter(paper: Paper, outcomes: Sequence[Outcome], runner: Runner) -> Chapter:
    """Raises DipsError for a finding at a place that the paper does not have."""
    rows: dict[str, list[Row]] = {place.name: [] for place in paper.places}
    pictures: dict[str, list[tuple[Path, Picture, str]]] = {place.name: [] for place in paper.places}
    missing: list[tuple[str, str]] = []
    for outcome in outcomes:
        command = outcome.source.command(runner.quick)
        if outcome.why_not:
            missing.append((command, outcome.why_not))
            continue
        for finding in outcome.findings():
            kind = Kind.FITTED if finding.fitted else outcome.source.kind
            rows[paper.place(finding.place).name].append(Row(finding, kind, command))
        for picture in outcome.source.pictures:
            path = runner.files(outcome.source) / picture.file
            pictures[paper.place(picture.place).name].append((path, picture, command))
    return Chapter(
        paper,
        tuple(
            Entry(
                place, tuple(rows[place.name]), tuple(pictures[place.name]),
                () if rows[place.name] or place.without else tuple(missing),
            )
            for place in paper.places
        ),
    )  # fmt: skip


def report_json(chapters: Sequence[Chapter], quick: bool) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "quick": quick,
        "kinds": {str(kind): text for kind, text in KINDS.items()},
        "papers": [
            {
                "name": one.paper.name,
                "title": one.paper.title,
                "places": [
                    {
                        "place": entry.place.name,
                        "shows": entry.place.shows,
                        "without": entry.place.without,
                        "missing": [{"command": command, "why": why} for command, why in entry.missing],
                        "rows": [row.to_json() for row in entry.rows],
                        "pictures": [{"caption": picture.caption} for _, picture, _ in entry.pictures],
                    }
                    for entry in one.entries
                ],
            }
            for one in chapters
        ],
        "only_here": [{"what": what, "command": command} for what, command in ONLY_HERE],
        "software": software_versions(),
    }


# ---- Markdown ----


def page(one: Chapter, quick: bool) -> str:
    """The page of one paper, without its pictures."""
    lines = [
        f"# {one.paper.title}",
        "",
        f"{one.paper.about} For those who know the paper and ask what this project does of it. Made by",
        f"`dips papers --paper {one.paper.name}{'' if quick else ' --full'} --out runs/papers`, pictures included.",
        "",
        _kinds_line(),
    ]
    for entry in one.entries:
        lines += ["", f"## {entry.place.name}: {entry.place.shows}", "", *_entry_lines(entry)]
    return "\n".join(lines) + "\n"


def _entry_lines(entry: Entry) -> Iterator[str]:
    if not entry.rows:
        yield entry.place.without.capitalize() + "." if entry.place.without else _missing_text(entry)
        return
    yield "| " + " | ".join(COLUMNS) + " |"
    yield "|" + "---|" * len(COLUMNS)
    for row in entry.rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row.cells()) + " |"
    yield ""
    for command in dict.fromkeys(row.command for row in entry.rows):
        yield f"* `{command}`"
    for text in dict.fromkeys(row.finding.assumption for row in entry.rows if row.finding.assumption):
        yield f"* Assumed: {text}."


def _missing_text(entry: Entry) -> str:
    if not entry.missing:
        return "Only a picture: see the report."
    return " ".join(f"`{command}`: {why}." for command, why in entry.missing)


def _kinds_line() -> str:
    return "How a number was made: " + "; ".join(f"*{kind}*, {text}" for kind, text in KINDS.items()) + "."


# ---- HTML ----

STYLE = """
:root { color-scheme: light dark; --line: #8885; --soft: #8882; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { line-height: 1.2; } h2 { margin-top: 3rem; border-bottom: 2px solid var(--line); } h3 { margin-top: 2rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th, td { text-align: left; vertical-align: top; padding: 0.3rem 0.6rem; border-bottom: 1px solid var(--line); }
td:nth-child(2), td:nth-child(3), td:nth-child(4) { overflow-wrap: normal; }
.kind { white-space: nowrap; border-radius: 0.5rem; padding: 0 0.4rem; background: var(--soft); }
code { background: var(--soft); padding: 0 0.2rem; } figure { margin: 1rem 0; }
img { max-width: 100%; height: auto; background: white; } figcaption, .note { font-size: 0.9rem; opacity: 0.85; }
nav a { margin-right: 1rem; } .banner { border: 2px solid var(--line); padding: 0.5rem 1rem; }
"""

QUICK = (
    "Quick: small sizes, few repetitions and short runs, in minutes. It shows that everything runs and which way the "
    "numbers go; those of <code>dips papers --full</code> are the ones to quote."
)


def report_html(chapters: Sequence[Chapter], quick: bool) -> str:
    """One file that needs no other. Raises OSError where a picture cannot be read."""
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>Five papers and Di-PS</title><style>{STYLE}</style></head><body>",
        "<h1>Five papers, and what this project measures beside them</h1>",
        f"<p class=banner>{QUICK}</p>" if quick else "",
        "<p>Each row: what the paper says, what came out here, the ratio of both, and how it was made.</p><ul>",
        *(f"<li><span class=kind>{kind}</span> {html.escape(text)}</li>" for kind, text in KINDS.items()),
        "</ul><nav>",
        *(f"<a href='#{one.paper.name}'>{html.escape(one.paper.title.partition(':')[0])}</a>" for one in chapters),
        "<a href='#only-here'>What none of them does</a></nav>",
    ]
    for one in chapters:
        parts += [f"<h2 id='{one.paper.name}'>{html.escape(one.paper.title)}</h2><p>{_code(one.paper.about)}</p>"]
        for entry in one.entries:
            parts += [f"<h3>{entry.place.name}: {html.escape(entry.place.shows)}</h3>", *_entry_html(entry)]
    parts += ["<h2 id='only-here'>What this project does and none of the five</h2><ul>"]
    parts += [f"<li>{html.escape(what)}: <code>{html.escape(command)}</code></li>" for what, command in ONLY_HERE]
    versions = ", ".join(f"{name} {version}" for name, version in software_versions().items())
    parts += [f"</ul><p class=note>Made with {html.escape(versions)}.</p></body></html>"]
    return "\n".join(part for part in parts if part) + "\n"


def _entry_html(entry: Entry) -> Iterator[str]:
    if entry.rows:
        yield "<div class=wide><table><thead><tr>" + "".join(f"<th>{name}</th>" for name in COLUMNS) + "</tr></thead>"
        for row in entry.rows:
            *cells, kind = map(html.escape, row.cells())
            yield (
                "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + f"<td><span class=kind>{kind}</span></td></tr>"
            )
        yield "</table></div><ul class=note>"
        for command in dict.fromkeys(row.command for row in entry.rows):
            yield f"<li><code>{html.escape(command)}</code></li>"
        for text in dict.fromkeys(row.finding.assumption for row in entry.rows if row.finding.assumption):
            yield f"<li>Assumed: {html.escape(text)}.</li>"
        yield "</ul>"
    elif not entry.pictures:
        yield f"<p>{_code(entry.place.without.capitalize() + '.' if entry.place.without else _missing_text(entry))}</p>"
    for path, picture, command in entry.pictures:
        data = base64.b64encode(path.read_bytes()).decode()
        caption = html.escape(picture.caption)
        yield (
            f"<figure><img alt='{caption}' src='data:image/png;base64,{data}'>"
            f"<figcaption>{caption}. <code>{html.escape(command)}</code></figcaption></figure>"
        )


def _code(text: str) -> str:
    """Escaped, with `names` as code."""
    parts = html.escape(text).split("`")
    return "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts))
