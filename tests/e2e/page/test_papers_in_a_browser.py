"""The report of `make papers` in a real browser: it opens without another file, and fits a desktop and a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.dips_command import run_python
from support.repository import ROOT

PICTURES = ROOT / "runs" / "page"
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the papers that take seconds."""
    out = tmp_path_factory.mktemp("papers")
    told = run_python("-m", "papers", "--paper", "crosspipe", "--out", out, PYTHONPATH=str(ROOT / "benchmarks"))
    assert told.returncode == 0, told.stderr
    return out / "report.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_report_fits_and_asks_nobody_else(chromium: Any, report: Path, size: str, scheme: str) -> None:
    width, height = SIZES[size]
    context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page, asked = context.new_page(), list[str]()
    page.on("request", lambda request: asked.append(request.url.partition(":")[0]))
    page.goto(report.as_uri())
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"papers-{size}-{scheme}.png", full_page=True)
    assert set(asked) <= {"file", "data"}
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    shown = page.evaluate(
        "[...document.images].map((e) => [e.complete && e.naturalWidth > 0, e.alt, e.nextSibling.textContent])"
    )
    assert len(shown) == 2
    assert all(loaded and text and caption.startswith(text) for loaded, text, caption in shown)
    context.close()


def test_every_row_says_how_it_was_made(chromium: Any, report: Path) -> None:
    page = chromium.new_page()
    page.goto(report.as_uri())
    kinds = page.evaluate("[...document.querySelectorAll('td .kind')].map((e) => e.textContent)")
    tables = "[...document.querySelectorAll('table')].filter((e) => e.querySelector('td .kind'))"
    rows = page.evaluate(f"{tables}.map((e) => e.querySelectorAll('tbody tr').length).reduce((a, b) => a + b)")
    assert len(kinds) == rows > 90
    assert set(kinds) == {"computed", "fitted"}
    page.close()
