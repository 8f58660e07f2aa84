// The live dashboard in the browser. It asks the kernel for what is new, keeps it, and draws it; what it shows under the
// cursor it asks for as well. Text from the kernel (names of units, ranks, metrics) becomes text, never HTML.
// Python joins this module and those that it imports to one: see workbench/widgets/modules.py.

import { ASK_AGAIN_MS, Closeup } from "./closeup.js";
import { CATEGORIES, KIND, KINDS, UNIT_STATE, UNIT_STATES } from "./events.js";
import { formatBytes, formatDuration } from "./format.js";
import { isDark } from "./look.js";
import { Axis, MAX_AREAS, MEMORY_HEIGHTS, Sheet, drawLine, drawMemory, drawStates, unitHeight } from "./panels.js";
import { Series, fillMemory, fillStates } from "./series.js";
import { createTimeline } from "./timeline.js";

const SILENT_MS = 2500; // without an answer, that is said
const STEPS_IN_VIEW = 2.4; // that a running view shows
const MAX_UNITS = 200;

const TYPES = { f8: Float64Array, f4: Float32Array, i4: Int32Array, i2: Int16Array, u1: Uint8Array };

/** The tables of an increment: `{table: {column: typed array}}`. */
function unpack(columns, counts, data) {
  const buffer = data.buffer.slice(data.byteOffset, data.byteOffset + data.byteLength); // aligned
  const tables = {};
  let at = 0;
  for (const [table, wanted] of Object.entries(columns)) {
    tables[table] = {};
    for (const [name, code] of wanted) {
      const length = counts[table] * (table === "memory" && name === "bytes" ? CATEGORIES.length : 1);
      tables[table][name] = new TYPES[code](buffer, at, length);
      at += Math.ceil(tables[table][name].byteLength / 8) * 8;
    }
  }
  return tables;
}

/** An element with classes and plain text. */
function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

/** Give `element` these children, if they say anything else than those it has: else a pressed button would vanish. */
function refill(element, key, children) {
  const now = JSON.stringify(key);
  if (element.dataset.shown === now) return;
  element.dataset.shown = now;
  element.replaceChildren(...children());
}

class DashboardView {
  constructor(model, root) {
    Object.assign(this, { model, root, about: model.get("about") });
    this.id = Math.random().toString(36).slice(2);
    Object.assign(this, { isLive: true, cursor: null, moment: null, now: null, health: [], units: [], groups: [] });
    Object.assign(this, { peaks: [], end: 0, isAsking: false, hasBegun: false, askedAt: 0, answeredAt: performance.now(), isSeen: true });
    Object.assign(this, { wanted: null, isWaiting: false, number: 0, timer: 0, frame: 0, said: "", view: "", news: 0 });
    this.closeup = new Closeup((question) => this.isGone || this.send(question));
    this.build();
    this.listen();
    this.begin();
    this.tick();
  }

  // -- the page

  build() {
    const { root } = this;
    root.classList.add("fw-dashboard");
    root.tabIndex = 0;
    root.dataset.lmSuppressShortcuts = "true"; // arrow keys are the dashboard's while it has the focus
    root.setAttribute("role", "group");
    root.setAttribute("aria-label", "Live dashboard. Left and right arrow keys: event by event. L: live.");
    const head = make("div", "fw-head");
    this.when = make("span", "fw-when");
    this.event = make("span", "fw-event");
    head.append(this.when, this.event, this.buildButtons());
    this.sentence = make("div", "fw-said");
    this.sentence.setAttribute("role", "status");
    root.append(head, this.sentence, this.buildCards());
    this.body = make("div");
    root.append(this.body);
    this.buildPanels();
  }

  buildButtons() {
    const row = make("div", "fw-buttons");
    this.buttons = {};
    for (const word of this.about.buttons) {
      const button = (this.buttons[word] = make("button", `fw-${word}`, word));
      button.onclick = () => this.press(word);
      button.disabled = true;
      row.append(button);
    }
    this.live = make("button", "fw-live", "live");
    this.live.onclick = () => this.follow();
    row.append(this.live);
    return row;
  }

  buildCards() {
    const cards = make("div", "fw-cards");
    const card = (title) => {
      const box = make("div", "fw-card");
      box.append(make("h4", "", title));
      cards.append(box);
      return box;
    };
    this.ranks = make("div", "fw-ranks");
    card("ranks").append(this.ranks);
    this.lines = [["loss", "loss", 0], ["step time", "ms", 1]].map(([title, value, place]) => {
      const box = card(title), number = make("div", "fw-number", "\u2013");
      box.append(number);
      return { value, number, place, sheet: new Sheet(box, "", drawLine) };
    });
    return cards;
  }

  buildPanels() {
    const panel = (title) => {
      const box = make("div", "fw-panel"), heading = make("h4", "", title), note = make("span", "fw-note");
      const hint = make("span", "fw-hint");
      heading.append(note, hint);
      box.append(heading);
      this.body.append(box);
      return [box, note, hint];
    };
    const [memory, memoryNote, memoryHint] = panel("memory in use, by class");
    const [states, statesNote, statesHint] = panel("units");
    const [timeline, timelineNote] = panel("timeline");
    Object.assign(this, { memoryNote, statesNote, timelineNote, hints: [memoryHint, statesHint] });
    this.memorySheet = new Sheet(memory, "fw-scrub fw-memory", drawMemory);
    this.memoryLegend = make("div", "fw-legend");
    memory.append(this.memoryLegend);
    this.statesSheet = new Sheet(states, "fw-scrub fw-states", drawStates);
    this.statesLegend = make("div", "fw-legend");
    states.append(this.statesLegend);
    this.timelineBox = make("div", "fw-timeline");
    timeline.append(this.timelineBox);
    this.takeClock(["", ""]);
    refill(this.statesLegend, 1, () => UNIT_STATES.map(({ words, colour }) => swatch(words, colour)));
  }

  begin() {
    this.timeline?.destroy();
    this.timelineBox.replaceChildren();
    const canvas = document.createElement("canvas");
    this.timelineBox.append(canvas);
    this.timeline = createTimeline(canvas, { onFollow: (on) => on || this.hold() });
    this.timeline.onCursor((us) => us !== null && this.putCursor(us));
    this.timeline.setUnits(this.units);
    if (this.isLive) this.timeline.follow(true);
    this.closeup.forget();
    this.memory = [];
    this.states = [];
    this.holds = [];
    this.openTracks = [];
    this.steps ??= new Series({ t: [Float64Array, 1], step: [Int32Array, 1], loss: [Float32Array, 1], ms: [Float32Array, 1],
      model: [Int32Array, 1] });
    this.numTracks = 0;
    this.end = 0;
    this.simplifiedTo = -Infinity; // before this not every change was told
  }

  listen() {
    this.ender = new AbortController();
    const options = { signal: this.ender.signal };
    this.onMessage = (content, buffers) => content.view === this.id && this.take(content, buffers);
    this.model.on("msg:custom", this.onMessage);
    this.root.addEventListener("keydown", (event) => this.key(event), { ...options, capture: true });
    for (const { canvas } of [this.memorySheet, this.statesSheet]) this.listenToScrubs(canvas, options);
    for (const type of ["pointermove", "wheel", "keydown"]) { // what moves the timeline moves the panels above
      this.timelineBox.addEventListener(type, () => this.draw(), { ...options, passive: true });
    }
    document.addEventListener("visibilitychange", () => this.tick(), options);
    this.seen = new IntersectionObserver((entries) => {
      this.isSeen = entries.at(-1).isIntersecting;
      this.tick();
    });
    this.seen.observe(this.root);
    this.sized = new ResizeObserver(() => this.draw());
    this.sized.observe(this.root);
    this.themed = new MutationObserver(() => this.draw());
    this.themed.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "class"] });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw(), options);
  }

  listenToScrubs(canvas, options) {
    const put = (event) => {
      const { plot, view } = this.timeline.stats();
      const axis = new Axis(plot, view);
      const x = event.clientX - canvas.getBoundingClientRect().left;
      this.putCursor(Math.min(Math.max(axis.t(Math.max(x, axis.left)), 0), this.end));
    };
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      canvas.setPointerCapture(event.pointerId);
      put(event);
    }, options);
    canvas.addEventListener("pointermove", (event) => canvas.hasPointerCapture(event.pointerId) && put(event), options);
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
    this.model.send({ view: this.id, ask: "bye" });
  }

  // -- asking

  send(content) {
    this.model.send({ view: this.id, ...content });
  }

  /** Ask for what is new, if somebody looks: the kernel answers as soon as there is something, but not too often. */
  tick() {
    clearTimeout(this.timer);
    if (this.isGone || document.hidden || !this.isSeen) return;
    const now = performance.now();
    if (!this.isAsking || now - this.askedAt > ASK_AGAIN_MS) {
      Object.assign(this, { isAsking: true, askedAt: now });
      this.send({ ask: "feed", wait: this.hasBegun });
    }
    if (now - this.answeredAt > SILENT_MS) this.say();
    if (this.closeup.asked) this.draw();
    this.timer = setTimeout(() => this.tick(), 500);
  }

  take(content, buffers) {
    this.answeredAt = performance.now();
    if (content.kind === "feed") this.takeNews(content, buffers[0]);
    else if (content.kind === "moment") this.takeMoment(content);
    else if (content.kind === "window") this.takeWindow(content, buffers[0]);
    else if (content.kind === "said") this.takeSaid(content);
    this.draw();
  }

  takeNews(news, data) {
    Object.assign(this, { isAsking: false, hasBegun: true });
    this.tick(); // first: the kernel can already look for what comes next
    if (news.another) Object.assign(this, { steps: null, now: null, peaks: [], sayUntil: 0 });
    if (news.restart) {
      this.begin();
      if (!this.isLive) this.follow();
    }
    if (news.units) {
      Object.assign(this, { units: news.units, order: news.order });
      this.timeline.setUnits(this.units);
    }
    Object.assign(this, { health: news.health, told: news.said, groups: news.groups });
    if (news.now) this.now = news.now;
    if (news.holds) {
      this.holds = news.holds;
      this.timeline.setHolds(news.holds);
    }
    if (news.peaks) this.peaks = news.peaks;
    const tables = unpack(this.about.columns, news.counts, data);
    this.takeTracks(news.tracks);
    this.takeClock(news.clock);
    this.takeSpans(tables.spans);
    fillMemory(this.memory, tables.memory);
    fillStates(this.states, tables.states);
    if (news.counts.memory || news.counts.states) this.news += 1;
    for (let k = 0; k < news.counts.steps; k++) {
      const { t, step, loss, ms, model } = tables.steps;
      this.steps.push({ t: t[k], step: step[k], loss: loss[k], ms: ms[k], model: model[k] });
    }
    this.end = Math.max(this.end, this.now?.t_us ?? 0);
    if (!news.exact) this.simplifiedTo = this.end;
    this.takeOpen(news.open);
    if (news.cursor !== undefined) this.takeCursor(news.cursor);
    if (this.isLive) this.showLatest();
  }

  /** `%fsdp back` has moved the cursor: the view goes there and holds, or follows again. */
  takeCursor(cursor) {
    if (!cursor) {
      if (!this.isLive) this.follow();
      return;
    }
    if (this.isLive) this.showLatest(); // first, or the view would stay where the last picture was
    this.hold(cursor.t_us);
    Object.assign(this, { moment: cursor.moment, wanted: null, isWaiting: false, moves: false });
    this.number += 1; // an answer to a question on its way is too late
    this.showCursor(cursor.t_us);
  }

  /** Whose times the timeline has, and whose the other panels; nothing where there is one clock. */
  takeClock([timeline, others]) {
    const how = "drag to pan, wheel to zoom, drag the axis or an area above to move the cursor";
    const text = [timeline, how].filter(Boolean).join(" \u00b7 ");
    if (this.timelineNote.textContent !== text) this.timelineNote.textContent = text;
    this.clock = others;
  }

  takeTracks(ranks) {
    if (this.numTracks === ranks.length) return;
    this.numTracks = ranks.length;
    this.timeline.setTracks(ranks.flatMap((rank) => this.about.tracks.map((name) => ({ name, rank }))));
  }

  takeSpans(spans) {
    const tracks = new Map();
    spans.track.forEach((track, k) => tracks.has(track) ? tracks.get(track).push(k) : tracks.set(track, [k]));
    for (const [track, places] of tracks) {
      const pick = (Type, value) => Type.from(places, value);
      this.timeline.append(track, {
        start: pick(Float64Array, (k) => spans.start[k]),
        end: pick(Float64Array, (k) => spans.start[k] + spans.duration[k]),
        bytes: pick(Float64Array, (k) => spans.bytes[k]),
        arrowFrom: pick(Float64Array, (k) => spans.start[k] - spans.before[k]),
        unit: pick(Int16Array, (k) => spans.unit[k]),
        kind: pick(Uint8Array, (k) => spans.kind[k]),
        exposed: pick(Uint8Array, (k) => spans.exposed[k]),
      });
    }
  }

  /** What has begun and not ended: of a hang, what hangs. */
  takeOpen(open) {
    const byTrack = new Map(this.openTracks?.map((track) => [track, []]));
    for (const entry of open) byTrack.set(entry[0], [...(byTrack.get(entry[0]) ?? []), entry]);
    for (const [track, entries] of byTrack) {
      this.timeline.setOpen(track, {
        start: Float64Array.from(entries, (entry) => entry[3]),
        end: Float64Array.from(entries, (entry) => Math.max(this.end, entry[3])),
        kind: Uint8Array.from(entries, (entry) => entry[1]),
        unit: Int16Array.from(entries, (entry) => entry[2]),
        bytes: Float64Array.from(entries, (entry) => entry[4]),
        exposed: new Uint8Array(entries.length),
        arrowFrom: new Float64Array(entries.length).fill(NaN),
      });
    }
    this.openTracks = open.map(([track]) => track);
  }

  /** Every change in view; what is said of the cursor is asked for again: ranks may have told something since. */
  takeWindow(answer, data) {
    const tables = unpack(this.about.columns, answer.counts, data);
    if (!this.closeup.take(answer, tables)) return;
    if (this.isLive || !this.moment || this.isWaiting) return;
    const { rank, seq } = this.moment;
    this.want(this.moves ? { ask: "beside", rank, seq, by: 0 } : { ask: "at", t_us: this.cursor });
  }

  takeMoment({ number, moment }) {
    if (number !== this.number) return; // the cursor has moved on
    this.isWaiting = false;
    if (moment && !this.isLive) {
      this.moment = moment;
      if (!this.wanted && this.moves && moment.t_us !== this.cursor) this.showCursor(moment.t_us);
    }
    this.askMoment();
  }

  takeSaid({ text }) {
    this.said = text;
    this.sayUntil = performance.now() + 8000;
    this.say();
  }

  press(word) {
    this.said = `${word} \u2026`;
    this.sayUntil = performance.now() + 8000;
    this.send({ ask: "do", word });
    this.draw();
  }

  // -- the cursor

  /** The person points at a time: the view holds, and every panel shows the ranks then. */
  putCursor(at) {
    const us = Math.round(at * 1000) / 1000; // whole nanoseconds, as the kernel counts
    this.hold(us);
    this.cursor = us;
    this.timeline.setCursor(us);
    this.moves = false;
    this.want({ ask: "at", t_us: us });
    this.draw();
  }

  step(by) {
    const from = this.moment ?? this.now;
    if (!from) return;
    this.hold(from.t_us);
    this.moves = true;
    const { rank, seq } = this.moment ?? this.now;
    this.want({ ask: "beside", rank, seq, by });
  }

  /** Show the cursor at an event that the kernel has named, and bring it into view. */
  showCursor(us) {
    this.cursor = us;
    this.timeline.setCursor(us);
    const [t0, t1] = this.timeline.stats().view;
    if (us < t0 || us > t1) this.timeline.setView(us - (t1 - t0) / 2, us + (t1 - t0) / 2);
  }

  /** One question at a time; of those that come meanwhile the last one counts. */
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
    this.send({ ...this.wanted, number: (this.number += 1) });
    this.wanted = null;
  }

  hold(us = null) {
    if (!this.isLive) return;
    this.isLive = false;
    this.timeline.follow(false);
    if (us === null) this.putCursor(this.now?.t_us ?? this.end);
    this.draw();
  }

  follow() {
    Object.assign(this, { isLive: true, cursor: null, moment: null, wanted: null, isWaiting: false });
    this.number += 1;
    this.timeline.setCursor(null);
    this.timeline.follow(true);
    this.showLatest();
    this.draw();
  }

  /** A running view shows the last few steps. */
  showLatest() {
    const count = this.steps.length;
    if (!count || !this.end) return;
    const lasted = Array.from(this.steps.ms.slice(Math.max(count - 5, 0), count)).sort((a, b) => a - b);
    const span = Math.min(STEPS_IN_VIEW * 1000 * lasted[lasted.length >> 1], 1.02 * this.end);
    this.timeline.setView(this.end - span, this.end + 0.01 * span);
  }

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const actions = { ArrowRight: () => this.step(1), ArrowLeft: () => this.step(-1), l: () => this.follow() };
    if (!actions[event.key]) return;
    event.preventDefault();
    event.stopPropagation(); // neither the timeline's nor the notebook's
    actions[event.key]();
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
    const style = getComputedStyle(root), css = (name) => style.getPropertyValue(`--fw-${name}`).trim();
    const skin = Object.fromEntries(["page", "ink", "soft", "row", "grid", "accent", "peak"].map((name) => [name, css(name)]));
    const axis = new Axis(stats.plot, stats.view), at = this.isLive ? this.now : this.moment ?? this.now;
    const isEmpty = !this.now;
    this.body.style.display = isEmpty ? "none" : "";
    this.drawHead(at);
    this.drawRanks(at);
    this.drawNumbers(at, skin);
    this.say();
    if (isEmpty) return;
    const found = this.lookClosely(stats.view);
    this.shown = found?.memory.length ? found : this; // else it was too much to be told
    this.drawMemoryPanel(at, axis, skin);
    this.drawStatesPanel(at, axis, skin);
    this.followTimeline(stats);
  }

  /** Every change in `view` if that is known; it is asked for where nothing moves by itself. */
  lookClosely(view) {
    const isClose = !this.isLive || this.buttons.pause?.disabled;
    if (isClose) this.closeup.look(view, this.end, this.news);
    else this.closeup.rest();
    const found = this.closeup.covering(view, this.end);
    const isSimple = view[0] < this.simplifiedTo;
    const text = isClose ? this.closeup.hint(found) : isSimple ? "simplified: click for every change" : "";
    for (const hint of this.hints) if (hint.textContent !== text) hint.textContent = text;
    return found;
  }

  /** The timeline moves by itself when it is dragged: the panels above go along. */
  followTimeline({ view }) {
    const now = view.join();
    if (this.view === now) return;
    this.view = now;
    this.draw();
  }

  drawHead(at) {
    const step = at && at.step >= 0 ? `step ${at.step}` : "";
    const when = at ? formatDuration(at.t_us) : "";
    this.when.textContent = [step, when].filter(Boolean).join(" \u00b7 ");
    this.event.textContent = at?.event ?? "";
    this.event.title = at?.event ?? "";
    const states = new Set(this.health.map(({ state }) => state));
    const isOver = !this.health.length || states.has("gone"); // nothing is to come: the ranks were stopped, or some died
    this.live.setAttribute("aria-pressed", String(this.isLive && !isOver));
    this.live.textContent = isOver ? "\u25cb over" : this.isLive ? "\u25cf live" : "\u25cb live";
    const works = states.has("running") || states.has("waiting"), isHeld = states.has("held");
    const can = { pause: works && !isHeld, next: isHeld, continue: isHeld, abort: works || isHeld };
    for (const [word, button] of Object.entries(this.buttons)) button.disabled = !can[word];
  }

  say() {
    const isSilent = performance.now() - this.answeredAt > SILENT_MS;
    const said = performance.now() < (this.sayUntil ?? 0) ? this.said : "";
    const text = isSilent ? "The kernel does not answer; it may be busy with a cell, or gone." : said || this.told || "";
    if (this.sentence.textContent !== text) this.sentence.textContent = text;
  }

  drawRanks(at) {
    const rows = this.health.map(({ label, state, where }) => [state, label, where ? `held ${where}` : state]);
    const doing = (at?.ranks ?? []).map(({ label, doing: what }) => ["", label, what]);
    const isOne = this.isLive && rows.length === 1 && doing.length && !this.health[0].where && rows[0][0] !== "idle";
    const shown = isOne ? doing.map(([, label, what]) => [rows[0][0], label, `${rows[0][0]} \u00b7 ${what}`])
      : this.isLive ? rows : [...rows, ...doing.map(([state, label, what]) => [state, label, what])];
    refill(this.ranks, shown, () => shown.map(([state, label, text]) => {
      const row = make("div", "fw-rank"), dot = make("span", `fw-dot fw-${state ? state.replace(" ", "-") : "then"}`);
      const said = make("span", "fw-doing", text);
      said.title = text;
      row.append(dot, make("span", "", label), said);
      return row;
    }));
  }

  drawNumbers(at, skin) {
    const { steps } = this;
    const step = this.isLive || !at ? null : at.step >= 0 ? at.step : this.stepBefore(at.t_us);
    const here = step === null ? steps.length - 1 : steps.last("step", step);
    for (const { value, number, sheet } of this.lines) {
      const found = here >= 0 ? steps[value][here] : NaN;
      const text = Number.isFinite(found) ? (value === "ms" ? formatDuration(found * 1000) : found.toPrecision(4)) : "\u2013";
      if (number.textContent !== text) number.textContent = text;
      const { colour } = value === "loss" ? UNIT_STATES[UNIT_STATE.SHARDED] : KINDS[KIND.OPTIMIZER];
      sheet.paint(40, { steps, value, colour, at: step, skin });
    }
  }

  stepBefore(us) {
    const place = this.steps.last("t", us);
    return place < 0 ? -1 : this.steps.step[place];
  }

  drawMemoryPanel(at, axis, skin) {
    const { holds, cursor, end } = this;
    const groups = this.groups
      .map((ranks, place) => ({ label: inWords(ranks), series: this.shown.memory[place], peak: this.peaks[place] }))
      .filter(({ series }) => series);
    const count = Math.min(groups.length, MAX_AREAS);
    const height = Math.max(count, 1) * MEMORY_HEIGHTS[count > 1 ? 1 : 0];
    this.memorySheet.paint(height, { groups, axis, holds, cursor, skin, end });
    this.drawPeakNote(groups);
    const rank = at?.ranks[0];
    const held = rank ? rank.bytes.map((bytes, place) => ({ ...CATEGORIES[place], bytes })).filter(({ bytes }) => bytes > 0) : [];
    refill(this.memoryLegend, [held, rank?.label], () => [
      ...(rank ? [swatch(`${rank.label}: in use`, "", formatBytes(rank.in_use))] : []),
      ...held.map(({ words, colour, bytes }) => swatch(words, colour, formatBytes(bytes))),
    ]);
  }

  drawPeakNote(groups) {
    const top = groups.reduce((best, group) => (group.peak?.num_bytes > (best?.peak.num_bytes ?? 0) ? group : best), null);
    const more = groups.length > MAX_AREAS ? `and ${groups.length - MAX_AREAS} more groups of ranks` : "";
    refill(this.memoryNote, [top?.peak, more, this.clock], () => {
      if (!top) return [];
      const step = top.peak.step >= 0 ? `, step ${top.peak.step}` : "";
      const button = make("button", "fw-peak", `peak ${formatBytes(top.peak.num_bytes)}${step}`);
      button.title = "go there";
      button.onclick = () => {
        this.putCursor(top.peak.t_us);
        this.showCursor(top.peak.t_us);
      };
      return [button, document.createTextNode(["", this.clock, top.peak.text, more].filter((text, k) => !k || text).join(" \u00b7 "))];
    });
  }

  drawStatesPanel(at, axis, skin) {
    const found = this.shown.states[0] ?? [];
    const told = at?.ranks[0]?.units ?? [];
    const shown = (this.order ?? []).filter((unit) => found[unit]).slice(0, MAX_UNITS);
    const units = shown.map((unit) => ({ name: this.units[unit], series: found[unit] }));
    const now = shown.map((unit) => told[unit]);
    const { holds, cursor, end } = this;
    this.statesSheet.paint(units.length * unitHeight(units.length) + 2, { units, axis, now, holds, cursor, skin, end });
    const who = this.groups.length > 1 ? `${inWords(this.groups[0])} shown` : this.groups.length ? `${inWords(this.groups[0])}${this.groups[0].length > 1 ? " alike" : ""}` : "";
    const note = [who, this.clock].filter(Boolean).join(" \u00b7 ");
    if (this.statesNote.textContent !== note) this.statesNote.textContent = note;
  }
}

/** A coloured square, a word, and a number. */
function swatch(word, colour, number = "") {
  const entry = make("span");
  if (colour) {
    const square = make("i");
    square.style.background = colour;
    entry.append(square);
  }
  entry.append(word);
  if (number) entry.append(" ", make("b", "", number));
  return entry;
}

/** `[0, 1, 2, 5]` -> `ranks 0-2, 5`. */
function inWords(ranks) {
  const runs = [];
  for (const rank of ranks) {
    if (runs.length && runs.at(-1)[1] === rank - 1) runs.at(-1)[1] = rank;
    else runs.push([rank, rank]);
  }
  const said = runs.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join(", ");
  return `rank${ranks.length > 1 ? "s" : ""} ${said}`;
}

function render({ model, el }) {
  const root = document.createElement("div");
  el.append(root);
  const view = new DashboardView(model, root);
  root.dashboard = view; // for whoever looks into the page
  return () => {
    view.destroy();
    root.remove();
  };
}

export default { render };
