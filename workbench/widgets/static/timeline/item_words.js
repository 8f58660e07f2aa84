// An item of the timeline in words and numbers.

import { KIND, KINDS, MEANINGS } from "../events.js";
import { formatBytes, formatDuration } from "../format.js";
import { sure } from "../sure.js";
import { share } from "./items.js";

/** @import { FoundItem } from "./find_item.js" */
/** @import { Tracks } from "./tracks.js" */

/** @typedef {ReturnType<typeof describe>} ItemWords */

/**
 * @param {readonly string[]} units
 * @param {number} unit
 */
export function unitName(units, unit) {
  return units[unit] ?? `unit ${unit}`;
}

/**
 * @param {FoundItem} found
 * @param {Tracks} tracks all tracks, in which a wait finds its collective
 * @param {readonly string[]} units names by number
 */
export function describe({ row: { track }, items, k }, tracks, units) {
  const kind = sure(items.kind[k]), number = sure(items.unit[k]), start = sure(items.start[k]), end = sure(items.end[k]);
  const unit = number >= 0 ? unitName(units, number) : "", issued = sure(items.arrowFrom[k]);
  const cause = Number.isNaN(issued) ? null : tracks.issue(track, issued);
  const { words: word, isCollective: isCommunication } = sure(KINDS[kind]);
  const what = kind === KIND.WAIT && cause ? `wait for ${sure(KINDS[sure(cause.track.kind[cause.k])]).words}` : word;
  const waited = sure(items.exposed[k]);
  return {
    kind, word, unit, start, end, isCommunication,
    title: unit ? `${what} of ${unit}` : what,
    rank: track.rank,
    label: track.label,
    bytes: sure(items.bytes[k]),
    duration: end - start,
    exposed: (end - start) * share(waited), // microseconds
    isExposed: waited > 0,
    hasEnded: items === track,
  };
}

/**
 * The lines of the tip beside an item.
 * @param {ItemWords} item
 */
export function tipLines(item) {
  const size = item.bytes ? `${formatBytes(item.bytes)} \u00b7 ` : "";
  const lines = [item.title, `${size}${formatDuration(item.duration)}${item.hasEnded ? "" : ", not ended"}`];
  if (item.kind === KIND.WAIT) lines.push("exposed: compute waited");
  else if (item.isCommunication) lines.push(exposure(item));
  lines.push(`${item.label}, from ${formatDuration(item.start)}`);
  return lines;
}

/**
 * A kind of item as an entry of the legend.
 * @param {number} kind
 */
export function legendText(kind) {
  return `${sure(KINDS[kind]).words}${kind === KIND.WAIT ? " (exposed)" : ""}`;
}

/**
 * The lines of the tip beside an entry of the legend: what its words mean.
 * @param {number} kind
 */
export function legendLines(kind) {
  const meanings = [MEANINGS[sure(KINDS[kind]).words] ?? "", kind === KIND.WAIT ? `exposed: ${MEANINGS.exposed ?? ""}` : ""];
  return [legendText(kind), ...meanings.filter(Boolean)];
}

/**
 * How much of a collective compute waited for.
 * @param {{ duration: number, exposed: number, isExposed: boolean }} item
 */
export function exposure({ duration, exposed, isExposed }) {
  if (!isExposed) return "hidden behind compute";
  if (!exposed) return "exposed: compute waited for it";
  if (exposed >= 0.996 * duration) return "exposed: compute waited for all of it";
  return `${formatDuration(exposed)} exposed, ${formatDuration(duration - exposed)} hidden`;
}
