// The head of the dashboard: the run's status, and the time that is shown with its event.

import { make, write } from "../dom.js";
import { announcement, badge, headline } from "../words.js";

/** @import { Moment } from "../messages.js" */
/** @import { RunModel } from "../model.js" */

export class HeadView {
  /** @param {HTMLElement} buttons */
  constructor(buttons) {
    this.box = make("div", "fw-head");
    this.badge = make("span", "fw-badge");
    this.why = make("span", "fw-why");
    this.when = make("span", "fw-when");
    this.event = make("span", "fw-event");
    this.spoken = make("div", "fw-unseen"); // for screen readers
    this.spokenKey = "";
    const state = make("div", "fw-state"), at = make("div", "fw-at");
    state.append(this.badge, this.why);
    at.append(this.when, this.event);
    this.spoken.setAttribute("role", "status");
    this.box.append(state, at, buttons, this.spoken);
  }

  /**
   * @param {RunModel} model
   * @param {Moment | null} at
   * @param {boolean} isLive
   */
  draw({ status, sentence }, at, isLive) {
    const why = status?.why ?? "", { when, event } = headline(at, isLive, sentence, why);
    write(this.when, when);
    write(this.event, event);
    this.event.title = event;
    this.badge.className = `fw-badge fw-is-${status?.word ?? "untold"}`;
    write(this.badge, badge(status));
    write(this.why, why);
    this.why.title = why;
    if (status === null) return;
    const { key, text } = announcement(status);
    if (key === this.spokenKey) return;
    this.spokenKey = key;
    write(this.spoken, text);
  }
}
