// The live dashboard in the browser. It asks the kernel for new data, keeps it and draws it. It also asks for the state
// under the cursor, and for every change in a view that holds still. Python joins this module and its imports into one:
// see workbench/widgets/js_bundle.py. The messages: workbench/live/messages.py.

import { ASK_AGAIN_MS, Closeup } from "./closeup.js";
import { enable, keepBareKeys, make, onPress, refill, swatch, write } from "./dom.js";
import { CATEGORIES, KIND, KINDS, UNIT_STATE, UNIT_STATES } from "./events.js";
import { formatBytes, formatDuration, formatLoss, formatShare, ranksInWords, ranksWithin } from "./format.js";
import { isDark } from "./look.js";
import { Axis, MAX_AREAS, MEMORY_HEIGHTS, Sheet, drawLine, drawMemory, drawStates, unitHeight } from "./panels.js";
import { Known, Steps } from "./series.js";
import { sure } from "./sure.js";
import { TRACKS } from "./tables.js";
import { createTimeline } from "./timeline.js";
import { itemsOf, unpack } from "./unpack.js";

/** @import { InitialState, Answer, AskAt, AskBeside, BreakpointState, KnobEffect, Costs, RankHealth, Moment, MomentReply, MovedCursor, FeedUpdate, OpenSpan, PeakInfo, Question, SpansTable, RunStatus, WindowDetail } from "./messages.js" */
/** @import { Scene, Skin, Value } from "./panels.js" */
/** @import { Items } from "./track.js" */

const SILENT_MS = 2500; // without an answer for so long, the view says so
const SAID_MS = 8000; // how long the result of a button is shown
const STEPS_IN_VIEW = 2.4; // shown by a running view
const MAX_UNITS = 200;
const RANKS_SEEN = 4; // lines of the card of ranks; it scrolls to further ones
const NONE = "\u2013";
const BADGES = {
  training: ["\u25b6", "training"], stuck: ["\u26a0", "stuck"], stopped: ["\u275a\u275a", "stopped"], idle: ["\u25cf", "idle"],
  over: ["\u25cb", "end of recording"], dead: ["\u2715", "ranks died"], empty: ["\u25cb", "nothing yet"],
};

/**
 * The kernel's side: a widget's model, or a substitute.
 * @typedef {object} Model
 * @property {(name: "about") => InitialState} get
 * @property {(question: Question) => void} send
 * @property {boolean} [isRecord] there is no kernel: the page has all data
 * @property {(name: "msg:custom", call: OnMessage) => void} on
 * @property {(name: "msg:custom", call: OnMessage) => void} off
 */

/** @typedef {(answer: Answer, buffers: DataView[]) => void} OnMessage */

/** @typedef {Omit<AskAt, "view" | "number"> | Omit<AskBeside, "view" | "number">} CursorQuestion */

/**
 * A card with one number per step.
 * @typedef {{ value: Value, colour: string, number: HTMLElement, note: HTMLElement, sheet: Sheet }} Line
 */

/** @typedef {{ item: HTMLElement, box: HTMLInputElement, clear: HTMLButtonElement }} StopRow a breakpoint */

/** @typedef {{ box: HTMLElement, note: HTMLElement, hint: HTMLElement }} PanelBox */

class DashboardView {
  /**
   * @param {Model} model
   * @param {HTMLElement} root
   */
  constructor(model, root) {
    this.model = model;
    this.root = root;
    this.about = model.get("about");
    this.id = Math.random().toString(36).slice(2);

    this.isLive = true;
    /** @type {number | null} */
    this.cursor = null;
    /** @type {Moment | null} */
    this.moment = null; // under the cursor
    /** @type {Moment | null} */
    this.now = null;
    /** @type {readonly RankHealth[]} */
    this.health = [];
    /** @type {readonly string[]} */
    this.units = [];
    /** @type {readonly number[]} */
    this.order = [];
    /** @type {readonly (readonly number[])[]} */
    this.groups = [];
    /** @type {readonly PeakInfo[]} */
    this.peaks = [];
    /** @type {readonly (readonly [number, number])[]} */
    this.holds = [];
    this.known = new Known();
    this.shown = this.known; // what is drawn: `known`, or every change in a window
    this.steps = new Steps();
    this.numTracks = 0;
    this.begun = 0; // begin of the record
    this.end = 0; // end of the record
    this.simplifiedTo = -Infinity; // before this time `known` lacks changes
    this.news = 0; // number of feeds with memory or units
    this.clock = "";
    this.told = "";

    this.isAsking = false;
    this.hasBegun = false;
    this.askedAt = 0;
    this.answeredAt = performance.now();
    /** @type {CursorQuestion | null} */
    this.wanted = null;
    this.isWaiting = false; // for the answer to a question about the cursor
    this.momentAt = 0;
    this.number = 0;
    this.moves = false; // the cursor moves to the event of the answer
    this.said = "";
    this.sayUntil = 0;
    this.timer = 0;
    this.frame = 0;
    this.view = "";
    this.isSeen = true;
    this.isGone = false;
    this.closeup = new Closeup((question) => {
      if (!this.isGone) this.send({ ...question, view: this.id });
    });
    /** @type {Items[] | null} */
    this.closeSpans = null; // set in the timeline

    /** @type {RunStatus | null} */
    this.status = null; // null until the first feed
    this.late = "";
    /** @type {KnobEffect | null} */
    this.change = null;
    this.badge = make("span", "fw-badge");
    this.why = make("span", "fw-why");
    this.when = make("span", "fw-when");
    this.event = make("span", "fw-event");
    this.live = make("button", "fw-live", "live");
    this.oneStep = make("button", "fw-hold", "hold last step");
    this.size = make("select", "fw-size");
    this.place = make("input", "fw-place");
    this.stops = make("div", "fw-stops");
    this.stopsList = make("ul");
    /** @type {Map<number, StopRow>} */
    this.stopRows = new Map(); // by the number of the breakpoint
    this.costs = make("div", "fw-change");
    this.foot = make("div", "fw-foot");
    /** @type {HTMLElement} */
    this.lateNote = make("span", "fw-late");
    /** @type {Map<string, HTMLButtonElement>} */
    this.buttons = new Map();
    this.sentence = make("div", "fw-said");
    this.spoken = make("div", "fw-unseen"); // for screen readers
    this.spokenOf = "";
    this.peak = make("button", "fw-peak");
    this.peakNote = make("span");
    this.ranks = make("div", "fw-ranks");
    this.body = make("div");
    this.memory = this.panel("memory in use, by class");
    this.memorySheet = new Sheet(this.memory.box, "fw-scrub fw-memory");
    this.memoryLegend = make("div", "fw-legend");
    this.states = this.panel("units");
    this.statesSheet = new Sheet(this.states.box, "fw-scrub fw-states");
    this.statesLegend = make("div", "fw-legend");
    this.tracks = this.panel("timeline");
    this.timelineBox = make("div", "fw-timeline");
    /** @type {Line[]} */
    this.lines = [];
    this.build();

    this.timeline = this.makeTimeline();
    this.ender = new AbortController();
    this.seen = new IntersectionObserver((entries) => {
      this.isSeen = sure(entries.at(-1)).isIntersecting;
      this.tick();
    });
    this.sized = new ResizeObserver(() => { this.draw(); });
    this.themed = new MutationObserver(() => { this.draw(); });
    /** @type {OnMessage} */
    this.onMessage = (answer, buffers) => {
      if (answer.view === this.id) this.take(answer, buffers);
    };
    this.listen();
    this.tick();
  }

  // -- the page

  build() {
    const { root, about } = this;
    root.classList.add("fw-dashboard");
    root.classList.toggle("fw-canvas", !about.panels.includes("ranks"));
    root.tabIndex = 0;
    root.setAttribute("role", "group");
    root.setAttribute("aria-label", "Live dashboard. Left and right arrow keys: event by event. L: live. H: hold the last step.");
    const head = make("div", "fw-head"), state = make("div", "fw-state"), at = make("div", "fw-at");
    state.append(this.badge, this.why);
    this.spoken.setAttribute("role", "status");
    at.append(this.when, this.event);
    head.append(state, at, this.buildButtons(), this.spoken);
    this.sentence.setAttribute("role", "status");
    this.stops.append(make("h4", "", "Breakpoints"), this.stopsList);
    this.stopsList.setAttribute("aria-label", "Breakpoints");
    this.takeBreakpoints([]);
    root.append(head, this.stops, this.sentence);
    if (about.panels.includes("ranks")) root.append(this.buildCards(), this.costs);
    root.append(this.body, this.foot);
    this.memory.box.append(this.memoryLegend);
    this.peak.title = "move the cursor to the peak";
    this.peak.hidden = true;
    this.memory.note.append(this.peak, this.peakNote);
    this.states.box.append(this.statesLegend);
    this.tracks.box.append(this.timelineBox);
    if (about.panels.includes("memory")) this.body.append(this.memory.box);
    if (about.panels.includes("units")) this.body.append(this.states.box);
    if (about.panels.includes("timeline")) this.body.append(this.tracks.box);
    this.takeClock(["", ""]);
    this.statesLegend.append(...UNIT_STATES.map(({ words, colour }) => swatch(words, colour)));
  }

  buildButtons() {
    const row = make("div", "fw-buttons");
    for (const word of this.about.buttons) {
      const button = make("button", `fw-${word}`, word);
      enable(button, false);
      this.buttons.set(word, button);
      if (word === "next") row.append(this.joined(button, this.buildSize(), () => this.size.value));
      else if (word === "break") row.append(this.joined(button, this.buildPlace(), () => this.place.value.trim()));
      else {
        onPress(button, () => { this.press(word); });
        row.append(button);
      }
    }
    this.oneStep.title = "stop redrawing and show the last step that all ranks finished";
    onPress(this.oneStep, () => { this.holdStep(); });
    this.live.onclick = () => { this.follow(); };
    row.append(this.oneStep, this.live);
    return row;
  }

  /**
   * A button joined with the field of its argument.
   * @param {HTMLButtonElement} button
   * @param {HTMLElement} field
   * @param {() => string} argument
   */
  joined(button, field, argument) {
    const both = make("span", "fw-joined");
    onPress(button, () => { this.press(button.textContent, argument()); });
    both.append(button, field);
    return both;
  }

  /** How far `next` goes. */
  buildSize() {
    this.size.setAttribute("aria-label", "next: size");
    this.size.append(...this.about.sizes.map((size) => make("option", "", size)));
    return this.size;
  }

  /** Where `break` stops. */
  buildPlace() {
    this.place.setAttribute("aria-label", "break: event to stop before");
    this.place.placeholder = "all_gather:blocks.2";
    this.place.size = 16;
    this.place.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.buttons.get("break")?.click();
    });
    return this.place;
  }

  buildCards() {
    const cards = make("div", "fw-cards");
    const card = (/** @type {string} */ title) => {
      const box = make("div", "fw-card"), heading = make("h4", "", title), note = make("span", "fw-note");
      heading.append(note);
      box.append(heading);
      cards.append(box);
      return { box, note };
    };
    const ranks = card("ranks");
    ranks.note.append(this.lateNote);
    ranks.box.append(this.ranks);
    const line = (/** @type {string} */ title, /** @type {Value} */ value, /** @type {string} */ colour) => {
      const { box, note } = card(title), number = make("div", "fw-number", NONE);
      box.append(number);
      this.lines.push({ value, colour, number, note, sheet: new Sheet(box, "") });
    };
    line("loss", "loss", UNIT_STATES[UNIT_STATE.SHARDED].colour);
    line("step time", "ms", KINDS[KIND.OPTIMIZER].colour);
    line("exposed", "exposed", KINDS[KIND.WAIT].colour);
    return cards;
  }

  /**
   * @param {string} title
   * @returns {PanelBox}
   */
  panel(title) {
    const box = make("div", "fw-panel"), heading = make("h4", "", title);
    const note = make("span", "fw-note"), hint = make("span", "fw-hint");
    heading.append(note, hint);
    box.append(heading);
    return { box, note, hint };
  }

  makeTimeline() {
    const canvas = document.createElement("canvas");
    this.timelineBox.replaceChildren(canvas);
    const timeline = createTimeline(canvas, { onFollow: (on) => { if (!on) this.hold(); } });
    timeline.onCursor((us) => { if (us !== null) this.putCursor(us); });
    timeline.setUnits(this.units);
    if (this.isLive) timeline.follow(true);
    return timeline;
  }

  /** Drop everything except the steps. */
  begin() {
    this.timeline.destroy();
    this.timeline = this.makeTimeline();
    this.closeup.forget();
    this.closeSpans = null;
    this.known = new Known();
    this.holds = [];
    this.numTracks = 0;
    this.begun = this.end = 0;
    this.simplifiedTo = -Infinity;
  }

  listen() {
    const options = { signal: this.ender.signal };
    this.model.on("msg:custom", this.onMessage);
    keepBareKeys(this.root, options);
    this.root.addEventListener("keydown", (event) => { this.key(event); }, { ...options, capture: true });
    for (const { canvas } of [this.memorySheet, this.statesSheet]) this.listenToScrubs(canvas, options);
    for (const type of ["pointermove", "wheel", "keydown", "dblclick"]) { // these move the timeline and the others
      this.timelineBox.addEventListener(type, () => { this.draw(); }, { ...options, passive: true });
    }
    document.addEventListener("visibilitychange", () => { this.tick(); }, options);
    this.seen.observe(this.root);
    this.sized.observe(this.root);
    this.themed.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "class"] });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.draw(); }, options);
  }

  /**
   * @param {HTMLCanvasElement} canvas
   * @param {{ signal: AbortSignal }} options
   */
  listenToScrubs(canvas, options) {
    const put = (/** @type {PointerEvent} */ event) => {
      const { plot, view } = this.timeline.stats();
      const axis = new Axis(plot, view);
      const x = event.clientX - canvas.getBoundingClientRect().left;
      this.putCursor(Math.min(Math.max(axis.t(Math.max(x, axis.left)), this.begun), this.end));
    };
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      canvas.setPointerCapture(event.pointerId);
      put(event);
    }, options);
    canvas.addEventListener("pointermove", (event) => {
      if (canvas.hasPointerCapture(event.pointerId)) put(event);
    }, options);
  }

  destroy() {
    this.isGone = true;
    this.closeup.forget();
    clearTimeout(this.timer);
    cancelAnimationFrame(this.frame);
    this.model.off("msg:custom", this.onMessage);
    this.ender.abort();
    for (const observer of [this.seen, this.sized, this.themed]) observer.disconnect();
    this.timeline.destroy();
    this.send({ word: "bye", view: this.id });
  }

  // -- asking

  /** @param {Question} question */
  send(question) {
    this.model.send(question);
  }

  /** Ask for new data while the view is visible: the kernel answers as soon as there is some, but not too often. */
  tick() {
    clearTimeout(this.timer);
    if (this.isGone || document.hidden || !this.isSeen) return;
    const now = performance.now();
    if (!this.isAsking || now - this.askedAt > ASK_AGAIN_MS) {
      this.isAsking = true;
      this.askedAt = now;
      this.send({ word: "feed", view: this.id, wait: this.hasBegun });
    }
    if (now - this.answeredAt > SILENT_MS) this.say();
    if (this.closeup.asked) this.draw();
    this.timer = setTimeout(() => { this.tick(); }, 500);
  }

  /** @type {OnMessage} */
  take(answer, buffers) {
    this.answeredAt = performance.now();
    switch (answer.word) {
      case "feed": this.takeNews(answer, sure(buffers[0])); break;
      case "moment": this.takeMoment(answer); break;
      case "window": this.takeWindow(answer, sure(buffers[0])); break;
      case "pressed":
      case "refused": this.takeSaid(answer.text); break;
    }
    this.draw();
  }

  /**
   * @param {FeedUpdate} news
   * @param {DataView} data
   */
  takeNews(news, data) {
    this.isAsking = false;
    this.hasBegun = true;
    this.tick(); // first: the kernel can already wait for the next data
    if (news.another) {
      this.steps = new Steps();
      this.now = null;
      this.peaks = [];
      this.sayUntil = 0;
      this.late = "";
      this.change = null;
    }
    if (news.restart) {
      this.begin();
      if (!this.isLive) this.follow();
    }
    if (news.units && news.order) {
      this.units = news.units;
      this.order = news.order;
      this.timeline.setUnits(this.units);
    }
    this.health = news.health;
    this.takeBreakpoints(news.breakpoints);
    this.status = news.status;
    this.told = news.said;
    this.late = news.late ?? this.late;
    this.change = news.change ?? this.change;
    write(this.foot, news.whose);
    this.groups = news.groups;
    this.now = news.now ?? this.now;
    this.peaks = news.peaks ?? this.peaks;
    if (news.holds) {
      this.holds = news.holds.map(([at, length]) => [sure(at), sure(length)]);
      this.timeline.setHolds(this.holds);
    }
    const tables = unpack(news.counts, data);
    this.takeTracks(news.tracks);
    this.takeClock(news.clock);
    this.takeSpans(tables.spans);
    this.known.takeMemory(tables.memory);
    this.known.takeStates(tables.states, this.units.length);
    if (news.counts.memory || news.counts.states) this.news += 1;
    this.steps.take(tables.steps);
    this.begun = news.begin_us;
    this.end = Math.max(this.end, this.now?.t_us ?? 0);
    if (this.now) this.timeline.setRange(this.begun, this.end);
    if (!news.exact) this.simplifiedTo = this.end;
    this.takeOpen(news.open);
    if (news.has_moved) this.takeCursor(news.cursor);
    if (this.isLive) this.showLatest();
  }

  /**
   * `%fsdp back` has moved the cursor: hold the view there, or follow again without a cursor.
   * @param {MovedCursor | null} cursor
   */
  takeCursor(cursor) {
    if (!cursor) {
      if (!this.isLive) this.follow();
      return;
    }
    if (this.isLive) this.showLatest(); // first, or the view would stay where the last picture was
    this.hold(cursor.t_us);
    this.moment = cursor.moment;
    this.forgetQuestion();
    this.moves = false;
    this.showCursor(cursor.t_us);
  }

  /**
   * Show the clock of the timeline and that of the other panels; empty where there is one clock.
   * @param {readonly string[]} clocks
   */
  takeClock([timeline = "", others = ""]) {
    const how = "drag to pan, wheel to zoom, drag the axis or an area above to move the cursor";
    write(this.tracks.note, [timeline, how].filter(Boolean).join(" \u00b7 "));
    this.tracks.note.title = this.tracks.note.textContent;
    this.clock = others;
  }

  /**
   * Show the breakpoints, if they can be set. The row of one that stays is kept, and with it the focus.
   * @param {readonly BreakpointState[]} breakpoints
   */
  takeBreakpoints(breakpoints) {
    const shown = this.buttons.has("break") ? breakpoints : [], ids = new Set(shown.map(({ id }) => id));
    const focused = [...this.stopRows.values()].findIndex(({ item }) => item.matches(":focus-within"));
    const isLost = focused >= 0 && !ids.has(sure([...this.stopRows.keys()][focused]));
    for (const [id, { item }] of this.stopRows) {
      if (ids.has(id)) continue;
      item.remove();
      this.stopRows.delete(id);
    }
    for (const breakpoint of shown) {
      let row = this.stopRows.get(breakpoint.id);
      if (!row) {
        row = this.buildStop(breakpoint);
        this.stopRows.set(breakpoint.id, row);
        this.stopsList.append(row.item);
      }
      row.box.checked = breakpoint.is_on;
      row.item.classList.toggle("fw-off", !breakpoint.is_on);
    }
    this.stops.hidden = !this.stopRows.size;
    if (!isLost) return;
    const left = [...this.stopRows.values()]; // keyboard users continue next to what was cleared
    (left[Math.min(focused, left.length - 1)]?.clear ?? this.root).focus();
  }

  /**
   * @param {BreakpointState} breakpoint
   * @returns {StopRow}
   */
  buildStop({ id, text }) {
    const item = make("li"), label = make("label"), box = make("input"), clear = make("button", "", "\u2715");
    box.type = "checkbox";
    box.onchange = () => { this.press(box.checked ? "break on" : "break off", String(id)); };
    label.append(box, make("span", "", text));
    clear.title = "Clear";
    clear.setAttribute("aria-label", `Clear breakpoint ${text}`);
    clear.onclick = () => { this.press("break clear", String(id)); };
    item.append(label, clear);
    return { item, box, clear };
  }

  /** @param {readonly number[]} ranks */
  takeTracks(ranks) {
    const tracks = ranks.flatMap((rank) => TRACKS.map((name) => ({ name, rank })));
    if (this.numTracks === tracks.length) return;
    this.numTracks = tracks.length;
    this.timeline.setTracks(tracks);
  }

  /** @param {SpansTable} spans */
  takeSpans(spans) {
    itemsOf(spans, this.numTracks).forEach((items, track) => { this.timeline.append(track, items); });
  }

  /**
   * Show the spans that have not ended: in a hang, those that hang.
   * @param {readonly OpenSpan[]} open
   */
  takeOpen(open) {
    for (let track = 0; track < this.numTracks; track++) {
      const mine = open.filter((span) => span.track === track);
      this.timeline.setOpen(track, {
        start: Float64Array.from(mine, ({ start }) => start),
        end: Float64Array.from(mine, ({ start }) => Math.max(this.end, start)),
        kind: Uint8Array.from(mine, ({ kind }) => kind),
        unit: Int16Array.from(mine, ({ unit }) => unit),
        bytes: Float64Array.from(mine, ({ bytes }) => bytes),
        exposed: new Uint8Array(mine.length),
        arrowFrom: new Float64Array(mine.length).fill(NaN),
      });
    }
  }

  /**
   * Keep every change in view, and ask for the state at the cursor again: ranks may have sent more since.
   * @param {WindowDetail} answer
   * @param {DataView} data
   */
  takeWindow(answer, data) {
    const tables = unpack(answer.counts, data), known = new Known();
    known.takeMemory(tables.memory);
    known.takeStates(tables.states, this.units.length);
    if (!this.closeup.take(answer, known, itemsOf(tables.spans, this.numTracks))) return;
    if (this.isLive || !this.moment || this.isWaiting) return;
    const { rank, seq } = this.moment;
    this.want(this.moves || this.cursor === null ? { word: "beside", rank, seq, by: 0 } : { word: "at", t_us: this.cursor });
  }

  /** @param {MomentReply} answer */
  takeMoment({ number, moment }) {
    if (number !== this.number) return; // the cursor has moved on
    this.isWaiting = false;
    if (moment && !this.isLive) {
      this.moment = moment;
      if (!this.wanted && this.moves && moment.t_us !== this.cursor) this.showCursor(moment.t_us);
    }
    this.askMoment();
  }

  /** @param {string} text */
  takeSaid(text) {
    this.said = text;
    this.sayUntil = performance.now() + SAID_MS;
    this.say();
  }

  /**
   * @param {string} word
   * @param {string} argument
   */
  press(word, argument = "") {
    this.said = `${[word, argument].filter(Boolean).join(" ")} \u2026`;
    this.sayUntil = performance.now() + SAID_MS;
    this.send({ word: "press", view: this.id, button: word, argument });
    this.draw();
  }

  // -- the cursor

  /**
   * Put the cursor where the user points: the view holds, and every panel shows the ranks at that time.
   * @param {number} at
   */
  putCursor(at) {
    const us = Math.round(at * 1000) / 1000; // whole nanoseconds, as the kernel counts
    this.hold(us);
    this.cursor = us;
    this.timeline.setCursor(us);
    this.moves = false;
    this.want({ word: "at", t_us: us });
    this.draw();
  }

  /** @param {number} by how many events */
  step(by) {
    const from = this.moment ?? this.now;
    if (!from) return;
    this.hold(from.t_us);
    this.moves = true;
    const { rank, seq } = this.moment ?? from;
    this.want({ word: "beside", rank, seq, by });
  }

  /**
   * Show the cursor at an event of the kernel's answer, and bring it into view.
   * @param {number} us
   */
  showCursor(us) {
    this.cursor = us;
    this.timeline.setCursor(us);
    const [t0, t1] = this.timeline.stats().view;
    if (us < t0 || us > t1) this.timeline.setView(us - (t1 - t0) / 2, us + (t1 - t0) / 2);
  }

  /**
   * Ask one question at a time; of those asked meanwhile only the last is sent.
   * @param {CursorQuestion} question
   */
  want(question) {
    this.wanted = question;
    if (!this.isWaiting || performance.now() - this.momentAt > ASK_AGAIN_MS) {
      this.isWaiting = false;
      this.askMoment();
    }
  }

  askMoment() {
    if (this.isWaiting || !this.wanted) return;
    this.isWaiting = true;
    this.momentAt = performance.now();
    this.number += 1;
    this.send({ ...this.wanted, view: this.id, number: this.number });
    this.wanted = null;
  }

  /** Ignore the answer to a pending question. */
  forgetQuestion() {
    this.wanted = null;
    this.isWaiting = false;
    this.number += 1;
  }

  /** @param {number | null} us where to put the cursor; null: at the newest event */
  hold(us = null) {
    if (!this.isLive) return;
    this.isLive = false;
    this.timeline.follow(false);
    if (us === null) this.putCursor(this.now?.t_us ?? this.end);
    this.draw();
  }

  /** Show one whole step: the last one that all ranks finished. */
  holdStep() {
    const { length, columns: { t, ms } } = this.steps;
    if (!length) return;
    const end = sure(t[length - 1]), span = 1000 * sure(ms[length - 1]);
    this.putCursor(end);
    this.timeline.setView(end - 1.03 * span, end + 0.03 * span);
  }

  follow() {
    this.isLive = true;
    this.cursor = null;
    this.moment = null;
    this.forgetQuestion();
    this.timeline.setCursor(null);
    this.timeline.follow(true);
    this.showLatest();
    this.draw();
  }

  /** Show the last few steps; a record is shown up to its last finished step, as none follows an unfinished one. */
  showLatest() {
    const { length, columns: { t, ms } } = this.steps;
    if (!length || !this.end) return;
    const end = this.model.isRecord ? sure(t[length - 1]) : this.end;
    const lasted = Array.from(ms.subarray(Math.max(length - 5, 0), length)).sort((a, b) => a - b);
    const span = Math.min(STEPS_IN_VIEW * 1000 * sure(lasted[lasted.length >> 1]), 1.02 * (end - this.begun));
    this.timeline.setView(end - span, end + 0.01 * span);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const isTyping = event.target === this.place || event.target === this.size;
    if (isTyping || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const actions = new Map([
      ["ArrowRight", () => { this.step(1); }],
      ["ArrowLeft", () => { this.step(-1); }],
      ["l", () => { this.follow(); }],
      ["h", () => { this.holdStep(); }],
    ]);
    const action = actions.get(event.key);
    if (!action) return;
    event.preventDefault();
    event.stopPropagation(); // keep it from the timeline and the notebook
    action();
  }

  // -- drawing

  draw() {
    if (this.frame || this.isGone) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.picture();
    });
  }

  picture() {
    const { root, timeline } = this, stats = timeline.stats();
    root.classList.toggle("fw-dark", isDark());
    const at = this.isLive ? this.now : this.moment ?? this.now, skin = this.skin();
    this.body.style.display = this.now ? "" : "none";
    this.drawHead(at);
    this.drawRanks(at);
    this.drawNumbers(at, skin);
    this.say();
    if (!this.now) return;
    const [t0, t1] = stats.view, found = this.lookClosely([t0, t1]);
    this.shown = found?.known ?? this.known;
    const { holds, cursor, end } = this, scene = { axis: new Axis(stats.plot, stats.view), holds, cursor, end, skin };
    if (this.about.panels.includes("memory")) this.drawMemoryPanel(at, this.shown.memory, scene);
    if (this.about.panels.includes("units")) this.drawStatesPanel(at, this.shown.states, scene);
    this.followTimeline(stats.view);
  }

  /** @returns {Skin} */
  skin() {
    const style = getComputedStyle(this.root);
    const css = (/** @type {string} */ name) => style.getPropertyValue(`--fw-${name}`).trim();
    return { page: css("page"), ink: css("ink"), soft: css("soft"), row: css("row"), grid: css("grid"),
      accent: css("accent"), peak: css("peak") };
  }

  /**
   * Every change in `view` if known; asks for it when the view does not move by itself.
   * @param {readonly [number, number]} view
   */
  lookClosely(view) {
    const isClose = !this.isLive || !this.works();
    if (isClose) this.closeup.look(view, this.end, this.news);
    else this.closeup.rest();
    const found = isClose ? this.closeup.covering(view, this.end) : null;
    const isSimple = view[0] < this.simplifiedTo;
    const text = isClose ? this.closeup.hint(found) : isSimple ? "simplified: click for every change" : "";
    for (const { hint } of [this.memory, this.states]) write(hint, text);
    if (this.closeSpans !== (found?.spans ?? null)) {
      this.closeSpans = found?.spans ?? null;
      this.timeline.setClose(found?.spans ?? null);
    }
    return found;
  }

  /**
   * Dragging moves the timeline alone: redraw the panels above it.
   * @param {readonly number[]} view
   */
  followTimeline(view) {
    const now = view.join();
    if (this.view === now) return;
    this.view = now;
    this.draw();
  }

  /** Whether ranks are running or waiting, and none is held. */
  works() {
    const states = new Set(this.health.map(({ state }) => state));
    return (states.has("running") || states.has("waiting")) && !states.has("held");
  }

  /** @param {Moment | null} at */
  drawHead(at) {
    const isUntold = this.isLive && at?.step === -1 && this.told !== ""; // nothing to show before the first step
    const step = at && at.step >= 0 ? `step ${at.step}` : "", event = isUntold ? "" : at?.event ?? "";
    write(this.when, [step, at && !isUntold ? formatDuration(at.t_us) : ""].filter(Boolean).join(" \u00b7 "));
    write(this.event, event);
    this.event.title = event;
    const states = new Set(this.health.map(({ state }) => state));
    const { status } = this;
    // no more data will come: the ranks were stopped, or some died
    const isOver = this.model.isRecord === true || status !== null && (!this.health.length || states.has("gone"));
    const isThere = status !== null && !isOver;
    this.live.setAttribute("aria-pressed", String(this.isLive && !isOver));
    write(this.live, isOver ? "\u25cb latest" : this.isLive ? "\u25cf live" : "\u25cb live");
    const works = this.works(), isHeld = states.has("held"), isIdle = isThere && !works && !isHeld;
    const isWhole = !states.has("gone"), goesOn = isWhole && status?.can_go_on === true;
    const can = new Map([["step", isIdle], ["pause", works], ["next", goesOn], ["continue", goesOn],
      ["abort", works || isHeld], ["break", isThere]]);
    for (const [word, button] of this.buttons) enable(button, can.get(word) ?? false);
    enable(this.oneStep, this.steps.length > 0);
    this.badge.className = `fw-badge fw-is-${status?.word ?? "untold"}`;
    write(this.badge, status === null ? "" : BADGES[status.word].join(" "));
    write(this.why, status?.why ?? "");
    this.why.title = status?.why ?? "";
    this.speak();
  }

  /** Announce a new status to screen readers once, not with every number that changes. */
  speak() {
    const { status } = this;
    if (status === null) return;
    const isPlace = status.word === "stopped" || status.word === "dead"; // another place is news
    const of = isPlace ? `${status.word} ${status.why}` : status.word;
    if (of === this.spokenOf) return;
    this.spokenOf = of;
    write(this.spoken, [BADGES[status.word][1], status.why].filter(Boolean).join(": "));
  }

  say() {
    const isSilent = !this.model.isRecord && performance.now() - this.answeredAt > SILENT_MS;
    const said = performance.now() < this.sayUntil ? this.said : "";
    write(this.sentence, isSilent ? "The kernel does not answer: it may be busy with a cell, or have ended." : said || this.told);
  }

  /** @param {Moment | null} at */
  drawRanks(at) {
    const isGone = (/** @type {RankHealth} */ { state }) => Number(state === "gone");
    const health = [...this.health].sort((a, b) => isGone(b) - isGone(a)); // the list may be longer than its card
    const rows = health.map(({ state, label, where }) => ({ state, label, text: where ? `held ${where}` : state }));
    const doing = (at?.ranks ?? []).map(({ label, doing: text }) => ({ state: "", label, text }));
    const [first] = this.health, isOne = rows.length === 1 && !first?.where && first?.state !== "idle";
    const live = this.isLive && first && isOne ? doing.map(({ label, text }) => ({ state: first.state, label, text: `${first.state} \u00b7 ${text}` })) : [];
    const shown = !this.isLive || !rows.length ? [...rows, ...doing] : live.length ? live : rows;
    const most = this.groups.flat().length + Number(rows.length > 0); // a fixed number: nothing below moves
    this.ranks.style.setProperty("--fw-lines", String(Math.min(Math.max(most, 1), RANKS_SEEN)));
    refill(this.ranks, shown, () => shown.map(({ state, label, text }) => {
      const row = make("div", "fw-rank"), dot = make("span", `fw-dot fw-${state ? state.replace(" ", "-") : "then"}`);
      const said = make("span", "fw-doing", text);
      said.title = text;
      row.append(dot, make("span", "", label), said);
      return row;
    }));
  }

  /**
   * @param {Moment | null} at
   * @param {Skin} skin
   */
  drawNumbers(at, skin) {
    const { steps } = this;
    const step = this.isLive || !at ? null : at.step >= 0 ? at.step : this.stepBefore(at.t_us);
    const here = step === null ? steps.length - 1 : steps.numbered(step);
    write(this.lateNote, step === null ? this.late : "");
    this.lateNote.title = this.late;
    this.drawChange();
    const said = { ms: (/** @type {number} */ ms) => formatDuration(ms * 1000), exposed: formatShare, loss: formatLoss };
    for (const { value, colour, number, note, sheet } of this.lines) {
      write(note, here >= 0 ? `step ${steps.columns.step[here]}` : "");
      const isKnown = here >= 0 && (value !== "loss" || sure(steps.columns.has_loss[here]) > 0);
      write(number, isKnown ? said[value](sure(steps.columns[value][here])) : NONE);
      sheet.paint(40, (pen, width, height) => { drawLine(pen, width, height, { steps, value, colour, at: step, skin }); });
    }
  }

  /** Show the effect of the last changed setting: before and after. */
  drawChange() {
    const { change } = this;
    refill(this.costs, change, () => {
      if (!change) return [];
      const table = make("table"), head = make("tr");
      head.append(...["", "steps", "step time", "exposed", "peak"].map((word) => make("th", "", word)));
      const row = (/** @type {string} */ name, /** @type {Costs} */ costs) => {
        const line = make("tr");
        const numbers = [`${costs.num_steps}`, formatDuration(1000 * costs.ms), formatShare(costs.exposed), formatBytes(costs.peak_bytes)];
        line.append(make("th", "", name), ...numbers.map((number) => make("td", "", number)));
        return line;
      };
      table.append(head, row("before", change.before), row("after", change.after));
      return [make("div", "fw-turned", `changed at step ${change.at_step}: ${change.what}`), table];
    });
  }

  /** @param {number} us */
  stepBefore(us) {
    const place = this.steps.endedAt(us);
    return place < 0 ? -1 : sure(this.steps.columns.step[place]);
  }

  /**
   * @param {Moment | null} at
   * @param {Known["memory"]} memory
   * @param {Scene} scene
   */
  drawMemoryPanel(at, memory, scene) {
    const groups = this.groups
      .map((ranks, place) => ({ label: ranksWithin(ranks, 13), series: memory.at(place), peak: this.peaks.at(place) }))
      .flatMap(({ label, series, peak }) => (series ? [{ label, series, peak }] : []));
    const count = Math.min(groups.length, MAX_AREAS);
    const height = Math.max(count, 1) * (count > 1 ? MEMORY_HEIGHTS.several : MEMORY_HEIGHTS.one);
    this.memorySheet.paint(height, (pen, wide, high) => { drawMemory(pen, wide, high, { ...scene, groups }); });
    this.drawPeakNote(groups.flatMap(({ peak }) => peak ?? []), groups.length);
    const rank = at?.ranks.at(0);
    const held = (rank?.bytes ?? []).map((bytes, place) => ({ ...sure(CATEGORIES[place]), bytes }))
      .filter((_, place) => this.known.classes.has(place)); // even without bytes here, so that nothing below moves
    refill(this.memoryLegend, [held, rank?.label], () => [
      ...(rank ? [swatch(`${rank.label}: in use`, "", formatBytes(rank.in_use))] : []),
      ...held.map(({ words, colour, bytes }) => swatch(words, colour, formatBytes(bytes))),
    ]);
  }

  /**
   * @param {PeakInfo[]} peaks
   * @param {number} count of groups
   */
  drawPeakNote(peaks, count) {
    const top = peaks.length ? peaks.reduce((best, peak) => (peak.num_bytes > best.num_bytes ? peak : best)) : null;
    const more = count > MAX_AREAS ? `and ${count - MAX_AREAS} more groups of ranks` : "";
    this.peak.hidden = !top;
    write(this.peakNote, top ? ["", ...[this.clock, top.text, more].filter(Boolean)].join(" \u00b7 ") : "");
    if (!top) return;
    write(this.peak, `peak ${formatBytes(top.num_bytes)}${top.step >= 0 ? `, step ${top.step}` : ""}`);
    this.peak.onclick = () => {
      this.putCursor(top.t_us);
      this.showCursor(top.t_us);
    };
  }

  /**
   * @param {Moment | null} at
   * @param {Known["states"]} states
   * @param {Scene} scene
   */
  drawStatesPanel(at, states, scene) {
    const found = states.at(0) ?? [], now = at?.ranks.at(0)?.units;
    const units = this.order.filter((unit) => found.at(unit)?.length).slice(0, MAX_UNITS)
      .map((unit) => ({ name: sure(this.units[unit]), series: sure(found[unit]), now: now?.at(unit) }));
    const height = units.length * unitHeight(units.length) + 2;
    this.statesSheet.paint(height, (pen, wide, high) => { drawStates(pen, wide, high, { ...scene, units }); });
    const gone = this.health.filter(({ state }) => state === "gone").flatMap(({ ranks }) => ranks);
    /** @type {Map<string, number[]>} */
    const unsharded = new Map(); // by the names of units: the ranks that have them
    for (const { ranks, units: then } of at?.ranks ?? []) {
      const living = ranks.filter((rank) => !gone.includes(rank));
      const full = this.order.filter((unit) => then.at(unit) === UNIT_STATE.UNSHARDED).map((unit) => this.units[unit]);
      const names = full.join(", ") || "none";
      if (living.length) unsharded.set(names, [...unsharded.get(names) ?? [], ...living].sort((a, b) => a - b));
    }
    const told = [...unsharded].map(([names, ranks]) => `unsharded on ${ranksInWords(ranks)}: ${names}`);
    const gathered = [...told, gone.length ? `${ranksInWords(gone)} gone` : ""].filter(Boolean).join(" \u00b7 ");
    const first = this.groups.at(0), drawn = first && this.groups.length > 1 ? `showing ${ranksInWords(first)}` : "";
    write(this.states.note, [gathered, drawn, this.clock].filter(Boolean).join(" \u00b7 "));
    this.states.note.title = gathered;
  }
}

/** @param {{ model: Model, el: HTMLElement }} place */
export function showDashboard({ model, el }) {
  const root = document.createElement("div");
  el.append(root);
  const view = new DashboardView(model, root);
  Object.assign(root, { dashboard: view }); // for inspection in the page
  return () => {
    view.destroy();
    root.remove();
  };
}

export default { render: showDashboard };
