// The part of a record that the timeline shows. Times are microseconds from the run's start.

const MIN_SPAN = 0.5; // in view
const MARGIN = 0.02; // share of the record that may be shown before its begin and after its end

/** @import { Items } from "./items.js" */

export class ViewRange {
  constructor() {
    this.t0 = 0; // in view
    this.t1 = 1;
    this.low = Infinity; // begin of the record
    this.high = -Infinity; // end of the record
    this.isTouched = false; // else the whole record is shown
    this.isFollowing = false; // the end of the record stays in view
  }

  /** Whether nothing is recorded. */
  get isEmpty() {
    return !(this.high >= this.low);
  }

  get span() {
    return this.t1 - this.t0;
  }

  /** @param {Items} items */
  include({ start, end }) {
    for (const t of start) this.low = Math.min(this.low, t);
    for (const t of end) this.high = Math.max(this.high, t);
    this.settle();
  }

  /**
   * Set the begin of the record, and move its end to `high` if that is later. Returns whether anything changed.
   * @param {number} low
   * @param {number} high
   */
  setRecord(low, high) {
    if (this.low === low && this.high >= high) return false;
    this.low = low;
    this.high = Math.max(high, this.high);
    this.settle();
    return true;
  }

  /**
   * Show the time from t0 to t1, as far as the record has it.
   * @param {number} t0
   * @param {number} t1
   */
  show(t0, t1) {
    this.isTouched = true;
    if (this.isEmpty) {
      [this.t0, this.t1] = [t0, t1];
      return;
    }
    const range = Math.max(this.high - this.low, MIN_SPAN), margin = MARGIN * range, most = range + 2 * margin;
    const span = Math.min(Math.max(t1 - t0, MIN_SPAN), most), from = (t0 + t1 - span) / 2;
    const least = this.low - margin - span / 2, latest = this.high + margin - span / 2;
    this.t0 = span >= most ? this.low - margin : Math.min(Math.max(from, least), latest);
    this.t1 = this.t0 + span;
  }

  fit() {
    this.isTouched = false;
    this.showAll();
  }

  /** @param {boolean} on */
  follow(on) {
    this.isFollowing = on;
    if (on) this.showLatest();
  }

  /**
   * Zoom around `t`; returns whether the view changed.
   * @param {number} factor
   * @param {number} t
   */
  zoom(factor, t) {
    const before = this.span, span = Math.max(before * factor, MIN_SPAN), part = (t - this.t0) / before;
    this.show(t - part * span, t + (1 - part) * span);
    return this.span !== before;
  }

  /** @param {number} t */
  clamp(t) {
    return Math.min(Math.max(t, this.low), this.high);
  }

  /**
   * Whether a time is in view, and not at its very edge.
   * @param {number} t
   */
  isWellInView(t) {
    return t >= this.t0 + MARGIN * this.span && t <= this.t1 - MARGIN * this.span;
  }

  /** Adapt the view to a changed record. */
  settle() {
    if (this.isFollowing) this.showLatest();
    else if (!this.isTouched) this.showAll();
  }

  showAll() {
    if (this.isEmpty) return;
    const margin = MARGIN * Math.max(this.high - this.low, MIN_SPAN);
    this.t0 = this.low - margin;
    this.t1 = this.high + margin;
  }

  /** Show the end of the record, at the zoom of before. */
  showLatest() {
    const { span } = this;
    if (this.isEmpty) return;
    if (!this.isTouched || span >= this.high - this.low) this.showAll();
    else {
      this.t1 = this.high + MARGIN * span;
      this.t0 = this.t1 - span;
    }
  }
}
