// All rows of a timeline, and which collective a wait is for.

import { sure } from "../sure.js";
import { gallop } from "./items.js";
import { Track } from "./track.js";

/** @import { Items } from "./items.js" */
/** @import { TrackName } from "./track.js" */

const MAX_TRIES = 64; // additions to a rank after which the collective of a wait is no longer expected

/** @typedef {{ track: Track, k: number }} Place */

/** All tracks. A wait marks how long compute waited for its collective; it may be added before the collective. */
export class Tracks {
  /** @param {readonly TrackName[]} names */
  constructor(names = []) {
    /** @type {Track[]} */
    this.all = [];
    /** @type {{ track: Track, from: number, start: number, end: number, tries: number }[]} */
    this.pending = []; // waits whose collective is not there yet
    this.add(names);
  }

  /** @param {readonly TrackName[]} names of more tracks */
  add(names) {
    this.all.push(...names.map((name) => new Track(name)));
  }

  /** Number of items. */
  get count() {
    return this.all.reduce((sum, { length }) => sum + length, 0);
  }

  /**
   * @param {number} index of the track
   * @param {Items} items
   */
  append(index, items) {
    const track = sure(this.all[index]), { arrowFrom, start, end } = items;
    track.append(items);
    arrowFrom.forEach((from, k) => {
      if (!Number.isNaN(from)) this.pending.push({ track, from, start: sure(start[k]), end: sure(end[k]), tries: 0 });
    });
    this.pending = this.pending.filter((wait) => {
      if (wait.track.rank !== track.rank) return true;
      const found = this.issue(wait.track, wait.from);
      if (!found) return (wait.tries += 1) < MAX_TRIES;
      found.track.expose(found.k, wait.start, wait.end);
      return false;
    });
  }

  /**
   * The collective of a wait's rank that began at `start`.
   * @param {Track} wait
   * @param {number} start
   * @returns {Place | null}
   */
  issue(wait, start) {
    /** @type {Place | null} */
    let best = null;
    let distance = 2; // microseconds: times may be rounded
    for (const track of this.all) {
      if (track.rank !== wait.rank || track === wait) continue;
      const near = gallop(track.start, track.length, 0, start);
      for (const k of [near - 1, near]) {
        const away = k >= 0 && k < track.length ? Math.abs(sure(track.start[k]) - start) : Infinity;
        if (away < distance) [best, distance] = [{ track, k }, away];
      }
    }
    return best;
  }

  /** Drop the earlier half of the items, by their start. */
  forget() {
    const before = (/** @type {number} */ t) => this.all.map(({ start, length }) => gallop(start, length, 0, t));
    const sum = (/** @type {number[]} */ counts) => counts.reduce((a, b) => a + b, 0);
    const half = this.count / 2, there = this.all.filter(({ length }) => length);
    let low = Math.min(...there.map(({ start }) => sure(start[0])));
    let high = Math.max(...there.map(({ start, length }) => sure(start[length - 1])));
    for (let k = 0; k < 60 && high > low; k++) {
      const middle = (low + high) / 2;
      if (sum(before(middle)) < half) low = middle;
      else high = middle;
    }
    before(high).forEach((count, k) => { sure(this.all[k]).forget(count); });
  }
}
