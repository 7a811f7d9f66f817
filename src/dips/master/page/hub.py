"""Makes the messages for all open pages: one for each sample, made once for any number of pages.

Runs on the page's thread. A page that keeps up gets the changes; a new page, or one that fell behind, gets everything.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from dips.master.page.event_buffer import MAX_ROUNDS, EventBuffer, TapeEvent
from dips.master.page.history import EventTimeline, HeldoutTail, ProgressHistory, events_json
from dips.master.page.snapshot import round_json, snapshot
from dips.master.state.status import RunView


class Hub:
    """The newest message and the data for the next one. Make it where the page's event loop runs."""

    def __init__(self, event_buffer: EventBuffer, heldout: HeldoutTail, earlier: Iterable[TapeEvent] = ()) -> None:
        """earlier: events that were on the tape before this process began."""
        self._event_buffer, self._heldout = event_buffer, heldout
        self.history, self.timeline = ProgressHistory(), EventTimeline()
        self._rounds: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._news = asyncio.Event()
        self._state: dict[str, Any] = {}
        self._wall_s = 0.0
        self._delta = ""
        self.number = 0
        """The number of the newest message; 0 before the first."""
        self.steers = False
        """Whether the page may pause and resume rounds."""
        self.ended = ""
        """Why there will be no more messages; empty before the end."""
        for event in earlier:
            self.timeline.note(*event)

    def take(self, view: RunView, wall_s: float, lag_s: float) -> None:
        """Takes one sample of the run; lag_s: the time since the state's last event."""
        events, sample, generation = self.timeline.seq, self.history.seq, self.history.generation
        for event in self._event_buffer.take():
            self.timeline.note(*event)
        status = view.status
        self.history.add(wall_s, status.tokens, view.publish_interval_s, status.clusters)
        for loss in self._heldout.news():
            self.history.add_heldout(loss.wall_s, loss.version, loss.tokens, loss.loss)
        rate = self.history.rate_tokens_per_s
        self._state = snapshot(view, lag_s, rate, self.timeline.departures, self.history.charted)
        self._state["heldout"] = self._last_heldout()
        self._state["steers"] = self.steers
        self._wall_s = wall_s
        self.number += 1
        new_rounds = self._keep_rounds(view)
        whole = generation != self.history.generation
        curves = self.history.full() if whole else self.history.since(sample)
        new_events = events_json(self.timeline.since(events))
        self._delta = self._message({**curves, "replace": whole}, new_events, new_rounds, full=False)
        self._wake()

    def end(self, why: str) -> None:
        """Tells the pages that the master ends."""
        self.ended = why
        self._wake()

    def full(self) -> str:
        """The message with everything, for a new page."""
        curves = {**self.history.full(), "replace": True}
        return self._message(curves, events_json(self.timeline.since(0)), list(self._rounds.values()), full=True)

    def message_after(self, number: int) -> str:
        """The next message for a page that has the message with this number."""
        return self._delta if number == self.number - 1 and number > 0 else self.full()

    async def after(self, number: int) -> None:
        """Waits until there is a message newer than this one, or the end."""
        while self.number <= number and not self.ended:
            await self._news.wait()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _keep_rounds(self, view: RunView) -> list[dict[str, Any]]:
        """Stores the rounds that were not known and returns them, oldest first."""
        fresh = [entry for entry in view.status.recent_rounds if str(entry.round) not in self._rounds]
        for entry in fresh:
            self._rounds[str(entry.round)] = round_json(entry)
        while len(self._rounds) > MAX_ROUNDS:
            self._rounds.popitem(last=False)
        return [self._rounds[str(entry.round)] for entry in fresh]

    def _last_heldout(self) -> dict[str, Any] | None:
        if not self.history.heldout:
            return None
        last = self.history.heldout[-1]
        return {"loss": round(last.loss, 5), "version": last.version, "tokens": last.tokens}

    def _message(
        self, curves: dict[str, Any], events: list[dict[str, Any]], rounds: list[dict[str, Any]], full: bool
    ) -> str:
        message = {
            "number": self.number,
            "full": full,
            "now": round(self._wall_s, 3),
            "state": self._state,
            "history": curves,
            "events": events,
            "rounds": rounds,
        }
        return json.dumps(message, separators=(",", ":"), allow_nan=False)
