// The sentence below the buttons: that the kernel is silent, what came of a button, or what there is to see.

import { make, write } from "../dom.js";

const REPLY_MS = 8000; // how long the result of a button is shown
const SILENT = "The kernel does not answer: it may be busy with a cell, out of reach, or have ended.";

export class SentenceView {
  constructor() {
    this.box = make("div", "fw-said");
    this.box.setAttribute("role", "status");
    this.reply = "";
    this.replyUntil = 0;
  }

  /** @param {string} text empty: forget the last reply */
  setReply(text) {
    this.reply = text;
    this.replyUntil = performance.now() + REPLY_MS;
  }

  /**
   * @param {boolean} isSilent
   * @param {string} sentence
   */
  draw(isSilent, sentence) {
    const reply = performance.now() < this.replyUntil ? this.reply : "";
    write(this.box, isSilent ? SILENT : reply || sentence);
  }
}
