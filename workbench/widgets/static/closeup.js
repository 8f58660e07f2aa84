// Every change of memory and units, and every span, in the window in view. The feed has only a part of them, and none
// of the distant past. While the view holds still, the kernel is asked for the rest, so that the picture under the
// cursor agrees with the numbers.

/** @import { AskWindow, WindowDetail } from "./messages.js" */
/** @import { Known } from "./series.js" */
/** @import { Items } from "./track.js" */

export const ASK_AGAIN_MS = 6000; // a question without an answer for so long is asked again
const REST_MS = 100; // how long the view must hold still before it is asked for
const LATE_MS = 500; // minimum time between two questions for the same window
const LEISURE = 8; // and at least so many times as long as the last answer took
const LATE_US = 1e6; // ranks send nothing new about a moment older than this
const PATIENCE_MS = 700; // without an answer for so long, the view is marked as simplified
const MARGIN = 0.25; // share of the view requested on either side, so that small moves need no question

/** @typedef {readonly [number, number]} View */

/** @typedef {{ view: View, key: string, end: number, news: number }} Wanted `news`: number of feeds with changes */

/** @typedef {Wanted & { from: number, to: number, isExact: boolean, known: Known, spans: Items[] }} Found */

/** Asks for a window of time when needed, one question at a time, and keeps the last answer. */
export class Closeup {
  /** @param {(question: Omit<AskWindow, "view">) => void} ask */
  constructor(ask) {
    this.ask = ask;
    this.number = 0;
    this.timer = 0;
    /** @type {number | null} */
    this.since = null; // when data was first missing
    /** @type {Wanted | null} */
    this.wanted = null;
    /** @type {Wanted & { at: number } | null} */
    this.asked = null;
    /** @type {Found | null} */
    this.found = null;
    this.tookMs = 0;
  }

  forget() {
    this.rest();
    this.number += 1; // ignore a pending answer
    this.found = null;
    this.asked = null;
  }

  /** Ask nothing. */
  rest() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.since = null;
    this.wanted = null;
  }

  /**
   * The last answer if it covers all that `view` shows of a run that has reached `end`; else null.
   * @param {View} view
   * @param {number} end
   */
  covering([t0, t1], end) {
    const { found } = this;
    return found && found.from <= t0 && Math.min(found.to, found.end) >= Math.min(t1, end) ? found : null;
  }

  /**
   * Ask for what the view shows, if needed, once it holds still.
   * @param {View} view
   * @param {number} end
   * @param {number} news
   */
  look(view, end, news) {
    const found = this.covering(view, end), key = view.join();
    const isLate = found !== null && found.news !== news && found.to > found.end - LATE_US;
    if (found && !isLate && (found.isExact || found.key === key)) {
      this.rest();
      return;
    }
    if (!found) this.since ??= performance.now();
    if (this.asked && performance.now() - this.asked.at < ASK_AGAIN_MS) return;
    if (this.wanted?.key !== key) {
      clearTimeout(this.timer);
      this.timer = 0;
    }
    const wanted = (this.wanted = { view, key, end, news });
    this.timer ||= setTimeout(() => { this.send(wanted); }, found?.key === key ? Math.max(LATE_MS, LEISURE * this.tookMs) : REST_MS);
  }

  /** @param {Wanted} wanted */
  send(wanted) {
    const [t0, t1] = (this.wanted ?? wanted).view, margin = MARGIN * (t1 - t0);
    this.asked = { ...(this.wanted ?? wanted), at: performance.now() };
    this.timer = 0;
    this.number += 1;
    this.ask({ word: "window", number: this.number, from_us: t0 - margin, to_us: t1 + margin });
  }

  /**
   * Keep an answer; returns whether it belongs to the last question.
   * @param {WindowDetail} answer
   * @param {Known} known
   * @param {Items[]} spans of each track
   */
  take({ number, from_us: from, to_us: to, exact: isExact }, known, spans) {
    if (number !== this.number || !this.asked) return false;
    this.tookMs = performance.now() - this.asked.at;
    this.found = { ...this.asked, from, to, isExact, known, spans };
    this.asked = null;
    return true;
  }

  /**
   * The note on a picture of `found`.
   * @param {Found | null} found
   */
  hint(found) {
    if (found) return found.isExact ? "" : "simplified: zoom in for every change";
    return this.since !== null && performance.now() - this.since > PATIENCE_MS ? "simplified" : "";
  }
}
