// The cursor of a dashboard: either the view follows the newest event, or it holds, with the cursor at some time.

/** @import { Moment, MovedCursor } from "./messages.js" */
/** @import { RunModel } from "./model.js" */

/**
 * Asks the kernel: see client.js.
 * @typedef {object} Asks
 * @property {(us: number) => void} askAt
 * @property {(moment: Moment, by: number) => void} askBeside
 * @property {() => void} forgetMoment
 * @property {boolean} isWaiting
 */

/**
 * What of the timeline is moved along.
 * @typedef {object} Moved
 * @property {(us: number | null) => void} setCursor
 * @property {(t0: number, t1: number) => void} setView
 * @property {(on: boolean) => void} follow
 * @property {readonly [number, number]} view
 */

export class Cursor {
  /**
   * @param {RunModel} model
   * @param {Asks} client
   * @param {Moved} timeline
   * @param {{ isRecord: boolean, draw: () => void }} around `draw` is called after a change
   */
  constructor(model, client, timeline, { isRecord, draw }) {
    this.model = model;
    this.client = client;
    this.timeline = timeline;
    this.isRecord = isRecord;
    this.draw = draw;
    this.isLive = true;
    /** @type {number | null} */
    this.us = null;
    /** @type {Moment | null} */
    this.moment = null; // all ranks at the cursor
    this.snaps = false; // the cursor moves to the event of the answer
  }

  /** All ranks at the time that is shown; null: nothing is recorded. */
  get at() {
    return this.isLive ? this.model.now : this.moment ?? this.model.now;
  }

  /**
   * Put the cursor where the user points: the view holds, and every panel shows the ranks at that time.
   * @param {number} at
   */
  put(at) {
    const us = Math.round(at * 1000) / 1000; // whole nanoseconds, as the kernel counts
    this.hold(us);
    this.us = us;
    this.timeline.setCursor(us);
    this.snaps = false;
    this.client.askAt(us);
    this.draw();
  }

  /** @param {number} by how many events */
  step(by) {
    const from = this.moment ?? this.model.now;
    if (!from) return;
    this.hold(from.t_us);
    this.snaps = true;
    this.client.askBeside(from, by);
  }

  /** @param {number | null} us where the cursor will be; null: it is put at the newest event */
  hold(us = null) {
    if (!this.isLive) return;
    this.isLive = false;
    this.timeline.follow(false);
    if (us === null) this.put(this.model.now?.t_us ?? this.model.end);
    this.draw();
  }

  /** Show one whole step: the last one that all ranks finished. */
  holdStep() {
    const { lastStep } = this.model;
    if (!lastStep) return;
    const [begin, end] = lastStep, margin = 0.03 * (end - begin);
    this.put(end);
    this.timeline.setView(begin - margin, end + margin);
  }

  follow() {
    this.isLive = true;
    this.us = null;
    this.moment = null;
    this.client.forgetMoment();
    this.timeline.setCursor(null);
    this.timeline.follow(true);
    this.showLatest();
    this.draw();
  }

  showLatest() {
    const view = this.model.latestView(this.isRecord);
    if (view) this.timeline.setView(...view);
  }

  /**
   * Bring a time into view.
   * @param {number} us
   */
  reveal(us) {
    const [t0, t1] = this.timeline.view, half = (t1 - t0) / 2;
    if (us < t0 || us > t1) this.timeline.setView(us - half, us + half);
  }

  /**
   * Show the cursor at an event of the kernel's answer, and bring it into view.
   * @param {number} us
   */
  show(us) {
    this.us = us;
    this.timeline.setCursor(us);
    this.reveal(us);
  }

  /**
   * Take an answer about a moment.
   * @param {Moment} moment
   * @param {boolean} isLast no further question waits
   */
  takeMoment(moment, isLast) {
    if (this.isLive) return;
    this.moment = moment;
    if (isLast && this.snaps && moment.t_us !== this.us) this.show(moment.t_us);
  }

  /**
   * `%fsdp back` has moved the cursor: hold the view there, or follow again without a cursor.
   * @param {MovedCursor | null} moved
   */
  takeMoved(moved) {
    if (!moved) {
      if (!this.isLive) this.follow();
      return;
    }
    if (this.isLive) this.showLatest(); // first, or the view would stay where the last picture was
    this.hold(moved.t_us);
    this.moment = moved.moment;
    this.client.forgetMoment();
    this.snaps = false;
    this.show(moved.t_us);
  }

  /** Ask again for the state at the cursor: ranks may have sent more since. */
  askAgain() {
    if (this.isLive || !this.moment || this.client.isWaiting) return;
    if (this.snaps || this.us === null) this.client.askBeside(this.moment, 0);
    else this.client.askAt(this.us);
  }
}
