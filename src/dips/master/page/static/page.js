// Receives the master's messages and shows them. One stream of server-sent events; no other request, no other host.

import { addHistory, prepareCharts, showCharts } from "./charts.js";
import { addEvents, kept, prepareLanes, showLanes } from "./lanes.js";
import { prepareTables, showTables } from "./tables.js";
import { prepareTiles, showConnection, showCountdown, showTiles, speak } from "./tiles.js";
import { prepareSteering, showSteering } from "./steering.js";
import { span } from "./format.js";

const LOST_AFTER_MS = 4500;
const COUNT_EVERY_MS = 250;

let state = null, receivedAt = 0, ended = "", wasLost = false;

prepareTiles();
prepareTables();
prepareCharts();
prepareLanes();
prepareSteering();
listen();
setInterval(tick, COUNT_EVERY_MS);

function listen() {
  const stream = new EventSource("/events");
  stream.addEventListener("run", (event) => take(JSON.parse(event.data)));
  stream.addEventListener("ended", (event) => { ended = event.data; });
  stream.addEventListener("error", () => {
    // Refused, not cut: the browser does not connect again by itself.
    if (stream.readyState === EventSource.CLOSED) setTimeout(again, 2000);
  });
}

async function again() {
  try {
    const answer = await fetch("/snapshot.json", { cache: "no-store" });
    if (answer.status === 401) { location.reload(); return; }
  } catch { /* no answer: the next try shows */ }
  listen();
}

function take(message) {
  state = message.state;
  receivedAt = performance.now();
  ended = "";
  addHistory(message.history);
  addEvents(message.events, message.rounds, message.full);
  showTiles(state);
  showSteering(state);
  showTables(state, kept.rounds);
  showLanes(state, message.now);
  showCharts();
  tick();
}

function tick() {
  const waited = (performance.now() - receivedAt) / 1000;
  if (state === null) return;
  const lost = ended !== "" || 1000 * waited > LOST_AFTER_MS;
  if (lost) {
    const over = state.run.stopped;
    const words = ended !== "" || over ? `${over ? "the run has ended" : ended}; shown as of ${span(waited)} ago` : `connection to the master lost ${span(waited)} ago, trying again`;
    showConnection(over ? "off" : "bad", words);
    if (!wasLost) speak(ended !== "" ? `${ended}.` : "The connection to the master is lost.", "lost");
  } else {
    showConnection("good", "live");
    showCountdown(state, waited);
    if (wasLost) speak("The connection to the master is back.", "back");
  }
  wasLost = lost;
}
