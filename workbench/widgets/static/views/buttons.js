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

export class ButtonsView {
  /**
   * @param {InitialState} about
   * @param {Actions} actions
   */
  constructor({ buttons, sizes }, actions) {
    this.actions = actions;
    this.box = make("div", "fw-buttons");
    /** @type {Map<string, HTMLButtonElement>} */
    this.buttons = new Map(); // commands, by their word
    this.size = make("select", "fw-size"); // how far `next` goes
    this.place = make("input", "fw-place"); // where `break` stops
    this.oneStep = make("button", "fw-hold", "hold last step");
    this.live = make("button", "fw-live", "live");
    this.buildSize(sizes);
    this.buildPlace();
    for (const word of buttons) this.box.append(this.buildCommand(word));
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
    const button = make("button", `fw-${word}`, word);
    const field = word === "next" ? this.size : word === "break" ? this.place : null;
    enable(button, false);
    this.buttons.set(word, button);
    onPress(button, () => { this.actions.press(word, field?.value.trim() ?? ""); });
    if (!field) return button;
    const both = make("span", "fw-joined");
    both.append(button, field);
    return both;
  }

  /** @param {readonly string[]} sizes */
  buildSize(sizes) {
    this.size.setAttribute("aria-label", "next: size");
    this.size.append(...sizes.map((size) => make("option", "", size)));
  }

  buildPlace() {
    this.place.setAttribute("aria-label", "break: event to stop before");
    this.place.placeholder = "all_gather:blocks.2";
    this.place.size = 16;
    this.place.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.buttons.get("break")?.click();
    });
  }

  /**
   * Whether keys pressed in this element are for it.
   * @param {EventTarget | null} target
   */
  isField(target) {
    return target === this.place || target === this.size;
  }

  /**
   * @param {RunModel} model
   * @param {{ isLive: boolean, isRecord: boolean }} how
   */
  draw(model, { isLive, isRecord }) {
    const isOver = model.isOver(isRecord), can = model.enabledButtons(isRecord);
    for (const [word, button] of this.buttons) enable(button, can.has(word));
    enable(this.oneStep, model.lastStep !== null);
    this.live.setAttribute("aria-pressed", String(isLive && !isOver));
    write(this.live, isOver ? "\u25cb latest" : isLive ? "\u25cf live" : "\u25cb live");
  }
}
