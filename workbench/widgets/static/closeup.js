// Every change of memory and units, and every span, in the part of time in view. The feed tells only so much of them, and
// of what is long ago nothing; where the view holds still the kernel is asked for the rest, so that what is drawn under
// the cursor is what the numbers say.

/** @import { AskWindow, WindowDetail } from "./messages.js" */
/** @import { Known } from "./series.js" */
/** @import { Items } from "./track.js" */

export const ASK_AGAIN_MS = 6000; // a question without an answer for so long is put again
const REST_MS = 100; // that the view has not moved before it is asked for
const LATE_MS = 500; // between two questions for the same part of time, at least
const LEISURE = 8; // so many times as long as the last answer took
const LATE_US = 1e6; // after this much more time no rank tells anything of a moment that it has not told
const PATIENCE_MS = 700; // until it is said that the answer is not there
const MARGIN = 0.25; // of the view, asked for on either side: small moves need no answer

/** @typedef {readonly [number, number]} View */

/** @typedef {{ view: View, key: string, end: number, news: number }} Wanted `news` counts what the feed has told */

/** @typedef {Wanted & { from: number, to: number, isExact: boolean, known: Known, spans: Items[] }} Found */

/** Asks for a window of time when that is needed, one question at a time, and keeps the last answer. */
export class Closeup {
  /** @param {(question: Omit<AskWindow, "view">) => void} ask */
  constructor(ask) {
    this.ask = ask;
    this.number = 0;
    this.timer = 0;
    /** @type {number | null} */
    this.since = null; // when something was lacking first
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
    this.number += 1; // an answer on its way is too late
    this.found = null;
    this.asked = null;
  }

  /** Nothing is to be asked. */
  rest() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.since = null;
    this.wanted = null;
  }

  /**
   * What is known of all that `view` shows, of a run that has come to `end`; null if that is not all.
   * @param {View} view
   * @param {number} end
   */
  covering([t0, t1], end) {
    const { found } = this;
    return found && found.from <= t0 && Math.min(found.to, found.end) >= Math.min(t1, end) ? found : null;
  }

  /**
   * The view holds still or is moved: ask for what it shows if need be.
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
    this.ask({ ask: "window", number: this.number, from_us: t0 - margin, to_us: t1 + margin });
  }

  /**
   * Keep an answer; returns whether it is for the last question.
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
   * What to say of a picture of `found`.
   * @param {Found | null} found
   */
  hint(found) {
    if (found) return found.isExact ? "" : "simplified: zoom in for every change";
    return this.since !== null && performance.now() - this.since > PATIENCE_MS ? "simplified" : "";
  }
}
