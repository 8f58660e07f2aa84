// Every change of memory and units, and every span, between two times of a record.

import { lastUpTo } from "../series.js";
import { sure } from "../sure.js";

/** @import { SpansTable } from "../messages.js" */
/** @import { Column, RankRecord } from "./rank_record.js" */
/** @import { RecordedRun } from "./recorded_run.js" */

const MOST = 20_000; // changes of one group in a window; with more, the first answer's picture is shown

/**
 * Every change and every span between two times, as tables.
 * @param {RecordedRun} run
 * @param {number} from microseconds
 * @param {number} to
 * @param {number} most maximum number of changes of one group; with more, `exact` is false and the tables lack changes
 */
export function windowOf({ told, ranks, spans }, from, to, most = MOST) {
  const known = told.feed.groups.flatMap(([first], group) => {
    const rank = ranks.find((other) => other.rank === first);
    return rank ? [{ group, ...part(rank, from, to) }] : [];
  });
  const isExact = known.every(({ bytes, units }) => Math.max(bytes.length, units.length) <= most);
  const tables = { spans: spansBetween(spans, from, to), memory: noMemory(), states: noStates() };
  if (isExact) for (const found of known) tell(found, tables.memory, tables.states);
  return { exact: isExact, tables };
}

/**
 * The changes on a rank between two times, and the state before.
 * @param {RankRecord} rank
 * @param {number} from microseconds
 * @param {number} to
 */
function part(rank, from, to) {
  const begin = Math.round(from * 1e3);
  const first = lastUpTo(rank.shown, rank.length, begin), last = lastUpTo(rank.shown, rank.length, Math.round(to * 1e3));
  return {
    t: Math.max(begin, sure(rank.shown[0])) / 1e3,
    before: { bytes: rank.bytes.after(first), units: rank.units.after(first) },
    bytes: rank.bytes.between(first, last),
    units: rank.units.between(first, last),
    /** @param {number} row */
    us: (row) => sure(rank.shown[row]) / 1e3,
  };
}

function noMemory() {
  return { t: /** @type {number[]} */ ([]), bytes: /** @type {number[]} */ ([]), group: /** @type {number[]} */ ([]) };
}

function noStates() {
  return {
    t: /** @type {number[]} */ ([]), unit: /** @type {number[]} */ ([]), group: /** @type {number[]} */ ([]),
    state: /** @type {number[]} */ ([]),
  };
}

/**
 * Add the changes on the first rank of a group to the tables of a window.
 * @param {ReturnType<typeof part> & { group: number }} found
 * @param {ReturnType<typeof noMemory>} memory
 * @param {ReturnType<typeof noStates>} states
 */
function tell({ group, t, before, bytes, units, us }, memory, states) {
  /** @param {number} at */
  const tellBytes = (at) => {
    memory.t.push(at);
    memory.bytes.push(...before.bytes);
    memory.group.push(group);
  };
  tellBytes(t);
  bytes.forEach(({ row, part: place, value }, k) => {
    before.bytes[place] = value;
    if (bytes.at(k + 1)?.row !== row) tellBytes(us(row));
  });
  const first = before.units.map((value, unit) => ({ at: t, unit, value }));
  const later = units.map(({ row, part: unit, value }) => ({ at: us(row), unit, value }));
  for (const { at, unit, value } of [...first, ...later]) {
    states.t.push(at);
    states.unit.push(unit);
    states.group.push(group);
    states.state.push(value);
  }
}

/**
 * The spans that overlap the time between `from` and `to`.
 * @param {SpansTable} spans
 * @param {number} from
 * @param {number} to
 * @returns {Record<string, number[]>}
 */
function spansBetween(spans, from, to) {
  const ends = spans.start.map((start, k) => start + sure(spans.duration[k]));
  const mine = [...spans.start.keys()].filter((k) => sure(spans.start[k]) <= to && sure(ends[k]) >= from);
  const columns = /** @type {[string, Column][]} */ (Object.entries(spans));
  return Object.fromEntries(columns.map(([name, values]) => [name, mine.map((k) => sure(values[k]))]));
}
