// The loss curves, drawn by uPlot (vendor/uplot). Curves differ by dashes and by their place in the legend, not by colour alone.

import { byId, h, s } from "./dom.js";
import { clock, count, loss } from "./format.js";

const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
const HELDOUT = "held-out";
const MAX_POINTS = 6000;

const data = { generation: -1, at: [], tokens: [], rate: [], loss: {}, heldout: [] };
const hidden = new Set();
let plot = null, by = "tokens", drawn = "", legend = new Map();

export function prepareCharts() {
  for (const [id, axis] of [["by-tokens", "tokens"], ["by-time", "time"]]) {
    byId(id).addEventListener("click", () => {
      by = axis;
      byId("by-tokens").setAttribute("aria-pressed", String(by === "tokens"));
      byId("by-time").setAttribute("aria-pressed", String(by === "time"));
      rebuild();
    });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", rebuild);
  new ResizeObserver(() => plot?.setSize(size())).observe(byId("loss-chart"));
}

/** Adds new data, or replaces all of it. */
export function addHistory(history) {
  if (history.replace) {
    Object.assign(data, { at: [], tokens: [], rate: [], loss: {}, heldout: [] });
  }
  const before = data.at.length;
  for (const name of ["at", "tokens", "rate"]) data[name].push(...history[name]);
  for (const name of Object.keys(history.loss)) data.loss[name] ??= new Array(before).fill(null);
  for (const [name, values] of Object.entries(data.loss)) values.push(...(history.loss[name] ?? new Array(history.at.length).fill(null)));
  for (const point of history.heldout) {
    data.heldout = data.heldout.filter((other) => other.version !== point.version);
    data.heldout.push(point);
  }
  if (data.at.length > MAX_POINTS) {
    for (const name of ["at", "tokens", "rate"]) data[name].splice(0, MAX_POINTS / 2);
    for (const values of Object.values(data.loss)) values.splice(0, MAX_POINTS / 2);
  }
}

export function showCharts() {
  const names = Object.keys(data.loss);
  const key = [by, ...names].join("|");
  if (key !== drawn || plot === null) rebuild();
  else plot.setData(columns(names));
  showLegend(names);
  describe(names);
}

function rebuild() {
  const names = Object.keys(data.loss);
  plot?.destroy();
  plot = null;
  const some = data.heldout.length > 0 || names.some((name) => data.loss[name].some((value) => value !== null));
  const wide = by === "time" || [...data.tokens, ...data.heldout.map((point) => point.tokens)].some((tokens) => tokens > 0);
  byId("loss-empty").hidden = some && wide;
  byId("loss-empty").textContent = some ? "The curves begin with the first round." : "No loss was reported yet.";
  if (!window.uPlot || !some || !wide) return;
  drawn = [by, ...names].join("|");
  plot = new window.uPlot(options(names), columns(names), byId("loss-chart"));
  plot.setSize(size()); // only now has its place a height, and no observer sees that between two frames
  legend = new Map();
  byId("legend").replaceChildren();
  showLegend(names);
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const size = () => ({ width: Math.max(200, byId("loss-chart").clientWidth), height: byId("loss-chart").clientHeight });

function options(names) {
  const axis = { stroke: colour("--dim"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { stroke: colour("--line"), width: 1, size: 4 }, font: "11px system-ui, sans-serif" };
  const curve = (name, index) => ({
    label: name, show: !hidden.has(name), stroke: colour(`--s${index % 8}`), width: 1.5, dash: DASHES[Math.floor(index) % 4], spanGaps: false, points: { show: false },
  });
  return {
    ...size(),
    padding: [8, 18, 0, 0],
    legend: { show: false },
    cursor: { y: false, points: { size: 6 } },
    scales: { x: { time: by === "time" } },
    axes: [
      { ...axis, size: 34, values: by === "time" ? undefined : (_, ticks) => ticks.map((tick) => count(tick)) },
      { ...axis, size: 44, values: (_, ticks, axis, space, step) => ticks.map((tick) => tick.toFixed(decimals(step))) },
    ],
    series: [
      {},
      ...names.map(curve),
      { label: HELDOUT, show: !hidden.has(HELDOUT), stroke: colour("--ink"), width: 2.5, spanGaps: true, points: { show: true, size: 4, fill: colour("--surface") } },
    ],
    hooks: { setCursor: [showAt] },
  };
}

/** How many a number needs so that ticks this far apart differ. */
export function decimals(step) {
  return [0, 1, 2, 3, 4].find((n) => Math.abs(step * 10 ** n - Math.round(step * 10 ** n)) < 1e-6) ?? 5;
}

/** All curves over one axis; a held-out loss is at its version's tokens. */
function columns(names) {
  const place = by === "time" ? "at" : "tokens";
  const points = data[place].map((x, index) => ({ x, index, heldout: null }));
  for (const point of data.heldout) points.push({ x: point[place], index: -1, heldout: point.loss });
  points.sort((one, other) => one.x - other.x || other.index - one.index);
  return [
    points.map((point) => point.x),
    ...names.map((name) => points.map((point) => (point.index < 0 ? undefined : data.loss[name][point.index]))),
    points.map((point) => (point.heldout === null ? undefined : point.heldout)),
  ];
}

function lastOf(name) {
  if (name === HELDOUT) return data.heldout.at(-1)?.loss ?? null;
  const values = data.loss[name];
  return values.at(-1) ?? null;
}

function showLegend(names) {
  [...names, HELDOUT].forEach((name, index) => {
    if (name === HELDOUT && data.heldout.length === 0) return;
    if (!legend.has(name)) legend.set(name, entry(name, index, name === HELDOUT));
    const text = loss(lastOf(name));
    const last = legend.get(name).querySelector(".last");
    if (!plot?.cursor.idx && last.textContent !== text) last.textContent = text;
  });
}

function entry(name, index, isHeldout) {
  const line = s("line", { x1: 0, x2: 22, y1: 4, y2: 4 });
  line.style.stroke = isHeldout ? "var(--ink)" : `var(--s${index % 8})`;
  line.style.strokeDasharray = isHeldout ? "" : DASHES[index % 4].join(" ");
  if (isHeldout) line.style.strokeWidth = "3";
  const button = h("button", { type: "button", "aria-pressed": String(!hidden.has(name)) },
    s("svg", { viewBox: "0 0 22 8", "aria-hidden": "true" }, line), h("span", {}, name), h("span", { class: "last" }));
  button.addEventListener("click", () => {
    if (hidden.has(name)) hidden.delete(name); else hidden.add(name);
    button.setAttribute("aria-pressed", String(!hidden.has(name)));
    plot?.setSeries(plot.series.findIndex((one) => one.label === name), { show: !hidden.has(name) });
  });
  byId("legend").append(h("li", {}, button));
  return button;
}

/** Shows the values under the pointer in the legend. */
function showAt(chart) {
  const at = chart.cursor.idx;
  for (const [name, button] of legend) {
    const values = chart.data[chart.series.findIndex((one) => one.label === name)];
    const value = at === null || at === undefined ? lastOf(name) : values?.[at];
    const text = loss(value ?? null);
    if (text !== "–" || at === null || at === undefined) button.querySelector(".last").textContent = text;
  }
}

function describe(names) {
  const parts = [];
  const first = data.heldout[0], last = data.heldout.at(-1);
  if (first) parts.push(`held-out loss from ${loss(first.loss)} to ${loss(last.loss)} at ${count(last.tokens)} tokens`);
  for (const name of names) if (lastOf(name) !== null) parts.push(`cluster ${name} ${loss(lastOf(name))}`);
  const since = data.at.length ? `, since ${clock(data.at[0])}` : "";
  byId("loss-chart").setAttribute("aria-label", parts.length ? `Loss curves${since}: ${parts.join(", ")}` : "Loss curves: nothing to draw yet");
}
