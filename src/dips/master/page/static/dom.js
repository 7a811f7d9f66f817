// Building blocks of the page. Text from the run only ever becomes a text node: nothing here parses markup.

export const byId = (id) => document.getElementById(id);

/** An element with attributes and children; a child is a node, or text. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** The same for drawings. */
export function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

/** Changes a text only when it differs, so that selections and screen readers are not disturbed. */
export function say(element, text) {
  const words = text === null || text === undefined ? "" : String(text);
  if (element.textContent !== words) element.textContent = words;
}

export function level(element, name) {
  for (const other of ["good", "wait", "warn", "bad", "off", "info"]) element.classList.toggle(other, other === name);
}

const filled = new WeakMap();

/** Give a cell new children when `key` differs from the last time. */
export function fill(cell, key, make) {
  const text = JSON.stringify(key);
  if (filled.get(cell) === text) return;
  cell.replaceChildren(...[make()].flat().filter((child) => child !== null && child !== undefined));
  filled.set(cell, text);
}

/** Keep one row for each item, in their order; a row stays the same element while its item stays. */
export class Rows {
  constructor(body, columns) {
    this.body = body;
    this.columns = columns;
    this.rows = new Map();
  }

  show(items) {
    const wanted = items.map((item) => item.id);
    for (const [id, row] of this.rows) {
      if (!wanted.includes(id)) { row.remove(); this.rows.delete(id); }
    }
    items.forEach((item, index) => {
      const row = this.rows.get(item.id) ?? this.add(item.id);
      if (this.body.children[index] !== row) this.body.insertBefore(row, this.body.children[index] ?? null);
      if (item.level) level(row, item.level);
      this.columns.forEach((column, place) => fill(row.children[place], column.key(item), () => column.make(item)));
    });
  }

  add(id) {
    const cells = this.columns.map((column, index) =>
      h(index === 0 ? "th" : "td", { scope: index === 0 ? "row" : null, role: index === 0 ? "rowheader" : "cell",
        class: column.class ?? null, "data-label": column.label }));
    const row = h("tr", { role: "row" }, ...cells);
    this.rows.set(id, row);
    return row;
  }
}

/** Adds explicit roles: tables that become cards on a phone keep their meaning for screen readers only with them. */
export function sayRoles(table) {
  table.setAttribute("role", "table");
  for (const part of table.querySelectorAll("thead, tbody")) part.setAttribute("role", "rowgroup");
  for (const row of table.querySelectorAll("tr")) row.setAttribute("role", "row");
  for (const head of table.querySelectorAll("thead th")) head.setAttribute("role", "columnheader");
}
