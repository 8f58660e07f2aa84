// The buttons of the dashboard: commands to the ranks, and which time the view shows.

import { enable, make, onPress, write } from "../dom.js";

/** @import { InitialState } from "../messages.js" */
/** @import { RunModel } from "../model.js" */

/**
 * @typedef {object} Actions
 * @property {(word: string, argument: string) => void} press
 * @property {() => void} holdStep
 * @property {() => void} follow
 */

const RANDOM = "random"; // a fault that is not named before it is removed
/** @type {Readonly<Record<string, string>>} by command, unless it is its word */
const LABELS = { fault: "inject fault" };
/** @type {Readonly<Record<string, string>>} */
const TITLES = {
  break: "stop all ranks before every such event",
  fault: "break the training on purpose, to find out what is wrong",
};

export class ButtonsView {
  /**
   * @param {InitialState} about
   * @param {Actions} actions
   */
  constructor({ buttons, sizes, faults }, actions) {
    this.actions = actions;
    this.box = make("div", "fw-buttons");
    /** @type {Map<string, HTMLButtonElement>} */
    this.buttons = new Map(); // commands, by their word
    this.size = make("select", "fw-size"); // how far `next` goes
    this.place = make("input", "fw-place"); // where `break` stops
    this.canBreak = false;
    this.fault = make("select", "fw-kind"); // what `fault` injects
    this.oneStep = make("button", "fw-hold", "freeze view");
    this.live = make("button", "fw-live", "live");
    this.buildChoice(this.size, "next: size", sizes);
    this.buildChoice(this.fault, "fault: what to inject", faults);
    this.fault.title = "a fault for the training; random: one that is named when it is removed";
    this.faultOn = make("button", "fw-fault-on"); // the fault that is injected; removes it
    this.faultOn.title = "remove the fault, and name it";
    this.faultOn.hidden = true;
    onPress(this.faultOn, () => { actions.press("fault", "off"); });
    this.buildPlace();
    for (const word of buttons) this.box.append(this.buildCommand(word));
    this.box.append(this.faultOn);
    this.oneStep.title = "stop redrawing and show the last step that all ranks finished";
    onPress(this.oneStep, actions.holdStep);
    this.live.onclick = actions.follow;
    this.box.append(this.oneStep, this.live);
  }

  /**
   * A button, joined with the field of its argument if it has one.
   * @param {string} word
   */
  buildCommand(word) {
    const button = make("button", `fw-${word}`, LABELS[word] ?? word);
    button.title = TITLES[word] ?? "";
    const field = { next: this.size, break: this.place, fault: this.fault }[word] ?? null;
    enable(button, false);
    this.buttons.set(word, button);
    onPress(button, () => { this.actions.press(word, field?.value.trim() ?? ""); });
    if (!field) return button;
    const both = make("span", "fw-joined");
    both.append(button, field);
    return both;
  }

  /**
   * @param {HTMLSelectElement} field
   * @param {string} label
   * @param {readonly string[]} options
   */
  buildChoice(field, label, options) {
    field.setAttribute("aria-label", label);
    field.append(...options.map((option) => make("option", "", option)));
  }

  buildPlace() {
    this.place.setAttribute("aria-label", "break: event to stop before");
    this.place.placeholder = "such as forward:blocks.2";
    this.place.addEventListener("input", () => { this.enableBreak(); });
    this.place.size = 16;
    this.place.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.buttons.get("break")?.click();
    });
  }

  /** Let `break` be pressed where it can be, once an event is typed. */
  enableBreak() {
    const button = this.buttons.get("break");
    if (button) enable(button, this.canBreak && this.place.value.trim() !== "");
  }

  /**
   * Whether keys pressed in this element are for it.
   * @param {EventTarget | null} target
   */
  isField(target) {
    return target === this.place || target === this.size || target === this.fault;
  }

  /**
   * @param {RunModel} model
   * @param {{ isLive: boolean, isRecord: boolean }} how
   */
  draw(model, { isLive, isRecord }) {
    const isOver = model.isOver(isRecord), can = model.enabledButtons(isRecord);
    for (const [word, button] of this.buttons) if (word !== "break") enable(button, can.has(word));
    this.canBreak = can.has("break");
    this.enableBreak();
    const fault = isOver ? "" : model.status?.fault ?? "";
    this.faultOn.hidden = fault === "";
    write(this.faultOn, fault === RANDOM ? "fault on \u2715" : `fault on: ${fault} \u2715`);
    enable(this.faultOn, can.has("fault"));
    enable(this.oneStep, model.lastStep !== null);
    this.live.setAttribute("aria-pressed", String(isLive && !isOver));
    write(this.live, isOver ? "\u25cb latest" : isLive ? "\u25cf live" : "\u25cb live");
  }
}
