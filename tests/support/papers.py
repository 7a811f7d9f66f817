"""What `make papers` reads of other commands, so that their own tests see that it still can; and its pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from papers.di_ps import SOURCES
from papers.findings import shown
from papers.planning import Checks
from support.repository import ROOT

from dips.planner.validation import PaperCheck

SOURCES_OF_DI_PS = {source.name: source for source in SOURCES}


def not_on_the_page(paper: str, checks: Iterable[PaperCheck]) -> Iterator[str]:
    """The rows that a page of docs/papers does not have with these numbers, to all digits that it shows."""
    page = (ROOT / "docs" / "papers" / f"{paper}.md").read_text().splitlines()
    for one in Checks(paper)([check.to_json() for check in checks]):
        published, ours = shown(one.published, one.unit), shown(one.ours, one.unit)
        row = f"| {one.what} | " + (f"{published} | {ours} | " if published else f"{ours} | ")
        if not any(line.replace(" |  | ", " | ", 1).startswith(row) for line in page):
            yield row
