// A record inside the page: the state of the ranks at any time and after any row, from the tables that
// workbench/widgets/recorded.py has made. The descriptions of events, and the states after them, were computed there.

import { ranksInWords } from "../format.js";
import { sure } from "../sure.js";
import { aligned, unpack } from "../unpack.js";
import { RankRecord } from "./rank_record.js";

/** @import { InitialState, Moment, FeedUpdate, RanksAt } from "../messages.js" */
/** @import { Column } from "./rank_record.js" */

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

/** A record of all ranks. */
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
}

/** @param {readonly number[]} values */
function total(values) {
  return values.reduce((sum, value) => sum + value, 0);
}
