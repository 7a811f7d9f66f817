// The timeline: one lane of events for the master and each cluster and slave; below, the events in words.

import { byId, h, level, s } from "./dom.js";
import { clock, several } from "./format.js";

const LANE = 18, AXIS = 18, MOST_LANES = 28, EVENTS_SHOWN = 10, MOST_EVENTS = 400, MOST_ROUNDS = 240;

export const kept = { events: [], rounds: [] };
let spanSeconds = 300, all = false, shownEvents = "", lastNow = 0, lastState = null;

export function prepareLanes() {
  for (const button of document.querySelectorAll("button[data-span]")) {
    button.addEventListener("click", () => {
      spanSeconds = Number(button.dataset.span);
      for (const other of document.querySelectorAll("button[data-span]")) other.setAttribute("aria-pressed", String(other === button));
      draw();
    });
  }
  byId("events-all").addEventListener("click", () => {
    all = !all;
    byId("events-all").setAttribute("aria-expanded", String(all));
    showEvents();
  });
  new ResizeObserver(draw).observe(byId("lanes"));
}

export function addEvents(events, rounds, isAll) {
  if (isAll) { kept.events = []; kept.rounds = []; }
  for (const event of events) {
    kept.events = kept.events.filter((other) => !(other.who === event.who && other.text === event.text && event.times > 1 && other.times === event.times - 1));
    kept.events.push(event);
  }
  kept.rounds.push(...rounds);
  kept.events.splice(0, kept.events.length - MOST_EVENTS);
  kept.rounds.splice(0, kept.rounds.length - MOST_ROUNDS);
}

export function showLanes(state, now) {
  lastState = state;
  lastNow = now;
  draw();
  showEvents();
}

function draw() {
  const box = byId("lanes");
  if (!lastState || !box.clientWidth) return;
  const names = [["run", "run"], ...lastState.clusters.map((c) => [`cluster ${c.id}`, c.id]), ...lastState.slaves.map((x) => [`slave ${x.id}`, x.id])];
  const lanes = names.slice(0, MOST_LANES);
  const width = box.clientWidth, NAME = width < 500 ? 52 : 76, height = lanes.length * LANE + AXIS;
  const begin = beginning();
  const x = (wall) => NAME + ((width - NAME - 8) * (wall - begin)) / Math.max(1, lastNow - begin);
  const dense = kept.rounds.filter((round) => round.at >= begin).length > (width - NAME) / 6;
  const picture = s("svg", { class: dense ? "dense" : "", width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  picture.append(...axis(begin, x, width - NAME, width, height));
  lanes.forEach(([who, name], index) => picture.append(...lane(who, name, index, begin, x, width)));
  box.replaceChildren(picture);
  describe(begin);
}

function beginning() {
  const oldest = Math.min(lastNow - 60, ...kept.events.map((e) => e.at), ...kept.rounds.filter((r) => r.at).map((r) => r.at));
  return spanSeconds ? Math.max(oldest, lastNow - spanSeconds) : oldest;
}

function axis(begin, x, room, width, height) {
  const steps = [10, 30, 60, 300, 600, 1800, 3600, 3 * 3600, 6 * 3600, 12 * 3600, 86400, 7 * 86400];
  const most = Math.max(2, Math.floor(room / 90));
  const step = steps.find((one) => (lastNow - begin) / one <= most) ?? steps.at(-1);
  const parts = [];
  for (let at = Math.ceil(begin / step) * step; at <= lastNow; at += step) {
    parts.push(s("line", { class: "rule", x1: x(at), x2: x(at), y1: 0, y2: height - AXIS }));
    const text = s("text", { x: x(at), y: height - 4, "text-anchor": x(at) > width - 40 ? "end" : "middle" });
    text.textContent = step < 60 ? clock(at) : clock(at).slice(0, 5);
    parts.push(text);
  }
  return parts;
}

function lane(who, name, index, begin, x, width) {
  const y = index * LANE + LANE / 2;
  const parts = [];
  const label = s("text", { class: "name", x: 2, y: y + 4 });
  label.textContent = name.length > width / 60 + 4 ? `${name.slice(0, Math.floor(width / 60) + 3)}…` : name;
  parts.push(label);
  const own = kept.events.filter((event) => event.who === who || (who === "run" && !/^(cluster|slave) /.test(event.who)));
  if (who !== "run") parts.push(...presence(own, y, begin, x, width));
  parts.push(...pushes(who, name, y, begin, x));
  for (const event of own) if (event.at >= begin) parts.push(mark(event, x(event.at), y));
  return parts;
}

/** A line while the process was here, broken while it was away. */
function presence(own, y, begin, x, width) {
  const parts = [];
  let from = begin, how = "here";
  const part = (until) => { if (until > from) parts.push(s("line", { class: how, x1: x(from), x2: x(until), y1: y, y2: y })); };
  for (const event of own) {
    if (!event.presence) continue;
    const at = Math.max(begin, event.at);
    part(at);
    from = at;
    how = event.presence;
  }
  part(lastNow);
  return parts;
}

function pushes(who, name, y, begin, x) {
  const rounds = kept.rounds.filter((round) => round.at && round.at >= begin);
  if (who === "run") return rounds.map((round) => outcome(round, x(round.at), y));
  if (!who.startsWith("cluster ")) return [];
  return rounds.flatMap((round) => [
    ...(round.accepted.includes(name) ? [s("path", { class: "applied", d: `M${x(round.at)} ${y - 5}v10` })] : []),
    ...(round.excluded.includes(name) ? [s("path", { class: "excluded", d: `M${x(round.at)} ${y - 5}l5 5-5 5-5-5z` })] : []),
  ]);
}

function outcome(round, at, y) {
  if (round.outcome === "commit") return s("path", { class: "applied", d: `M${at} ${y - 7}v14` });
  if (round.outcome === "void") return s("circle", { class: "void", cx: at, cy: y, r: 4 });
  return s("path", { class: "abort", d: `M${at - 4} ${y - 4}l8 8m0-8l-8 8` });
}

function mark(event, at, y) {
  const kind = `mark ${event.level}`;
  if (event.level === "bad") return s("path", { class: kind, d: `M${at - 4.5} ${y - 4.5}h9v9h-9z` });
  if (event.level === "warn") return s("path", { class: kind, d: `M${at} ${y - 6}l5.500 10h-11z` });
  return s("circle", { class: kind, cx: at, cy: y, r: event.level === "good" ? 4.5 : 2.5 });
}

function describe(begin) {
  const rounds = kept.rounds.filter((round) => round.at >= begin);
  const faults = kept.events.filter((event) => event.at >= begin && event.level === "bad");
  const last = faults.at(-1);
  const words = `Timeline since ${clock(begin)}: ${several(rounds.length, "round", "rounds")}, ${several(faults.length, "fault", "faults")}`;
  byId("lanes").setAttribute("aria-label", last ? `${words}; the last: ${last.who} ${last.text} at ${clock(last.at)}` : words);
}

function showEvents() {
  const newest = [...kept.events].reverse();
  const shown = all ? newest : newest.slice(0, EVENTS_SHOWN);
  const more = byId("events-all");
  more.hidden = newest.length <= EVENTS_SHOWN;
  more.textContent = all ? "Show the newest" : `Show all ${newest.length}`;
  byId("events-empty").hidden = newest.length > 0;
  const key = `${all} ${shown[0]?.seq} ${newest.length}`;
  if (key === shownEvents) return;
  byId("events").replaceChildren(...shown.map(line));
  shownEvents = key;
}

function line(event) {
  const words = event.level === "bad" ? "fault: " : event.level === "warn" ? "warning: " : "";
  const item = h("li", {},
    h("time", { datetime: new Date(event.at * 1000).toISOString() }, clock(event.at)),
    h("span", { class: "sign", "aria-hidden": "true" }),
    h("span", { class: "text" }, h("span", { class: "unseen" }, words), h("span", { class: "who" }, event.who), ` ${event.text}`,
      event.times > 1 ? h("span", { class: "dim" }, ` × ${event.times}`) : null));
  level(item, event.level);
  return item;
}
