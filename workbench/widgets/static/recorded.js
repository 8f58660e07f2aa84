// A record inside the page: answers the dashboard's questions in place of a kernel, from the tables that
// workbench/widgets/recorded.py has made. The descriptions of events, and the states after them, were computed there.

import { ranksInWords } from "./format.js";
import { lastUpTo } from "./series.js";
import { sure } from "./sure.js";
import { aligned, pack, unpack } from "./unpack.js";

/** @import { InitialState, Answer, Moment, FeedUpdate, Question, RanksAt, SpansTable } from "./messages.js" */

const MOST = 20_000; // changes of one group in a window; with more, the first answer's picture is shown
const IDLE_MS = 1500; // until the answer that there is nothing new

/** @typedef {Float64Array | Int32Array | Uint8Array} Column */

const TYPES = { f8: Float64Array, i4: Int32Array, u1: Uint8Array };

/**
 * The blob's data besides its columns.
 * @typedef {object} Told
 * @property {InitialState} about
 * @property {FeedUpdate} feed the first answer
 * @property {readonly { rank: number, seq: number }[]} ranks those with rows, and the number of their first row
 * @property {number} alike ranks are alike if no class of memory differs by more than this share of the total
 * @property {number} reserved number of the class of memory that is not in use
 * @property {readonly string[]} texts
 * @property {readonly string[]} doings
 * @property {readonly (readonly [string, keyof typeof TYPES, number])[]} columns name, code, length
 */

/**
 * The decompressed bytes of a base64 text.
 * @param {string} text
 */
export async function unzipped(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

/**
 * The running sums of `steps`.
 * @param {Column} steps
 */
function summed(steps) {
  const found = new Float64Array(steps.length);
  let sum = 0;
  for (let k = 0; k < steps.length; k++) found[k] = sum += sure(steps[k]);
  return found;
}

/** Several values that change with rows, and their lookup after any row. */
class Changes {
  /**
   * @param {Column} rows for each value in turn, the rows after which it changes, -1 before all
   * @param {Column} values what it changes to
   * @param {Column} ends where the changes of each value end
   */
  constructor(rows, values, ends) {
    this.parts = Array.from(ends, (end, k) => {
      const from = k ? sure(ends[k - 1]) : 0;
      return { rows: rows.subarray(from, end), values: values.subarray(from, end) };
    });
  }

  /**
   * All values after a row.
   * @param {number} row
   */
  after(row) {
    return this.parts.map(({ rows, values }) => sure(values[lastUpTo(rows, rows.length, row)]));
  }

  /**
   * The changes of the rows after `first` up to `last`, in the order of the rows.
   * @param {number} first
   * @param {number} last
   */
  between(first, last) {
    const found = this.parts.flatMap(({ rows, values }, part) => {
      const from = lastUpTo(rows, rows.length, first) + 1, to = lastUpTo(rows, rows.length, last) + 1;
      return Array.from(rows.subarray(from, to), (row, k) => ({ row, part, value: sure(values[from + k]) }));
    });
    return found.sort((a, b) => a.row - b.row);
  }
}

/** The record of one rank. Times are nanoseconds from the view's origin. */
class RankRecord {
  /**
   * @param {number} rank
   * @param {number} seq of its first row
   * @param {(name: string) => Column} column
   */
  constructor(rank, seq, column) {
    this.rank = rank;
    this.seq = seq;
    this.known = summed(column("known")); // arrival time of each row
    const hidden = summed(column("hidden"));
    this.shown = this.known.map((t, k) => t - sure(hidden[k])); // its place on the axis
    this.step = summed(column("step"));
    this.back = column("back");
    this.text = column("text");
    this.doing = column("doing");
    this.events = Int32Array.from([...column("event").keys()].filter((row) => column("event")[row]));
    this.bytes = new Changes(column("bytes.row"), column("bytes.value"), column("bytes.ends"));
    this.units = new Changes(column("units.row"), column("units.value"), column("units.ends"));
    this.length = this.known.length;
  }

  /**
   * The last row up to a time in `times`, `known` or `shown`; at least the first.
   * @param {Float64Array} times
   * @param {number} t
   */
  rowAt(times, t) {
    return Math.max(lastUpTo(times, this.length, t), 0);
  }

  /**
   * The row `by` events after row number `seq`, at most the first or last event.
   * @param {number} seq
   * @param {number} by
   */
  beside(seq, by) {
    const row = Math.min(Math.max(seq - this.seq, 0), this.length - 1), count = this.events.length;
    if (!count) return row;
    return sure(this.events[Math.min(Math.max(lastUpTo(this.events, count, row) + by, 0), count - 1)]);
  }
}

/** A record, and the answers to a dashboard's questions. */
export class RecordedRun {
  /** @param {ArrayBuffer} buffer the decompressed blob */
  constructor(buffer) {
    const length = new DataView(buffer).getUint32(0, true);
    /** @type {unknown} */
    const told = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
    this.told = /** @type {Told} */ (told);
    /** @type {Map<string, Column>} */
    const columns = new Map();
    let at = aligned(4 + length);
    for (const [name, code, count] of this.told.columns) {
      const column = new TYPES[code](buffer, at, count);
      columns.set(name, column);
      at += aligned(column.byteLength);
    }
    /** @param {string} name */
    const columnOf = (name) => {
      const found = columns.get(name);
      if (!found) throw new Error(`the record lacks ${name}`);
      return found;
    };
    const feed = columnOf("feed");
    this.data = new DataView(feed.buffer, feed.byteOffset, feed.byteLength);
    this.spans = unpack(this.told.feed.counts, this.data).spans;
    this.ranks = this.told.ranks.map(({ rank, seq }) => new RankRecord(rank, seq, (name) => columnOf(`${rank}.${name}`)));
  }

  /**
   * All ranks at a time in microseconds; null if nothing is recorded.
   * @param {number} us
   * @returns {Moment | null}
   */
  at(us) {
    const t = Math.round(us * 1e3);
    const rows = this.ranks.map((rank) => rank.rowAt(rank.shown, t));
    let newest = 0;
    this.ranks.forEach((rank, k) => {
      const row = sure(rows[k]), best = sure(this.ranks[newest]), bestRow = sure(rows[newest]);
      const isUp = sure(rank.shown[row]) <= t, bestIsUp = sure(best.shown[bestRow]) <= t;
      const isLater = sure(rank.known[row]) > sure(best.known[bestRow]);
      if (isUp === bestIsUp ? isLater : isUp) newest = k;
    });
    return this.ranks.length ? this.moment(newest, sure(rows[newest]), rows) : null;
  }

  /**
   * All ranks at the arrival of the row `by` events after row `seq` of a rank; null if the rank has no rows.
   * @param {number} rank
   * @param {number} seq
   * @param {number} by
   * @returns {Moment | null}
   */
  beside(rank, seq, by) {
    const place = this.ranks.findIndex((other) => other.rank === rank);
    if (place < 0) return null;
    const mine = sure(this.ranks[place]), row = mine.beside(seq, by), known = sure(mine.known[row]);
    return this.moment(place, row, this.ranks.map((other) => other.rowAt(other.known, known)));
  }

  /**
   * The moment of a row of one rank.
   * @param {number} place index of the rank
   * @param {number} row
   * @param {readonly number[]} rows each rank's last row that had arrived
   * @returns {Moment}
   */
  moment(place, row, rows) {
    const rank = sure(this.ranks[place]), event = row - sure(rank.back[row]);
    const entries = this.ranks.map((other, k) => this.entry(other, sure(rows[k]), k === place ? row : sure(rows[k])));
    return {
      t_us: sure(rank.shown[row]) / 1e3,
      rank: rank.rank,
      seq: rank.seq + event,
      step: sure(rank.step[event]),
      event: `rank ${rank.rank}: ${sure(this.told.texts[sure(rank.text[row])])}`,
      ranks: this.folded(entries),
    };
  }

  /**
   * One rank after a row; the row `named` describes what it does.
   * @param {RankRecord} rank
   * @param {number} row
   * @param {number} named
   * @returns {RanksAt}
   */
  entry(rank, row, named) {
    const bytes = rank.bytes.after(row);
    return {
      ranks: [rank.rank],
      label: ranksInWords([rank.rank]),
      doing: sure(this.told.doings[sure(rank.doing[named])]),
      units: /** @type {RanksAt["units"]} */ (rank.units.after(row)),
      bytes,
      in_use: total(bytes) - sure(bytes[this.told.reserved]),
    };
  }

  /**
   * The entries, with alike ones merged.
   * @param {readonly RanksAt[]} entries
   */
  folded(entries) {
    /** @type {RanksAt[]} */
    const groups = [];
    for (const entry of entries) {
      const place = groups.findIndex((group) => this.areAlike(group, entry));
      if (place < 0) {
        groups.push(entry);
        continue;
      }
      const group = sure(groups[place]), ranks = [...group.ranks, ...entry.ranks];
      groups[place] = { ...group, ranks, label: ranksInWords(ranks) };
    }
    return groups;
  }

  /**
   * @param {RanksAt} first
   * @param {RanksAt} other
   */
  areAlike(first, other) {
    const near = this.told.alike * Math.max(total(first.bytes), 1);
    return first.doing === other.doing && first.units.every((state, unit) => state === other.units[unit]) &&
      first.bytes.every((bytes, k) => Math.abs(bytes - sure(other.bytes[k])) <= near);
  }

  /**
   * Every change of memory and units, and every span, between two times.
   * @param {number} from microseconds
   * @param {number} to
   * @param {number} most maximum number of changes of one group
   */
  window(from, to, most = MOST) {
    const known = this.told.feed.groups.flatMap(([first], group) => {
      const rank = this.ranks.find((other) => other.rank === first);
      return rank ? [{ group, ...part(rank, from, to) }] : [];
    });
    const isExact = known.every(({ bytes, units }) => Math.max(bytes.length, units.length) <= most);
    const tables = { spans: spansBetween(this.spans, from, to), memory: noMemory(), states: noStates() };
    if (isExact) for (const found of known) tell(found, tables.memory, tables.states);
    return { exact: isExact, tables };
  }

  /**
   * The answer to a question, with its buffers; null: none.
   * @param {Question} question
   * @returns {[Answer, DataView[]] | null}
   */
  answer(question) {
    const { view } = question;
    switch (question.word) {
      case "feed":
        return question.wait ? [this.nothingNew(view), [pack({})[1]]] : [{ ...this.told.feed, view }, [this.data]];
      case "at":
        return [{ word: "moment", view, number: question.number, moment: this.at(question.t_us) }, []];
      case "beside": {
        const moment = this.beside(question.rank, question.seq, question.by);
        return [{ word: "moment", view, number: question.number, moment }, []];
      }
      case "window": {
        const { number, from_us, to_us } = question, { exact, tables } = this.window(from_us, to_us);
        const [counts, data] = pack(tables);
        return [{ word: "window", view, number, from_us, to_us, exact, counts }, [data]];
      }
      default:
        return null;
    }
  }

  /**
   * @param {string} view
   * @returns {FeedUpdate}
   */
  nothingNew(view) {
    const known = { units: null, order: null, holds: null, now: null, peaks: null, cursor: null, has_moved: false };
    return { ...this.told.feed, ...known, view, restart: false, another: false, exact: true, counts: pack({})[0] };
  }
}

/** @param {readonly number[]} values */
function total(values) {
  return values.reduce((sum, value) => sum + value, 0);
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

/**
 * A model for a dashboard that answers from a record instead of a kernel.
 * @param {RecordedRun} run
 */
export function modelOf(run) {
  /** @type {Set<(answer: Answer, buffers: DataView[]) => void>} */
  const calls = new Set();
  return {
    isRecord: true,
    get: () => run.told.about,
    /** @param {Question} question */
    send: (question) => {
      const isIdle = question.word === "feed" && question.wait;
      setTimeout(() => {
        const answer = run.answer(question);
        if (answer) for (const call of calls) call(...answer);
      }, isIdle ? IDLE_MS : 0);
    },
    /**
     * @param {"msg:custom"} _name
     * @param {(answer: Answer, buffers: DataView[]) => void} call
     */
    on: (_name, call) => { calls.add(call); },
    /**
     * @param {"msg:custom"} _name
     * @param {(answer: Answer, buffers: DataView[]) => void} call
     */
    off: (_name, call) => { calls.delete(call); },
  };
}
