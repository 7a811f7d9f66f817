// Formats numbers for people.

const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

/** 1234567 -> "1.23 M"; null -> "–". */
export function count(value) {
  if (value === null || value === undefined) return "–";
  for (const [size, letter] of UNITS) {
    if (Math.abs(value) >= size) return `${digits(value / size)}\u00a0${letter}`;
  }
  return Number.isInteger(value) ? String(value) : digits(value);
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  return value < 1000 ? `${Math.round(value)}\u00a0B` : `${count(value)}B`;
}

/** Three significant digits, without an exponent. */
export function digits(value) {
  const size = Math.abs(value);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
}

export function loss(value) {
  return value === null || value === undefined ? "–" : value.toFixed(3);
}

/** 75 -> "1 min 15 s". */
export function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  const parts = [];
  let rest = whole;
  for (const [length, word] of [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]]) {
    const amount = Math.floor(rest / length);
    rest -= amount * length;
    if (amount) parts.push(`${amount} ${word}`);
  }
  return parts.slice(0, 2).join(" ") || "0 s";
}

const two = (number) => String(number).padStart(2, "0");

export function clock(wall) {
  const when = new Date(wall * 1000);
  return `${two(when.getHours())}:${two(when.getMinutes())}:${two(when.getSeconds())}`;
}

export const several = (number, one, more) => `${number} ${number === 1 ? one : more}`;
