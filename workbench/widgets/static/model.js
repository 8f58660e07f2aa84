// What a dashboard knows of a run, without any drawing. Times are microseconds from the view's origin.

import { History, Steps } from "./series.js";
import { sure } from "./sure.js";
import { TRACKS } from "./tables.js";

/** @import { BreakpointState, FeedUpdate, KnobEffect, Moment, OpenSpan, PeakInfo, RankHealth, RunStatus, Tables } from "./messages.js" */
/** @import { Items } from "./timeline/items.js" */
/** @import { TrackName } from "./timeline/track.js" */

const STEPS_IN_VIEW = 2.4; // shown by a view that follows the run

export class RunModel {
  constructor() {
    /** @type {RunStatus | null} */
    this.status = null; // null until the first news
    /** @type {readonly RankHealth[]} */
    this.health = [];
    /** @type {readonly BreakpointState[]} */
    this.breakpoints = [];
    this.sentence = ""; // what there is to see; empty while ranks train
    this.whose = "";
    this.late = ""; // the straggler of the newest step, in words
    /** @type {KnobEffect | null} */
    this.change = null;
    /** @type {readonly string[]} */
    this.units = []; // names by number
    /** @type {readonly number[]} */
    this.order = []; // numbers of the units, from the top
    /** @type {readonly (readonly number[])[]} */
    this.groups = []; // ranks with equal series
    /** @type {readonly TrackName[]} */
    this.tracks = [];
    /** @type {readonly PeakInfo[]} */
    this.peaks = []; // of each group
    /** @type {readonly (readonly [number, number])[]} */
    this.holds = [];
    this.clocks = { timeline: "", others: "" }; // whose times are drawn; empty where there is one clock
    /** @type {Moment | null} */
    this.now = null; // all ranks at the newest event
    this.history = new History();
    this.steps = new Steps();
    this.begin = 0; // of the record
    this.end = 0; // of the record
    this.simplifiedTo = -Infinity; // before this time `history` lacks changes
    this.numChanges = 0; // news with memory or units
  }

  /**
   * Take what is new. Tables of spans are the timeline's.
   * @param {FeedUpdate} news
   * @param {Tables} tables
   */
  take(news, tables) {
    if (news.another) this.forgetRun();
    if (news.restart) this.forgetRecord();
    if (news.units && news.order) {
      this.units = news.units;
      this.order = news.order;
    }
    if (news.holds) this.holds = news.holds.map(([at, length]) => [sure(at), sure(length)]);
    this.status = news.status;
    this.health = news.health;
    this.breakpoints = news.breakpoints;
    this.sentence = news.said;
    this.whose = news.whose;
    this.late = news.late ?? this.late;
    this.change = news.change ?? this.change;
    this.groups = news.groups;
    this.now = news.now ?? this.now;
    this.peaks = news.peaks ?? this.peaks;
    this.tracks = news.tracks.flatMap((rank) => TRACKS.map((name) => ({ name, rank })));
    const [timeline = "", others = ""] = news.clock;
    this.clocks = { timeline, others };
    this.history.takeMemory(tables.memory);
    this.history.takeStates(tables.states, this.units.length);
    if (news.counts.memory || news.counts.states) this.numChanges += 1;
    this.steps.take(tables.steps);
    this.begin = news.begin_us;
    this.end = Math.max(this.end, this.now?.t_us ?? 0);
    if (!news.exact) this.simplifiedTo = this.end;
  }

  /** These are other ranks than before: forget what they ran. */
  forgetRun() {
    this.steps = new Steps();
    this.now = null;
    this.peaks = [];
    this.late = "";
    this.change = null;
  }

  /** The record comes again from its begin: forget everything except the steps. */
  forgetRecord() {
    this.history = new History();
    this.holds = [];
    this.tracks = [];
    this.begin = this.end = 0;
    this.simplifiedTo = -Infinity;
  }

  /**
   * @param {RankHealth["state"]} state
   * @returns {boolean} whether some rank is in this state
   */
  has(state) {
    return this.health.some((ranks) => ranks.state === state);
  }

  /** Whether ranks are running or waiting, and none is held. */
  get works() {
    return (this.has("running") || this.has("waiting")) && !this.has("held");
  }

  /**
   * Whether no more data will come: the ranks were stopped, or some died.
   * @param {boolean} isRecord
   */
  isOver(isRecord) {
    return isRecord || (this.status !== null && (!this.health.length || this.has("gone")));
  }

  /**
   * The buttons that can be pressed.
   * @param {boolean} isRecord
   * @returns {ReadonlySet<string>}
   */
  enabledButtons(isRecord) {
    const isThere = this.status !== null && !this.isOver(isRecord), isHeld = this.has("held"), { works } = this;
    const goesOn = !this.has("gone") && this.status?.can_go_on === true;
    const can = { step: isThere && !works && !isHeld, pause: works, next: goesOn, continue: goesOn,
      abort: works || isHeld, break: isThere, fault: isThere && !works && !isHeld };
    return new Set(Object.entries(can).flatMap(([word, isOn]) => (isOn ? [word] : [])));
  }

  /**
   * The last step that all ranks finished: its begin and end; null if there is none.
   * @returns {readonly [number, number] | null}
   */
  get lastStep() {
    const { length, columns: { t, ms } } = this.steps;
    if (!length) return null;
    const end = sure(t[length - 1]);
    return [end - 1000 * sure(ms[length - 1]), end];
  }

  /**
   * The last few steps; of a record up to its last finished step, as none follows an unfinished one.
   * @param {boolean} isRecord
   * @returns {readonly [number, number] | null} null: nothing to show yet
   */
  latestView(isRecord) {
    const { length, columns: { ms } } = this.steps, { lastStep } = this;
    if (!lastStep || !this.end) return null;
    const end = isRecord ? lastStep[1] : this.end;
    const lasted = ms.slice(Math.max(length - 5, 0), length).sort();
    const span = Math.min(STEPS_IN_VIEW * 1000 * sure(lasted[lasted.length >> 1]), 1.02 * (end - this.begin));
    return [end - span, end + 0.01 * span];
  }

  /**
   * Number of the step that a moment is in, or of the last one that had ended then; -1: none.
   * @param {Moment} at
   */
  stepAt(at) {
    if (at.step >= 0) return at.step;
    const place = this.steps.endedAt(at.t_us);
    return place < 0 ? -1 : sure(this.steps.columns.step[place]);
  }

  /**
   * The spans of each track that have not ended, up to now: in a hang, those that hang.
   * @param {readonly OpenSpan[]} open
   * @returns {Items[]}
   */
  openItems(open) {
    return this.tracks.map((_, track) => {
      const mine = open.filter((span) => span.track === track);
      return {
        start: Float64Array.from(mine, ({ start }) => start),
        end: Float64Array.from(mine, ({ start }) => Math.max(this.end, start)),
        kind: Uint8Array.from(mine, ({ kind }) => kind),
        unit: Int16Array.from(mine, ({ unit }) => unit),
        bytes: Float64Array.from(mine, ({ bytes }) => bytes),
        exposed: new Uint8Array(mine.length),
        arrowFrom: new Float64Array(mine.length).fill(NaN),
      };
    });
  }
}
