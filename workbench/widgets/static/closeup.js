// Every change of memory and units in the part of time in view. The feed tells only extremes of them; where the view
// holds still the kernel is asked for the rest, so that what is drawn under the cursor is what the numbers say.

import { fillMemory, fillStates } from "./series.js";

export const ASK_AGAIN_MS = 6000; // a question without an answer for so long is put again
const REST_MS = 100; // that the view has not moved before it is asked for
const LATE_MS = 500; // between two questions for the same part of time
const LATE_US = 1e6; // after this much more time no rank tells anything of a moment that it has not told
const PATIENCE_MS = 700; // until it is said that the answer is not there
const MARGIN = 0.25; // of the view, asked for on either side: small moves need no answer

/** Asks for a window of time when that is needed, one question at a time, and keeps the last answer. */
export class Closeup {
  constructor(ask) {
    Object.assign(this, { ask, number: 0 });
    this.forget();
  }

  forget() {
    this.rest();
    this.number += 1; // an answer on its way is too late
    Object.assign(this, { found: null, asked: null });
  }

  /** Nothing is to be asked. */
  rest() {
    clearTimeout(this.timer);
    Object.assign(this, { timer: 0, since: null, wanted: null });
  }

  /** What is known of all that `view` shows, of a run that has come to `end`; null if that is not all. */
  covering([t0, t1], end) {
    const { found } = this;
    return found && found.from <= t0 && Math.min(found.to, found.end) >= Math.min(t1, end) ? found : null;
  }

  /** The view holds still or is moved: ask for what it shows if need be. `news` counts what the feed has told. */
  look(view, end, news) {
    const found = this.covering(view, end), key = view.join();
    const isLate = found && found.news !== news && found.to > found.end - LATE_US;
    if (found && !isLate && (found.exact || found.key === key)) return this.rest();
    if (!found) this.since ??= performance.now();
    if (this.asked && performance.now() - this.asked.at < ASK_AGAIN_MS) return undefined;
    if (this.wanted?.key !== key) clearTimeout(this.timer), (this.timer = 0);
    this.wanted = { view, key, end, news };
    return (this.timer ||= setTimeout(() => this.send(), found?.key === key ? LATE_MS : REST_MS));
  }

  send() {
    const [t0, t1] = this.wanted.view, margin = MARGIN * (t1 - t0);
    this.asked = { ...this.wanted, at: performance.now() };
    this.timer = 0;
    this.ask({ ask: "window", number: (this.number += 1), from_us: t0 - margin, to_us: t1 + margin });
  }

  /** Keep an answer; returns whether it is for the last question. */
  take({ number, from_us: from, to_us: to, exact }, { memory, states }) {
    if (number !== this.number || !this.asked) return false;
    this.found = { ...this.asked, from, to, exact, memory: [], states: [] };
    fillMemory(this.found.memory, memory);
    fillStates(this.found.states, states);
    this.asked = null;
    return true;
  }

  /** What to say of a picture of `found`. */
  hint(found) {
    if (found) return found.exact ? "" : "simplified: zoom in for every change";
    return this.since !== null && performance.now() - this.since > PATIENCE_MS ? "simplified" : "";
  }
}
