// Numbers, formatted exactly as in Python's views: see workbench/views/theme.py and replay/grouping.py.

import { MAX_RUNS, NAMED_RUNS } from "./tables.js";

/**
 * `number` with `digits` digits after the point; ties go to the even digit, as in Python.
 * @param {number} number
 * @param {number} digits
 */
function fixed(number, digits) {
  const size = Math.abs(number);
  if ((size * 2 ** (digits + 1)) % 2 !== 1) return number.toFixed(digits); // else it is a tie
  const below = Math.floor(size * 10 ** digits);
  return `${number < 0 ? "-" : ""}${((below + (below % 2)) / 10 ** digits).toFixed(digits)}`;
}

/** @param {number} number */
function threeDigits(number) {
  const size = Math.abs(number);
  return fixed(number, size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
}

/** @param {number} bytes */
export function formatBytes(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (Math.abs(bytes) >= 1024 ** (power + 1) && power < units.length - 1) power += 1;
  return power ? `${threeDigits(bytes / 1024 ** power)} ${units[power]}` : `${fixed(bytes, 0)} B`;
}

/**
 * Bytes on a scale, without trailing zeros.
 * @param {number} bytes
 */
export function formatTick(bytes) {
  return bytes ? formatBytes(bytes).replace(/(\.\d*?)0+ /, "$1 ").replace(". ", " ") : "0";
}

/**
 * The unit for a time of this size: its microseconds and its name.
 * @param {number} us
 * @returns {[number, string]}
 */
export function timeUnit(us) {
  const size = Math.abs(us);
  return size >= 1e6 ? [1e6, "s"] : size >= 1e3 ? [1e3, "ms"] : [1, "\u00b5s"];
}

/** @param {number} us microseconds */
export function formatDuration(us) {
  const [divisor, unit] = timeUnit(us);
  return `${threeDigits(us / divisor)} ${unit}`;
}

/** @typedef {"nan" | "inf" | "-inf"} NotFinite stands in messages for numbers that JSON lacks */

/**
 * A loss with four digits, and no more than nine characters: `2.303`, `3.975e-6`, `NaN`, `-inf`.
 * @param {number | NotFinite} loss
 */
export function formatLoss(loss) {
  if (typeof loss === "string") return loss === "nan" ? "NaN" : loss;
  if (!Number.isFinite(loss)) return Number.isNaN(loss) ? "NaN" : loss > 0 ? "inf" : "-inf";
  const size = Math.abs(loss);
  return size === 0 || (size >= 1e-3 && size < 1e4) ? loss.toPrecision(4) : loss.toExponential(3);
}

/** @param {number} part of a whole, in per cent */
export function formatShare(part) {
  return `${fixed(100 * part, 0)}%`;
}

/**
 * Cut the beginning off a text longer than `width` characters: names differ at their end. No point begins the rest.
 * @param {string} text
 * @param {number} width
 */
export function shorten(text, width) {
  return text.length <= width ? text : `\u2026${text.slice(1 - width).replace(/^\.+/, "")}`;
}

/**
 * `[0, 1, 2, 5]` -> `ranks 0-2, 5`; of many runs some are counted: `ranks 0, 15, 30 and 31 more`.
 * @param {readonly number[]} ranks
 */
export function ranksInWords(ranks) {
  /** @type {[number, number][]} */
  const runs = [];
  for (const rank of ranks) {
    const last = runs.at(-1);
    if (last?.[1] === rank - 1) last[1] = rank;
    else runs.push([rank, rank]);
  }
  const named = runs.length > MAX_RUNS ? runs.slice(0, NAMED_RUNS) : runs;
  const said = named.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join(", ");
  const left = ranks.length - named.reduce((sum, [first, last]) => sum + last + 1 - first, 0);
  return `rank${ranks.length > 1 ? "s" : ""} ${said}${left ? ` and ${left} more` : ""}`;
}

/**
 * Ranks in words within `letters` characters; only their number if that is too long.
 * @param {readonly number[]} ranks
 * @param {number} letters
 */
export function ranksWithin(ranks, letters) {
  const said = ranksInWords(ranks);
  return said.length <= letters ? said : `${ranks.length} ranks`;
}
