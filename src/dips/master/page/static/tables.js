// Clusters, slaves, links and rounds as tables; on a phone each row is a card (page.css).

import { Rows, byId, h, sayRoles } from "./dom.js";
import { bytes, count, digits, loss, several, span } from "./format.js";

const ROUNDS_SHOWN = 6;

let clusters, slaves, rounds, links, fastest = 1, linksOf = "";

const under = (text) => (text ? h("span", { class: "under" }, text) : null);

function bar(share) {
  const inner = h("span");
  inner.style.width = `${Math.max(2, Math.min(100, 100 * share))}%`;
  return h("span", { class: "bar", "aria-hidden": "true" }, inner);
}

function state(item, more) {
  return [h("span", { class: `state ${item.level}` }, h("span", { class: "sign", "aria-hidden": "true" }), h("span", {}, item.sign)), under(more)];
}

const CLUSTER = [
  { label: "Cluster", key: (c) => [c.id, c.incarnation, c.ranks], make: (c) => [c.id, under(who(c))] },
  { label: "State", key: (c) => [c.level, c.sign, c.why, c.note, away(c), working(c), late(c)], make: (c) => state(c, [away(c), c.why, working(c), late(c), c.note].filter(Boolean).join("; ")) },
  { label: "Tokens/s", class: "right", key: (c) => [c.tokens_per_s, c.steps_per_s, fastest], make: speed },
  { label: "Behind", class: "right", key: (c) => [c.behind, c.base, c.stale], make: behind },
  { label: "Loss", class: "right", key: (c) => c.loss, make: (c) => loss(c.loss) },
  { label: "Last verdict", class: "long", key: (c) => [c.verdict, c.reason, c.z], make: verdict },
  { label: "Pushes", class: "right", key: (c) => [c.applied, c.excluded, c.aborted], make: pushes },
];

function who(c) {
  return [c.ranks > 1 ? `${c.ranks} ranks` : "", c.lives > 1 ? `incarnation ${c.incarnation}` : ""].filter(Boolean).join(", ");
}

/** In steps, so that the row is not drawn again every second. */
function away(c) {
  if (c.away_s === null) return "";
  const step = c.away_s < 60 ? 5 : 60;
  const whole = step * Math.max(1, Math.floor(c.away_s / step));
  return `for ${whole < 60 ? `${whole} s` : span(whole)}`;
}

function late(c) {
  if (!c.late_ranks.length) return "";
  return c.late_ranks.length > 1 ? `ranks ${c.late_ranks.join(", ")} are late` : `rank ${c.late_ranks[0]} is late`;
}

function working(c) {
  if (!c.push) return "";
  const words = { TICKETED: "pushing", STAGED: "pushed", ADMITTED: "in the window", SEALED: "being judged" }[c.push.phase] ?? c.push.phase;
  return c.push.phase === "TICKETED" ? `${words} ${Math.round(100 * c.push.landed)} %` : words;
}

function speed(c) {
  if (c.tokens_per_s === null) return "–";
  return [count(Math.round(c.tokens_per_s)), under(c.steps_per_s ? `${digits(c.steps_per_s)} steps/s` : ""), bar(c.tokens_per_s / fastest)];
}

function behind(c) {
  if (c.behind === null) return "–";
  return [String(c.behind), under(c.stale ? `▲ stale, on ${c.base}` : "")];
}

function verdict(c) {
  if (!c.verdict) return h("span", { class: "dim" }, "none yet");
  const z = c.verdict === "excluded" && c.z !== null ? ` (z ${digits(c.z)})` : "";
  const sign = c.verdict === "applied" ? "" : "▲ ";
  return [h("span", { class: `verdict ${c.verdict.split(" ")[0]}` }, `${sign}${c.verdict}${z}`), under(c.reason)];
}

function pushes(c) {
  const more = [[c.excluded, "excluded"], [c.aborted, "aborted"]].filter(([n]) => n).map(([n, word]) => `${n} ${word}`);
  return [String(c.applied), under(more.join(", "))];
}

const SLAVE = [
  { label: "Slave", key: (x) => [x.id, x.incarnation], make: (x) => [x.id, under(x.lives > 1 ? `incarnation ${x.incarnation}` : "")] },
  { label: "State", key: (x) => [x.level, x.sign], make: (x) => state(x) },
  { label: "Version", class: "right", key: (x) => [x.version, x.durable], make: (x) => [x.version ?? "–", under(x.durable && x.durable !== x.version ? `disk ${x.durable}` : "")] },
  { label: "Memory", class: "right", key: (x) => bytes(x.memory_bytes), make: (x) => bytes(x.memory_bytes) },
  { label: "Received", class: "right", key: (x) => bytes(x.staging_bytes), make: (x) => bytes(x.staging_bytes) },
  { label: "Served", class: "right", key: (x) => bytes(x.served_bytes), make: (x) => bytes(x.served_bytes) },
  { label: "Refused", class: "right", key: (x) => [x.refused_chunks, x.refused_connections], make: refused },
];

function refused(x) {
  return [String(x.refused_chunks), under(x.refused_connections ? `${several(x.refused_connections, "connection", "connections")}` : "")];
}

const ROUND = [
  { label: "Round", key: (r) => r.id, make: (r) => r.id },
  { label: "Outcome", key: (r) => [r.outcome, r.version, r.reason], make: outcome },
  { label: "Merged", key: (r) => r.accepted, make: (r) => r.accepted.join(" ") || "–" },
  { label: "Excluded", class: "wide", key: (r) => r.excluded, make: (r) => (r.excluded.length ? h("span", { class: "verdict excluded" }, `▲ ${r.excluded.join(" ")}`) : "–") },
  { label: "Clip", class: "right wide", key: (r) => r.kappa, make: (r) => (r.kappa === null ? "–" : digits(r.kappa)) },
  { label: "Share", class: "right wide", key: (r) => r.rho, make: (r) => (r.rho === null ? "–" : digits(r.rho)) },
  { label: "Tokens", class: "right", key: (r) => r.tokens, make: (r) => count(r.tokens) },
];

function outcome(r) {
  const good = r.version !== null && r.outcome === "commit";
  return [good ? r.version : h("span", { class: "verdict aborted" }, `▲ ${r.outcome}`), under(r.reason)];
}

export function prepareTables() {
  clusters = new Rows(byId("clusters-table").tBodies[0], CLUSTER);
  slaves = new Rows(byId("slaves-table").tBodies[0], SLAVE);
  rounds = new Rows(byId("rounds-table").tBodies[0], ROUND);
  for (const id of ["clusters-table", "slaves-table", "rounds-table", "links-table"]) sayRoles(byId(id));
}

export function showTables(sample, kept) {
  fastest = Math.max(1, ...sample.clusters.map((c) => c.tokens_per_s ?? 0));
  clusters.show(sample.clusters);
  slaves.show(sample.slaves);
  rounds.show(kept.slice(-ROUNDS_SHOWN).reverse());
  showLinks(sample);
  const here = sample.clusters.filter((c) => c.alive).length;
  byId("clusters-count").textContent = sample.clusters.length ? `${here} of ${sample.clusters.length} here` : "";
  byId("slaves-count").textContent = sample.slaves.length ? `${sample.slaves.filter((x) => x.level === "good").length} of ${sample.slaves.length} ready` : "";
  show("clusters", sample.clusters.length);
  show("slaves", sample.slaves.length);
  show("rounds", kept.length);
}

function show(name, number) {
  byId(`${name}-table`).hidden = number === 0;
  byId(`${name}-empty`).hidden = number > 0;
}

function showLinks(sample) {
  const table = byId("links-table");
  const bySlave = [...new Set(sample.links.map((link) => link.slave))];
  const byCluster = [...new Set(sample.links.map((link) => link.cluster))];
  const some = sample.links.some((link) => link.push !== null || link.pull !== null);
  byId("links-scroll").hidden = !some;
  byId("links-empty").hidden = some;
  if (linksOf !== bySlave.join(" ")) {
    linksOf = bySlave.join(" ");
    table.tHead.rows[0].replaceChildren(...["from", ...bySlave].map((name, index) => h("th", { scope: "col", role: "columnheader" }, index ? name : "Cluster")));
    table.tBodies[0].replaceChildren();
    links = new Rows(table.tBodies[0], [
      { label: "Cluster", key: (row) => row.id, make: (row) => row.id },
      ...bySlave.map((slave) => ({ label: slave, key: (row) => row.of[slave], make: (row) => cell(row.of[slave]) })),
    ]);
    // A wide table can be scrolled with the keyboard too, once there is something to scroll.
    if (bySlave.length > 6) byId("links-scroll").tabIndex = 0; else byId("links-scroll").removeAttribute("tabindex");
  }
  links?.show(byCluster.map((cluster) => ({ id: cluster, of: Object.fromEntries(sample.links.filter((l) => l.cluster === cluster).map(
    (l) => [l.slave, [l.push, l.pull, age(l.push_age_s), age(l.pull_age_s)]])) })));
}

/** Coarse, so that the table is not drawn again every second. */
const age = (seconds) => (seconds === null || seconds < 60 ? "" : `${span(60 * Math.floor(seconds / 60))} ago`);

function cell(rates) {
  if (!rates) return "–";
  const [push, pull, pushed, pulled] = rates;
  return [one("up", "↑", "push ", push), one("down", "↓", "pull ", pull), under(pushed && pulled ? pushed : "")];
}

function one(name, arrow, word, rate) {
  return h("span", { class: name }, h("span", { class: "arrow", "aria-hidden": "true" }, `${arrow} `), h("span", { class: "unseen" }, word), rate === null ? "–" : `${bytes(rate)}/s`);
}
