"""The status page in a real browser, where one request is lost or never answered: it recovers without its reader."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import waiting
from support.whole_run import WholeRun

from dips.master.page.access import read_page_url

playwright = pytest.importorskip("playwright.sync_api")

LIVE = "document.querySelector('#connection').textContent === 'live'"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page of a run with one slave."""
    with WholeRun(tmp_path_factory.mktemp("page") / "run", n_slaves=1, page_listen="127.0.0.1:0") as run:
        waiting.until(lambda: run.status().slaves, "the slave")
        found = read_page_url(run.directory / "master")
        assert found is not None
        yield found


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    context = chromium.new_context()
    page = context.new_page()
    page.set_default_timeout(1000 * waiting.NO_LIMIT_S)
    yield page
    context.close()


def first(page: Any, paths: str, harm: Callable[[Any], object]) -> list[str]:
    """Harms the first request for it, and lets all others pass; returns what was asked for."""
    asked: list[str] = []

    def route(found: Any) -> None:
        asked.append(found.request.method)
        if len(asked) == 1:
            harm(found)
        else:
            found.continue_()

    page.route(paths, route)
    return asked


def never_answered(found: Any) -> None:
    pass


def refused(found: Any) -> None:
    found.fulfill(status=503, body="503: too many pages are open\n")


def until(page: Any, expression: str) -> None:
    """Waits until it is true in the page, which may be loaded again meanwhile."""

    def is_so() -> bool:
        with contextlib.suppress(playwright.Error):  # asked while it is loaded
            return bool(page.evaluate(f"() => Boolean({expression})"))
        return False

    waiting.until(is_so, expression, lambda: str(page.inner_text("body")))


@pytest.mark.parametrize(
    ("path", "there"),
    [
        ("page.js", LIVE),
        ("tables.js", LIVE),
        ("vendor/uplot/uPlot.iife.min.js", "window.uPlot"),
        ("page.css", "getComputedStyle(document.querySelector('#tiles')).display === 'grid'"),
    ],
)
def test_a_file_that_is_lost_once(page: Any, url: str, path: str, there: str) -> None:
    asked = first(page, f"**/static/{path}", lambda found: found.abort("connectionreset"))
    page.goto(url)
    until(page, f"{LIVE} && {there}")
    assert len(asked) == 2


def test_a_file_that_is_never_sent(page: Any, url: str) -> None:
    first(page, "**/static/page.css", never_answered)
    page.clock.install()
    with page.expect_request("**/static/page.css"):
        page.goto(url, wait_until="commit")
    page.clock.fast_forward(30_000)
    until(page, LIVE)


def test_a_stream_that_is_never_sent(page: Any, url: str) -> None:
    first(page, "**/events", never_answered)
    page.clock.install()
    with page.expect_request("**/events"):
        page.goto(url)
    page.clock.fast_forward(30_000)
    until(page, LIVE)


def test_a_stream_that_is_refused_and_then_a_question_that_is_never_answered(page: Any, url: str) -> None:
    first(page, "**/events", refused)
    page.goto(url)
    asked = first(page, url, never_answered)
    until(page, LIVE)
    assert asked == ["HEAD"]


def test_a_part_of_the_page_that_fails_leaves_the_others(page: Any, url: str) -> None:
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(error.message))

    def spoiled(found: Any) -> None:
        message = page.request.get(f"{url}snapshot.json").json()
        message["state"]["say"] = None
        found.fulfill(status=200, content_type="text/event-stream", body=f"event: run\ndata: {json.dumps(message)}\n\n")

    page.route("**/events", spoiled)
    page.goto(url)
    until(page, "document.querySelector('#slaves-table tbody').textContent.includes('s0')")
    assert errors
