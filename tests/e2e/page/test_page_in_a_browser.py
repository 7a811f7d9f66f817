"""The status page of a real run in a real browser: what it shows, that it lives, and that every reader can use it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support import waiting
from support.page_run import PageRun
from support.repository import ROOT

pytestmark = pytest.mark.timeout(900)

PICTURES = ROOT / "runs" / "page"
"""For what a run on a machine that is busy with other things takes its time to do."""

DESKTOP, SMALL, PHONE = (1280, 900), (1000, 800), (390, 844)

PROBES = (Path(__file__).parent / "probes.js").read_text()
TEXTS = ("p", "dt", ".big", ".small", "h2", "th", "td", ".under", ".state span", "li", "time", "button", "a")
LEAST_CONTRAST = 4.5
VERSIONS_TO_SHOW = 20


def probe(page: Any, name: str, argument: object = None) -> Any:
    """What one function of probes.js says of the page."""
    probes = PROBES[PROBES.index("({") :].rstrip()
    return page.evaluate(f"(argument) => ({probes}).{name}(argument)", argument)


@dataclass
class Seen:
    """What all pages of the test did and should not."""

    complaints: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageRun]:
    with PageRun(tmp_path_factory.mktemp("atlas")) as run:
        yield run


@pytest.fixture(scope="module")
def seen() -> Seen:
    return Seen()


Open = Callable[..., Any]

BROKEN_WORDS = """() => [...document.querySelectorAll('#clusters-table tbody tr')].map((row) => {
  const state = 'being judged; waiting for the verdict of push turin/1.1#22';
  for (const [cell, text] of Object.entries({ th: 'incarnation 1.2', td: state, 'td:last-child': '1 aborted' })) {
    const more = Object.assign(document.createElement('span'), { className: 'under', textContent: text });
    row.querySelector(cell).append(more);
  }
}) && [...document.querySelectorAll('#clusters-table :is(.right, th .under, .state)')].flatMap((cell) => {
  const found = [], texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    for (const word of texts.currentNode.data.matchAll(/[^\\s\\/]+/g)) {
      const range = document.createRange();
      range.setStart(texts.currentNode, word.index);
      range.setEnd(texts.currentNode, word.index + word[0].length);
      if (range.getClientRects().length > 1) found.push(word[0]);
    }
  }
  return found;
})"""
"""Words of the table of clusters that are cut where a line ends, once each cell has the most that it may say."""


TICKS = """async () => {
  const { decimals } = await import('/static/charts.js');
  const places = [[10, 5], [5.5, 0.5], [5.25, 0.25], [5.1, 0.1], [5.02, 0.02]];
  return places.map(([tick, step]) => tick.toFixed(decimals(step)));
}"""
"""Labels of ticks, from the places of each and of the next one."""

NO_TOKENS = """async () => {
  const charts = await import('/static/charts.js');
  charts.addHistory({ replace: true, at: [1], tokens: [0], rate: [0], loss: { lyon: [5.1] }, heldout: [] });
  charts.showCharts();
  const empty = document.querySelector('#loss-empty');
  return [document.querySelectorAll('#loss-chart canvas').length, empty.hidden ? 'hidden' : empty.innerText];
}"""
"""The chart of a run whose clusters have a loss, and no version with tokens: how many are drawn, and what is said."""


@pytest.fixture
def opened(chromium: Any, run: PageRun, seen: Seen) -> Iterator[Open]:
    """Opens the page in a window of its own, by its link; everything that it complains about is noted."""
    contexts = []

    def open_page(
        size: tuple[int, int] = DESKTOP, scheme: str = "light", before: Callable[[Any], None] | None = None
    ) -> Any:
        context = chromium.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, ignore_https_errors=True
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(1000 * waiting.NO_LIMIT_S)
        page.on(
            "console", lambda said: seen.complaints.append(said.text) if said.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: seen.complaints.append(str(error)))
        page.on("request", lambda request: seen.hosts.add(urlsplit(request.url).netloc))
        if before is not None:
            before(page)
        page.goto(run.url)
        page.wait_for_selector("#clusters-table tbody tr:nth-child(3)")
        return page

    yield open_page
    for context in contexts:
        context.close()
    run.check()


def picture(page: Any, name: str, height: int = 0) -> None:
    """Of the whole page, or of its top."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    top = {"x": 0, "y": 0, "width": page.viewport_size["width"], "height": height} if height else None
    page.screenshot(path=PICTURES / f"{name}.png", full_page=True, clip=top)


def until(page: Any, expression: str) -> None:
    """Wait until it is true in the page. (Playwright's own waiting evaluates texts, which the page forbids.)"""
    waiting.until(
        lambda: page.evaluate(f"() => Boolean({expression})"), expression, lambda: page.inner_text("main")[:3000]
    )


def version(page: Any) -> int:
    return int(page.inner_text("#version").rpartition(":")[2])


def row(page: Any, cluster: str) -> Any:
    return page.locator("#clusters-table tbody tr").filter(has=page.get_by_role("rowheader", name=cluster))


def test_the_page_shows_the_run(opened: Open, run: PageRun) -> None:
    page = opened()
    assert urlsplit(page.url).query == ""  # the token has left the address
    until(page, "document.querySelector('#heldout-more').textContent.startsWith('at ')")
    until(page, "document.querySelectorAll('#rounds-table tbody tr').length >= 3")
    until(page, "document.querySelectorAll('#links-table tbody tr').length === 3")
    page.wait_for_selector("#loss-chart canvas")
    for axis in ("#by-time", "#by-tokens"):  # the chart is made again
        page.click(axis)
        assert page.evaluate("document.querySelector('#loss-chart canvas').clientHeight") > 100
    assert page.inner_text("h1").split() == ["Di-PS", "atlas"]
    assert page.inner_text("#connection") == "live"
    names = page.locator("#clusters-table tbody th").all_inner_texts()
    assert [name.split()[0] for name in names] == ["lyon", "oslo", "turin"]
    assert page.locator("#slaves-table tbody tr.good").count() == 2
    assert page.locator("#phases [aria-current=step]").count() == 1
    assert "B/s" in page.inner_text("#links-table")
    assert run.status is not None
    assert run.status.published is not None
    assert 0 <= version(page) - 1 <= run.status.published.v + 60
    assert {"lyon", "oslo", "turin", "held-out"} <= set(
        page.locator("#legend button span:first-of-type").all_inner_texts()
    )
    assert "held-out loss from" in page.get_attribute("#loss-chart", "aria-label")
    assert probe(page, "pixels") > 20
    assert page.locator("#lanes svg .applied").count() > 3
    assert "joined as incarnation" in page.inner_text("#events")


def test_it_lives_without_being_loaded_again(opened: Open) -> None:
    page = opened()
    before, points = version(page), page.evaluate("performance.getEntriesByType('resource').length")
    until(page, f"Number(document.querySelector('#version').textContent.split(':').at(-1)) >= {before + 2}")
    assert page.evaluate("performance.getEntriesByType('navigation').length") == 1
    assert page.evaluate("performance.getEntriesByType('resource').length") == points  # one stream, nothing else


def test_a_killed_cluster_turns_red_says_so_and_comes_back(opened: Open, run: PageRun) -> None:
    page = opened()
    phone = opened(PHONE, "dark")
    until(page, "document.querySelectorAll('#clusters-table tbody tr.good').length === 3")
    until(page, f"Number(document.querySelector('#version').textContent.split(':').at(-1)) >= {VERSIONS_TO_SHOW}")
    calm = row(page, "oslo").evaluate("e => getComputedStyle(e).backgroundColor")
    run.kill("oslo")
    until(
        page, "[...document.querySelectorAll('#clusters-table tbody tr.bad')].some(e => e.textContent.includes('oslo'))"
    )
    assert row(page, "oslo").evaluate("e => getComputedStyle(e).backgroundColor") != calm
    red, green, blue = probe(page, "colour", "#clusters-table tr.bad .sign")
    assert red > 2 * max(green, blue)
    assert re.search(r"away\s+for \d+ s", row(page, "oslo").inner_text())  # in words as well
    assert "its last heartbeat came" in row(page, "oslo").inner_text()
    assert "cluster oslo is away" in page.inner_text("#sentence")
    assert "cluster oslo is away" in page.inner_text("#spoken")
    assert page.title().startswith("▲ atlas")
    assert page.locator("#events li.bad").filter(has_text="cluster oslo").count() == 1
    picture(page, "light-desktop")
    picture(phone, "dark-phone", height=1500)
    until(
        page,
        "[...document.querySelectorAll('#clusters-table tbody tr.good')].some(e => e.textContent.includes('oslo'))",
    )
    assert "incarnation 1.2" in row(page, "oslo").inner_text()
    until(page, "document.querySelector('#say').classList.contains('good')")


def test_why_nothing_moves_is_said_in_the_operators_words(opened: Open, run: PageRun) -> None:
    page = opened()
    with run.operator() as operator:
        operator.pause("moving a slave")
        until(page, "document.querySelector('#sentence').textContent === 'Paused by the operator: moving a slave.'")
        assert page.locator("#say.wait").count() == 1
        operator.resume("")
    until(page, "document.querySelector('#say').classList.contains('good')")


def test_rounds_are_paused_and_resumed_on_the_page_where_that_was_enabled(opened: Open, run: PageRun) -> None:
    page = opened()
    page.click("#pause")
    assert page.evaluate("document.activeElement.id") == "reason"
    page.keyboard.type("<b>a look</b>")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('#sentence').textContent === 'Paused by the operator: <b>a look</b>.'")
    with run.operator() as operator:
        assert operator.status().paused
        page.click("#resume")
        until(page, "document.querySelector('#say').classList.contains('good')")
        assert not operator.status().paused
    assert "rounds go on" in page.inner_text("#steered")


def test_a_lost_connection_is_said_and_mends_itself(opened: Open, run: PageRun) -> None:
    page = opened()
    run.stop_master(7.0)
    until(page, "document.querySelector('#connection').textContent.includes('connection to the master lost')")
    assert page.locator("body.lost").count() == 1
    assert "The connection to the master is lost." in page.inner_text("#spoken")
    until(page, "document.querySelector('#connection').textContent === 'live'")
    assert page.locator("body.lost").count() == 0


@pytest.mark.parametrize("size", [PHONE, (320, 700), SMALL, DESKTOP], ids=lambda size: f"{size[0]} px")
def test_nothing_needs_sideways_scrolling(opened: Open, size: tuple[int, int]) -> None:
    page = opened(size)
    page.wait_for_selector("#loss-chart canvas")
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert probe(page, "outside", size[0]) == []
    assert page.evaluate("[...document.querySelectorAll('[hidden]')].filter(e => e.getClientRects().length)") == []
    loss_first = page.evaluate("document.querySelector('#loss-title').getBoundingClientRect().top")
    assert (loss_first < page.evaluate("document.querySelector('#clusters-title').getBoundingClientRect().top")) is (
        size[0] <= 1180
    )
    # `awaiting`, `incarnation 1.2`, `1.946`: whole words and numbers, however narrow the window.
    assert page.evaluate(BROKEN_WORDS) == []
    picture(page, f"light-{size[0]}")


def test_a_chart_has_no_axis_before_tokens_are_trained_and_ticks_that_differ(opened: Open) -> None:
    page = opened()
    page.wait_for_selector("#loss-chart canvas")
    assert page.evaluate(TICKS) == ["10", "5.5", "5.25", "5.1", "5.02"]
    assert page.evaluate(NO_TOKENS) == [0, "The curves begin with the first round."]
    page.wait_for_selector("#loss-chart canvas")  # the run goes on
    assert not page.is_visible("#loss-empty")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_all_text_can_be_read_in_light_and_dark(opened: Open, scheme: str, size: tuple[int, int]) -> None:
    page = opened(size, scheme)
    assert (max(probe(page, "colour", "body")) < 60) is (scheme == "dark")
    found = probe(page, "contrast", list(TEXTS))
    assert len(found) > 60
    assert [one for one in found if one[2] < LEAST_CONTRAST] == []
    picture(page, f"{scheme}-{size[0]}")


def test_the_keyboard_reaches_everything_in_order_and_shows_where_it_is(opened: Open) -> None:
    page = opened()
    page.wait_for_selector("#legend button")
    places = []
    for _ in range(40):
        page.keyboard.press("Tab")
        where = probe(page, "focused")
        if where is None:
            break
        places.append(where)
    names = [name for name, _, _ in places]
    assert names[0] == "skip"
    assert {"by-tokens", "by-time"} <= set(names)
    assert all(width >= 2 for _, width, _ in places), places
    assert all(left >= 0 for _, _, left in places), "what has the focus is on the screen"
    assert len(places) == probe(page, "reachable")
    page.keyboard.press("Tab")
    page.focus("#by-time")
    page.keyboard.press("Enter")
    assert page.get_attribute("#by-time", "aria-pressed") == "true"
    assert page.get_attribute("#by-tokens", "aria-pressed") == "false"
    page.focus("#legend button")
    page.keyboard.press("Space")
    assert page.get_attribute("#legend button", "aria-pressed") == "false"
    page.keyboard.press("Space")


def test_a_screen_reader_finds_its_way(opened: Open) -> None:
    for size in (DESKTOP, PHONE):
        page = opened(size)
        page.wait_for_selector("#loss-chart canvas")
        for landmark in ("banner", "main", "contentinfo"):
            assert page.get_by_role(landmark).count() == 1, landmark
        assert page.get_by_role("heading", level=1).count() == 1
        assert page.get_by_role("heading", level=2).count() == 7
        for table in ("Clusters", "Slaves", "Links", "Last rounds"):
            found = page.get_by_role("table", name=re.compile(f"^{table}"))
            assert found.count() == 1, table
            assert found.get_by_role("columnheader").count() >= 3
            assert found.get_by_role("rowheader").count() >= 2
        assert page.locator("[role=status][aria-live=polite]").count() == 1
        assert page.get_by_role("img", name=re.compile("^Loss curves, since")).count() == 1
        assert page.get_by_role("img", name=re.compile("^Timeline since")).count() == 1
        assert probe(page, "nameless") == 0


def test_text_of_others_stays_text(opened: Open, run: PageRun, seen: Seen) -> None:
    """The real messages, with markup wherever the run's own words stand."""
    attack = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"

    def hostile(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: hostile(item) if key not in ("level", "phase") else item for key, item in value.items()}
        if isinstance(value, list):
            return [hostile(item) for item in value]
        return f"{value} {attack}" if isinstance(value, str) else value

    def tampered(page: Any) -> None:
        def answer(route: Any) -> None:
            message = page.request.get(run.url.partition("?")[0] + "snapshot.json").json()
            curves = message["history"]
            curves["loss"] = {f"{name} {attack}": values for name, values in curves["loss"].items()}
            body = f"event: run\ndata: {json.dumps(hostile(message))}\n\n"
            route.fulfill(status=200, content_type="text/event-stream", body=body)

        page.route("**/events", answer)

    page = opened(before=tampered)
    until(page, "document.querySelector('#sentence').textContent.includes('<img')")
    page.wait_for_selector("#legend button")
    assert page.locator("main img").count() == page.locator("main script").count() == 0
    assert "<img src=x" in page.inner_text("#clusters-table")
    assert "<img src=x" in page.inner_text("#events")
    assert "<img src=x" in page.inner_text("#legend")
    assert "owned" != page.title()
    assert page.evaluate("document.documentElement.scrollWidth") <= DESKTOP[0]


def test_the_browser_complained_of_nothing_and_asked_nobody_else(run: PageRun, seen: Seen) -> None:
    assert seen.hosts == {urlsplit(run.url).netloc}
    assert [line for line in seen.complaints if "ERR_" not in line] == []
