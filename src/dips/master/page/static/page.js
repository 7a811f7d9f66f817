// Receives the master's messages and shows them. One stream of server-sent events; no other request, no other host.

import { addHistory, prepareCharts, showCharts } from "./charts.js";
import { addEvents, kept, prepareLanes, showLanes } from "./lanes.js";
import { prepareTables, showTables } from "./tables.js";
import { prepareTiles, showConnection, showCountdown, showTiles, speak } from "./tiles.js";
import { prepareSteering, showSteering } from "./steering.js";
import { span } from "./format.js";

const LOST_AFTER_MS = 4500;
const COUNT_EVERY_MS = 250;
const SILENT_MS = 15000; // three times the master's WAIT_S: a stream that is silent for longer is dead
const AGAIN_MS = 2000;

let state = null, receivedAt = 0, ended = "", wasLost = false;
let stream = null, lastSign = 0; // lastSign: when the stream last gave a sign, or began

prepareTiles();
prepareTables();
prepareCharts();
prepareLanes();
prepareSteering();
listen();
setInterval(tick, COUNT_EVERY_MS);
setInterval(watch, COUNT_EVERY_MS);
window.started = true; // index.html looks for it

function listen() {
  const now = new EventSource("/events");
  const alive = () => { lastSign = performance.now(); };
  stream = now;
  alive();
  for (const sign of ["open", "waiting"]) now.addEventListener(sign, alive);
  now.addEventListener("run", (event) => { alive(); take(JSON.parse(event.data)); });
  now.addEventListener("ended", (event) => { ended = event.data; });
  now.addEventListener("error", () => {
    // Refused, not cut: the browser does not connect again by itself.
    if (now.readyState === EventSource.CLOSED) leave();
  });
}

function leave() {
  stream.close();
  stream = null;
  setTimeout(again, AGAIN_MS);
}

/** A connection that hangs gives no error, and the browser waits for it for ever. */
function watch() {
  if (stream !== null && performance.now() - lastSign > SILENT_MS) leave();
}

async function again() {
  try {
    // HEAD: a body that is never read would keep one of the few connections that a browser makes.
    const answer = await fetch("/", { method: "HEAD", cache: "no-store", signal: AbortSignal.timeout(SILENT_MS) });
    if (answer.status === 401) { location.reload(); return; }
  } catch { /* no answer: the next try shows */ }
  listen();
}

function take(message) {
  state = message.state;
  receivedAt = performance.now();
  ended = "";
  part(() => addHistory(message.history));
  part(() => addEvents(message.events, message.rounds, message.full));
  part(() => showTiles(state));
  part(() => showSteering(state));
  part(() => showTables(state, kept.rounds));
  part(() => showLanes(state, message.now));
  part(showCharts);
  part(tick);
}

/** A part that fails must not leave the others empty. */
function part(show) {
  try { show(); } catch (error) { reportError(error); }
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
