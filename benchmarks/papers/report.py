"""One report of all papers: report.html with its pictures inside, report.json, and a page of Markdown for each."""

from __future__ import annotations

import base64
import html
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dips.core.release import software_versions
from papers.findings import KINDS, Finding, Kind, shown
from papers.papers import ONLY_HERE, Paper, Place
from papers.source import Outcome, Picture, Runner

SCHEMA = "dips-papers/1"
WIDTH = 120
QUICK = (
    "Quick: small sizes, few repetitions and short runs, in minutes. It shows that everything runs and which way the "
    "numbers go; those of `make papers ARGS=--full` are the ones to quote."
)
KIND = "how"


@dataclass(frozen=True)
class Row:
    """A finding and how it was made. command: makes it alone."""

    finding: Finding
    kind: Kind
    command: str

    def cells(self) -> dict[str, str]:
        """Texts by the heads of their columns."""
        one = self.finding
        spread = "" if one.spread is None else f"{one.spread:.0%}"
        return {
            "what": one.what,
            "the paper": shown(one.published, one.unit),
            "here": shown(one.ours, one.unit),
            "ratio": one.ratio,
            "spread": spread,
            KIND: str(self.kind),
        }

    def to_json(self) -> dict[str, Any]:
        one = self.finding
        return {
            "what": one.what, "paper": one.published, "here": one.ours, "unit": one.unit, "ratio": one.ratio,
            "spread": one.spread, "kind": str(self.kind), "command": self.command, "assumption": one.assumption,
        }  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A place with all that is said of it. missing: commands that gave nothing here, each with the reason: where a
    place has rows, those that would have drawn a picture at it; else all of the paper, as any may have been for it.
    """

    place: Place
    rows: tuple[Row, ...]
    pictures: tuple[tuple[Path, Picture, str], ...]
    missing: tuple[tuple[str, str], ...]

    def groups(self) -> Iterator[tuple[str, list[Row]]]:
        """Rows of one setting and its assumptions."""
        for assumption in dict.fromkeys(row.finding.assumption for row in self.rows):
            yield assumption, [row for row in self.rows if row.finding.assumption == assumption]


@dataclass(frozen=True)
class Chapter:
    paper: Paper
    entries: tuple[Entry, ...]


def chapter(paper: Paper, outcomes: Sequence[Outcome], runner: Runner) -> Chapter:
    """Raises DipsError for a finding at a place that the paper does not have."""
    rows: dict[str, list[Row]] = {place.name: [] for place in paper.places}
    pictures: dict[str, list[tuple[Path, Picture, str]]] = {place.name: [] for place in paper.places}
    missing: list[tuple[str, str]] = []
    undrawn: dict[str, list[tuple[str, str]]] = {place.name: [] for place in paper.places}
    for outcome in outcomes:
        command = outcome.source.command(runner.quick)
        if outcome.why_not:
            missing.append((command, outcome.why_not))
            for place in {paper.place(picture.place).name for picture in outcome.source.pictures}:
                undrawn[place].append(missing[-1])
            continue
        for finding in outcome.findings():
            kind = finding.kind or outcome.source.kind
            rows[paper.place(finding.place).name].append(Row(finding, kind, command))
        for picture in outcome.source.pictures:
            path = runner.files(outcome.source) / picture.file
            pictures[paper.place(picture.place).name].append((path, picture, command))

    def missing_at(place: Place) -> Sequence[tuple[str, str]]:
        if rows[place.name] or pictures[place.name]:
            return undrawn[place.name]
        return () if place.without else missing

    entries = (
        Entry(place, tuple(rows[place.name]), tuple(pictures[place.name]), tuple(missing_at(place)))
        for place in paper.places
    )
    return Chapter(paper, tuple(entries))


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
    full = "" if quick else " --full"
    made = f'`make papers ARGS="--paper {one.paper.name}{full}"`'
    lines = [
        f"# {one.paper.title}",
        "",
        _wrapped(
            f"{one.paper.about} This page is for those who know the paper and ask what this project does of it. It is "
            f"made by {made}, which also writes a report with pictures; nothing in it is written by hand."
        ),
        "",
        *([_wrapped(QUICK), ""] if quick else []),
        _wrapped(f"How a number was made: {'; '.join(f'*{kind}*, {text}' for kind, text in KINDS.items())}."),
    ]
    for entry in one.entries:
        if not entry.place.without:
            lines += ["", f"## {entry.place.name}: {entry.place.shows}", *_entry_lines(entry)]
    lines += ["", "## Without a number", "", "| place | shows | why |", "|---|---|---|"]
    lines += [f"| {' | '.join(map(_cell, row))} |" for row in _without(one)]
    return "\n".join(lines) + "\n"


def _entry_lines(entry: Entry) -> Iterator[str]:
    for assumption, rows in entry.groups():
        yield ""
        if assumption:
            yield _wrapped(f"{_capital(assumption)}.")
            yield ""
        columns = _columns(rows)
        yield "| " + " | ".join(columns) + " |"
        yield "|" + "---|" * len(columns)
        for row in rows:
            cells = row.cells()
            yield "| " + " | ".join(_cell(cells[column]) for column in columns) + " |"
    for _, picture, _ in entry.pictures:
        yield ""
        yield f"The report has a picture: {picture.caption}."
    yield ""
    yield _wrapped(_commands_text(entry))


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# ---- HTML ----

STYLE = """
:root { color-scheme: light dark; --line: #8885; --soft: #8882; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { line-height: 1.2; } h2 { margin-top: 3rem; border-bottom: 2px solid var(--line); } h3 { margin-top: 2rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th, td { text-align: left; vertical-align: top; padding: 0.3rem 0.6rem; border-bottom: 1px solid var(--line); }
th, td:nth-child(2), td:nth-child(3), td:nth-child(4) { overflow-wrap: normal; }
.kind { white-space: nowrap; border-radius: 0.5rem; padding: 0 0.4rem; background: var(--soft); }
code { background: var(--soft); padding: 0 0.2rem; } figure { margin: 1rem 0; }
img { max-width: 100%; height: auto; background: white; } figcaption, .note { font-size: 0.9rem; opacity: 0.85; }
nav a { margin-right: 1rem; } .banner { border: 2px solid var(--line); padding: 0.5rem 1rem; }
"""


def report_html(chapters: Sequence[Chapter], quick: bool) -> str:
    """One file that needs no other. Raises OSError where a picture cannot be read."""
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>Five papers and Di-PS</title><style>{STYLE}</style></head><body>",
        "<h1>Five papers, and what this project measures of them</h1>",
        f"<p class=banner>{_code(QUICK)}</p>" if quick else "",
        "<p>Each row: what the paper says, what came out here, the ratio of both, and how it was made.</p><ul>",
        *(f"<li><span class=kind>{kind}</span> {html.escape(text)}</li>" for kind, text in KINDS.items()),
        "</ul><nav>",
        *(f"<a href='#{one.paper.name}'>{html.escape(one.paper.title.partition(':')[0])}</a>" for one in chapters),
        "<a href='#only-here'>What none of them does</a></nav>",
    ]
    for one in chapters:
        parts += [f"<h2 id='{one.paper.name}'>{html.escape(one.paper.title)}</h2><p>{_code(one.paper.about)}</p>"]
        for entry in one.entries:
            if not entry.place.without:
                parts += [f"<h3>{entry.place.name}: {html.escape(entry.place.shows)}</h3>", *_entry_html(entry)]
        parts += ["<h3>Without a number</h3>"]
        parts += [_table_html(("place", "shows", "why"), (tuple(map(html.escape, row)) for row in _without(one)))]
    parts += ["<h2 id='only-here'>What this project does and none of the five</h2><ul>"]
    parts += [f"<li>{html.escape(what)}: <code>{html.escape(command)}</code></li>" for what, command in ONLY_HERE]
    versions = ", ".join(f"{name} {version}" for name, version in software_versions().items())
    parts += [f"</ul><p class=note>Made with {html.escape(versions)}.</p></body></html>"]
    return "\n".join(part for part in parts if part) + "\n"


def _entry_html(entry: Entry) -> Iterator[str]:
    for assumption, rows in entry.groups():
        if assumption:
            yield f"<p class=note>{html.escape(_capital(assumption))}.</p>"
        columns = _columns(rows)
        yield _table_html(columns, ([_cell_html(column, row.cells()[column]) for column in columns] for row in rows))
    for path, picture, _ in entry.pictures:
        data = base64.b64encode(path.read_bytes()).decode()
        caption = html.escape(picture.caption)
        image = f"<img alt='{caption}' src='data:image/png;base64,{data}'>"
        yield f"<figure>{image}<figcaption>{caption}</figcaption></figure>"
    yield f"<p class=note>{_code(_commands_text(entry))}</p>"


def _table_html(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML."""
    head = "".join(f"<th>{name}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _cell_html(column: str, text: str) -> str:
    return f"<span class=kind>{text}</span>" if column == KIND else html.escape(text)


def _columns(rows: Sequence[Row]) -> list[str]:
    """Those in which a row has something."""
    texts = [row.cells() for row in rows]
    return [column for column in texts[0] if any(cells[column] for cells in texts)]


def _commands_text(entry: Entry) -> str:
    """The commands that made it, and those that could not here, with the reason."""
    made = dict.fromkeys([*(row.command for row in entry.rows), *(command for _, _, command in entry.pictures)])
    said = [f"Made by {', '.join(f'`{command}`' for command in made)}."] if made else []
    return " ".join([*said, *(f"`{command}`: {why}." for command, why in entry.missing)])


def _without(one: Chapter) -> list[tuple[str, str, str]]:
    """Places in a row that show the same, such as drawings, are one line."""
    found: list[tuple[str, str, str]] = []
    for place in (entry.place for entry in one.entries if entry.place.without):
        if found and found[-1][1:] == (place.shows, place.without):
            found[-1] = (f"{found[-1][0]}, {place.name.rpartition(' ')[2]}", *found[-1][1:])
        else:
            found.append((place.name, place.shows, place.without))
    return found


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _code(text: str) -> str:
    """Escaped, with `names` as code."""
    parts = html.escape(text).split("`")
    return "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts))
