// The live dashboard in the browser: joins the client, which asks the kernel, the model of the run, the cursor and the
// views that draw them. Python joins this module and its imports into one: see workbench/widgets/js_bundle.py.

import { Client } from "./client.js";
import { Closeup } from "./closeup.js";
import { Cursor } from "./cursor.js";
import { keepBareKeys, make, write } from "./dom.js";
import { FrameLoop } from "./frame_loop.js";
import { isDark } from "./look.js";
import { RunModel } from "./model.js";
import { History } from "./series.js";
import { itemsOf } from "./unpack.js";
import { BreakpointsView } from "./views/breakpoints.js";
import { ButtonsView } from "./views/buttons.js";
import { HeadView } from "./views/head.js";
import { MemoryView } from "./views/memory.js";
import { followPage, onScrub } from "./views/page_events.js";
import { RanksView } from "./views/ranks.js";
import { skinOf } from "./views/scene.js";
import { SentenceView } from "./views/sentence.js";
import { StepsView } from "./views/steps.js";
import { TimelineView } from "./views/timeline_panel.js";
import { UnitStatesView } from "./views/unit_states.js";

/** @import { Channel, WindowAnswer } from "./client.js" */
/** @import { FeedUpdate, Tables } from "./messages.js" */

class Dashboard {
  /**
   * @param {Channel} channel
   * @param {HTMLElement} root
   */
  constructor(channel, root) {
    const draw = () => { this.frames.request(); };
    const press = (/** @type {string} */ word, /** @type {string} */ argument) => { this.press(word, argument); };
    this.root = root;
    this.about = channel.get("about");
    this.isRecord = channel.isRecord === true;
    this.frames = new FrameLoop(() => this.picture());
    this.model = new RunModel();
    this.client = new Client(channel, {
      onNews: (news, tables) => { this.takeNews(news, tables); },
      onMoment: (moment, isLast) => { this.cursor.takeMoment(moment, isLast); },
      onWindow: (answer, tables) => { this.takeWindow(answer, tables); },
      onReply: (text) => { this.sentence.setReply(text); },
      onAnswer: draw,
      onBeat: () => { this.beat(); },
    });
    this.closeup = new Closeup((number, from, to) => { this.client.askWindow(number, from, to); });
    this.timeline = new TimelineView({
      onCursor: (us) => { this.cursor.put(us); },
      onStop: () => { this.cursor.hold(); },
      onDraw: draw,
    });
    this.cursor = new Cursor(this.model, this.client, this.timeline, { isRecord: this.isRecord, draw });
    this.buttons = new ButtonsView(this.about, {
      press,
      holdStep: () => { this.cursor.holdStep(); },
      follow: () => { this.cursor.follow(); },
    });
    this.head = new HeadView(this.buttons.box);
    this.breakpoints = new BreakpointsView(press, root);
    this.sentence = new SentenceView();
    this.ranks = new RanksView();
    this.steps = new StepsView();
    this.memory = new MemoryView((us) => {
      this.cursor.put(us);
      this.cursor.reveal(us);
    });
    this.states = new UnitStatesView();
    this.body = make("div"); // the panels
    this.foot = make("div", "fw-foot");
    this.shown = this.model.history; // what is drawn: the model's history, or every change in a window
    this.ender = new AbortController();
    this.build();
    this.timeline.follow(true);
    this.listen();
  }

  build() {
    const { root, about: { panels }, memory, states, timeline, ranks, steps } = this;
    root.classList.add("fw-dashboard");
    root.classList.toggle("fw-canvas", !panels.includes("ranks"));
    root.tabIndex = 0;
    root.setAttribute("role", "group");
    root.setAttribute("aria-label", "Live dashboard. Left and right arrow keys: event by event. L: live. H: hold the last step.");
    root.append(this.head.box, this.breakpoints.box, this.sentence.box);
    if (panels.includes("ranks")) {
      const cards = make("div", "fw-cards");
      cards.append(ranks.box, ...steps.cards.map(({ box }) => box));
      root.append(cards, steps.change);
    }
    if (panels.includes("memory")) this.body.append(memory.box);
    if (panels.includes("units")) this.body.append(states.box);
    if (panels.includes("timeline")) this.body.append(timeline.box);
    root.append(this.body, this.foot);
  }

  listen() {
    const { signal } = this.ender, draw = () => { this.frames.request(); };
    keepBareKeys(this.root, { signal });
    this.root.addEventListener("keydown", (event) => { this.key(event); }, { signal, capture: true });
    for (const { sheet: { canvas } } of [this.memory, this.states]) onScrub(canvas, (x) => { this.scrub(x); }, signal);
    followPage(this.root, { draw, see: (isSeen) => { this.client.wake(isSeen); }, signal });
  }

  destroy() {
    this.ender.abort();
    this.closeup.forget();
    this.frames.end();
    this.timeline.destroy();
    this.client.close();
  }

  // -- answers

  /**
   * @param {FeedUpdate} news
   * @param {Tables} tables
   */
  takeNews(news, tables) {
    const { model, cursor, timeline } = this;
    model.take(news, tables);
    if (news.another) this.sentence.setReply("");
    if (news.restart) this.restart();
    timeline.take(model, itemsOf(tables.spans, model.tracks.length), news.open);
    if (news.has_moved) cursor.takeMoved(news.cursor);
    if (cursor.isLive) cursor.showLatest();
    this.breakpoints.draw(this.buttons.buttons.has("break") ? model.breakpoints : []);
  }

  /** The record comes again from its begin. */
  restart() {
    this.timeline.restart();
    this.closeup.forget();
    if (this.cursor.isLive) this.timeline.follow(true);
    else this.cursor.follow();
  }

  /**
   * Keep every change in a window.
   * @param {WindowAnswer} answer
   * @param {Tables} tables
   */
  takeWindow(answer, tables) {
    const history = new History(), { units, tracks } = this.model;
    history.takeMemory(tables.memory);
    history.takeStates(tables.states, units.length);
    if (this.closeup.take(answer, history, itemsOf(tables.spans, tracks.length))) this.cursor.askAgain();
  }

  beat() {
    if (this.client.isSilent) this.drawSentence();
    if (this.closeup.asked) this.frames.request();
  }

  // -- the user

  /**
   * @param {string} word
   * @param {string} argument
   */
  press(word, argument) {
    this.sentence.setReply(`${[word, argument].filter(Boolean).join(" ")} \u2026`);
    this.client.press(word, argument);
    this.frames.request();
  }

  /** @param {number} x pixels from the left end of a canvas */
  scrub(x) {
    const { axis } = this.timeline.chart, { begin, end } = this.model;
    this.cursor.put(Math.min(Math.max(axis.t(Math.max(x, axis.left)), begin), end));
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    if (this.buttons.isField(event.target) || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const { cursor } = this, actions = new Map([
      ["ArrowRight", () => { cursor.step(1); }],
      ["ArrowLeft", () => { cursor.step(-1); }],
      ["l", () => { cursor.follow(); }],
      ["h", () => { cursor.holdStep(); }],
    ]);
    const action = actions.get(event.key);
    if (!action) return;
    event.preventDefault();
    event.stopPropagation(); // keep it from the timeline and the notebook
    action();
  }

  // -- drawing

  /** Draw now; returns whether anything is recorded. */
  picture() {
    const { root, about: { panels }, model, cursor: { at, isLive, us: cursor }, isRecord } = this;
    root.classList.toggle("fw-dark", isDark());
    const skin = skinOf(root); // after the class, on which the colours depend
    this.body.style.display = model.now ? "" : "none";
    this.head.draw(model, at, isLive);
    this.buttons.draw(model, { isLive, isRecord });
    this.ranks.draw(model, at, isLive);
    this.steps.draw(model, at, isLive, skin);
    this.drawSentence();
    write(this.foot, model.whose);
    if (!model.now) return false;
    this.shown = this.lookClosely();
    const { holds, end } = model, scene = { axis: this.timeline.chart.axis, holds, cursor, end, skin };
    if (panels.includes("memory")) this.memory.draw(model, at, this.shown, scene);
    if (panels.includes("units")) this.states.draw(model, at, this.shown, scene);
    return true;
  }

  drawSentence() {
    this.sentence.draw(this.client.isSilent, this.model.sentence);
  }

  /** Every change in view if known, else the model's history; asks for it when the view does not move by itself. */
  lookClosely() {
    const { model, closeup, timeline, timeline: { view } } = this, isClose = !this.cursor.isLive || !model.works;
    if (isClose) closeup.look(view, model.end, model.numChanges);
    else closeup.rest();
    const found = isClose ? closeup.covering(view, model.end) : null;
    const isSimple = view[0] < model.simplifiedTo;
    const text = isClose ? closeup.hint(found) : isSimple ? "simplified: click for every change" : "";
    for (const { hint } of [this.memory, this.states]) write(hint, text);
    timeline.setClose(found?.spans ?? null);
    return found?.history ?? model.history;
  }
}

/** @param {{ model: Channel, el: HTMLElement }} place */
export function showDashboard({ model, el }) {
  const root = make("div");
  el.append(root);
  const dashboard = new Dashboard(model, root);
  Object.assign(root, { dashboard }); // for inspection in the page
  return () => {
    dashboard.destroy();
    root.remove();
  };
}

/**
 * A model of ipywidgets, as far as it is used here.
 * @typedef {object} WidgetModel
 * @property {{ on_msg(call: (message: object) => unknown): void }} [comm]
 * @property {(message: object) => unknown} [_handle_comm_msg]
 *
 * @typedef {object} Widget
 * @property {(name: "own_id") => string} get
 * @property {{ get_model(id: string): Promise<WidgetModel> }} [widget_manager]
 */

/**
 * Have a widget's model take messages as ipywidgets does. anywidget waits 2 s for the code of a model; in a browser that
 * needs longer, it drops all messages to the model from then on, but draws its view.
 * @param {Widget} widget
 */
async function takeMessages({ get, widget_manager: manager }) {
  const model = await manager?.get_model(get("own_id"));
  if (!model?.comm) return;
  const above = (/** @type {object} */ each) => /** @type {WidgetModel | null} */ (Reflect.getPrototypeOf(each));
  let kind = above(model);
  while (kind && !Object.hasOwn(kind, "_handle_comm_msg")) kind = above(kind);
  const take = kind && above(kind)?._handle_comm_msg; // of the class above anywidget's
  if (take) model.comm.on_msg((message) => take.call(model, message));
}

/** @param {{ model: Channel, el: HTMLElement }} place the panel's channel is no widget, and has no manager */
function showWidget(place) {
  void takeMessages(/** @type {Widget} */ (/** @type {unknown} */ (place.model)));
  return showDashboard(place);
}

export default { render: showWidget };
