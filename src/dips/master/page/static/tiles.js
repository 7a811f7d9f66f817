// The overview: connection, sentence, and the row of tiles.

import { byId, h, level, say } from "./dom.js";
import { count, loss, several, span } from "./format.js";

const PHASES = [["IDLE", "train"], ["WINDOW", "window"], ["MEASURE", "measure"], ["PREPARE", "prepare"], ["COMMIT", "commit"]];
const SHOWN_AS = { SEALED: "WINDOW", JUDGE: "MEASURE", PUBLISH: "COMMIT" };
const SPEAK_EVERY_MS = 5000;

let spoken = { key: "", at: 0 };

export function prepareTiles() {
  byId("phases").append(...PHASES.map(([, word]) => h("li", {}, word)));
}

export function showTiles(state) {
  const run = state.run;
  say(byId("run"), run.id);
  say(byId("meta"), `epoch ${run.epoch} · preset ${run.preset} · H ${run.sync_every} steps · durability ${run.durability}`);
  showSentence(state);
  showPhase(state.round);
  say(byId("version"), state.version ?? state.decided ?? "none yet");
  const kept = run.durability === "async" ? `on every disk: ${state.durable ?? "none"}` : numbered(state.version);
  say(byId("version-more"), state.decided && !state.version ? "not served yet" : kept);
  say(byId("tokens"), count(state.tokens));
  say(byId("tokens-more"), state.goal ? `${(100 * Math.min(1, state.tokens / state.goal)).toFixed(0)} % of ${count(state.goal)}` : "");
  byId("goal").hidden = !state.goal;
  if (state.goal) byId("goal").firstElementChild.style.width = `${100 * Math.min(1, state.tokens / state.goal)}%`;
  say(byId("rate"), count(Math.round(state.rate)));
  say(byId("rate-more"), state.left_s ? `about ${span(state.left_s)} left` : "");
  const rounds = state.rounds;
  say(byId("rounds"), count(rounds.committed));
  const lost = [[rounds.void, "void"], [rounds.aborted, "aborted"]].filter(([n]) => n).map(([n, word]) => `, ${n} ${word}`);
  say(byId("rounds-more"), `${rounds.merged} with two or more pushes${lost.join("")}`);
  say(byId("heldout"), state.heldout ? loss(state.heldout.loss) : "–");
  say(byId("heldout-more"), state.heldout ? `at ${state.heldout.version}` : "not measured");
}

/** "2:38" -> "number 38, after 1 rollback". */
function numbered(version) {
  if (!version) return "";
  const [timeline, number] = version.split(":");
  return `number ${number}${timeline > 1 ? `, after ${several(timeline - 1, "rollback", "rollbacks")}` : ""}`;
}

function showSentence(state) {
  const shown = state.say;
  level(byId("say"), shown.level);
  say(byId("sentence"), shown.text);
  const more = byId("more");
  more.hidden = shown.more.length === 0;
  if (more.textContent !== shown.more.join("")) more.replaceChildren(...shown.more.map((line) => h("li", {}, line)));
  speak([shown.text, ...shown.more].join(" "), shown.level);
  const sign = { bad: "■ ", warn: "▲ ", off: "○ ", wait: "◌ " }[shown.level] ?? "";
  document.title = `${sign}${state.run.id} ${state.version ?? ""} – Di-PS`;
}

/** Announced to screen readers when the meaning changes, not whenever a number changes. */
export function speak(text, kind) {
  const key = `${kind} ${text.replace(/[\d.:,]+/g, "#")}`;
  const now = Date.now();
  if (key === spoken.key || (now - spoken.at < SPEAK_EVERY_MS && kind === "good")) return;
  spoken = { key, at: now };
  say(byId("spoken"), text);
}

function showPhase(round) {
  const shown = SHOWN_AS[round.phase] ?? round.phase;
  const at = PHASES.findIndex(([name]) => name === shown);
  [...byId("phases").children].forEach((item, index) => {
    item.classList.toggle("past", index < at);
    if (index === at) item.setAttribute("aria-current", "step"); else item.removeAttribute("aria-current");
  });
  say(byId("round-id"), round.id ?? "");
}

/** Called a few times a second; `waited` is the age of the state, in seconds. */
export function showCountdown(state, waited) {
  const round = state.round;
  let text;
  if (round.closes_in_s !== null) text = `${round.pushed} of ${round.of} in; closes in ${span(Math.max(0, round.closes_in_s - waited))}`;
  else if (round.phase !== "IDLE") text = `for ${span(round.age_s + waited)}`;
  else if (round.planned_in_s !== null && round.planned_in_s > waited) text = `next window planned in ${span(round.planned_in_s - waited)}`;
  else if (state.since_publish_s !== null) text = `last version ${span(state.since_publish_s + waited)} ago`;
  else text = several(round.of, "cluster", "clusters");
  say(byId("countdown"), text);
}

export function showConnection(kind, words) {
  const pill = byId("connection");
  level(pill, kind);
  say(pill.querySelector(".words"), words);
  document.body.classList.toggle("lost", kind === "bad");
}
