// The browser's side of the dashboard's messages: asks the kernel, and hands on its answers. No other module writes or
// reads a message, except record/kernel.js, which answers in the kernel's place.

import { unpack } from "./unpack.js";
import { sure } from "./sure.js";

/** @import { Answer, AskAt, AskBeside, FeedUpdate, InitialState, Moment, Question, Tables } from "./messages.js" */

export const ASK_AGAIN_MS = 6000; // a question without an answer for so long is asked again
const SILENT_MS = 2500; // without an answer for so long, the kernel counts as silent
const BEAT_MS = 500;

/** @typedef {(answer: Answer, buffers: DataView[]) => void} OnMessage */

/**
 * Carries messages to the kernel: a widget's model, or a substitute.
 * @typedef {object} Channel
 * @property {(name: "about") => InitialState} get
 * @property {(question: Question) => void} send
 * @property {boolean} [isRecord] there is no kernel: the page has all data
 * @property {(name: "msg:custom", call: OnMessage) => void} on
 * @property {(name: "msg:custom", call: OnMessage) => void} off
 */

/** @typedef {Omit<AskAt, "view" | "number"> | Omit<AskBeside, "view" | "number">} MomentQuestion */

/** @typedef {{ number: number, from: number, to: number, isExact: boolean }} WindowAnswer `from`, `to`: microseconds */

/**
 * What is done with the answers.
 * @typedef {object} Handlers
 * @property {(news: FeedUpdate, tables: Tables) => void} onNews
 * @property {(moment: Moment, isLast: boolean) => void} onMoment `isLast`: no further question waits
 * @property {(answer: WindowAnswer, tables: Tables) => void} onWindow
 * @property {(text: string) => void} onReply what came of a button, or why a question was refused
 * @property {() => void} onAnswer after each answer
 * @property {() => void} onBeat twice a second, while awake
 */

export class Client {
  /**
   * @param {Channel} channel
   * @param {Handlers} handlers
   */
  constructor(channel, handlers) {
    this.channel = channel;
    this.handlers = handlers;
    this.id = Math.random().toString(36).slice(2);
    this.isAwake = false; // asleep while the view is out of sight: nothing is asked then
    this.isClosed = false;
    this.isAsking = false; // for news
    this.hasBegun = false; // some news has come
    this.askedAt = 0;
    this.answeredAt = performance.now();
    this.timer = 0;
    /** @type {MomentQuestion | null} */
    this.wanted = null; // asked next; of several only the last
    this.isWaiting = false; // for the answer to a question about a moment
    this.momentAt = 0; // when that was asked
    this.number = 0; // of that question
    /** @type {OnMessage} */
    this.onMessage = (answer, buffers) => {
      if (answer.view === this.id) this.receive(answer, buffers);
    };
    channel.on("msg:custom", this.onMessage);
  }

  /** Whether there is a kernel that owes an answer for long. */
  get isSilent() {
    return this.channel.isRecord !== true && performance.now() - this.answeredAt > SILENT_MS;
  }

  close() {
    this.isClosed = true;
    clearTimeout(this.timer);
    this.channel.off("msg:custom", this.onMessage);
    this.channel.send({ word: "bye", view: this.id });
  }

  /** @param {boolean} isAwake */
  wake(isAwake) {
    this.isAwake = isAwake;
    this.beat();
  }

  // -- asking

  /** Ask for news, while awake: the kernel answers as soon as there is some, but not too often. */
  beat() {
    clearTimeout(this.timer);
    if (this.isClosed || !this.isAwake) return;
    const now = performance.now();
    if (!this.isAsking || now - this.askedAt > ASK_AGAIN_MS) {
      this.isAsking = true;
      this.askedAt = now;
      this.channel.send({ word: "feed", view: this.id, wait: this.hasBegun });
    }
    this.handlers.onBeat();
    this.timer = setTimeout(() => { this.beat(); }, BEAT_MS);
  }

  /**
   * Ask for all ranks at a time.
   * @param {number} us
   */
  askAt(us) {
    this.want({ word: "at", t_us: us });
  }

  /**
   * Ask for all ranks some events after a moment's event; a negative number of events: before it.
   * @param {Moment} moment
   * @param {number} by
   */
  askBeside({ rank, seq }, by) {
    this.want({ word: "beside", rank, seq, by });
  }

  /** Ignore the answer to a pending question about a moment. */
  forgetMoment() {
    this.wanted = null;
    this.isWaiting = false;
    this.number += 1;
  }

  /**
   * Ask for all that happened in a part of time.
   * @param {number} number comes back with the answer
   * @param {number} from microseconds
   * @param {number} to
   */
  askWindow(number, from, to) {
    if (!this.isClosed) this.channel.send({ word: "window", view: this.id, number, from_us: from, to_us: to });
  }

  /**
   * Ask for what a button says.
   * @param {string} word
   * @param {string} argument
   */
  press(word, argument) {
    this.channel.send({ word: "press", view: this.id, button: word, argument });
  }

  /**
   * Ask one question about a moment at a time; of those asked meanwhile only the last is sent.
   * @param {MomentQuestion} question
   */
  want(question) {
    this.wanted = question;
    if (this.isWaiting && performance.now() - this.momentAt <= ASK_AGAIN_MS) return;
    this.isWaiting = false;
    this.sendWanted();
  }

  sendWanted() {
    if (this.isWaiting || !this.wanted) return;
    this.isWaiting = true;
    this.momentAt = performance.now();
    this.number += 1;
    this.channel.send({ ...this.wanted, view: this.id, number: this.number });
    this.wanted = null;
  }

  // -- answers

  /** @type {OnMessage} */
  receive(answer, buffers) {
    const { handlers } = this;
    this.answeredAt = performance.now();
    switch (answer.word) {
      case "feed":
        this.isAsking = false;
        this.hasBegun = true;
        this.beat(); // first: the kernel can already wait for the next data
        handlers.onNews(answer, unpack(answer.counts, sure(buffers[0])));
        break;
      case "moment": {
        if (answer.number !== this.number) break; // the cursor has moved on
        this.isWaiting = false;
        if (answer.moment) handlers.onMoment(answer.moment, this.wanted === null);
        this.sendWanted();
        break;
      }
      case "window": {
        const { number, from_us: from, to_us: to, exact: isExact } = answer;
        handlers.onWindow({ number, from, to, isExact }, unpack(answer.counts, sure(buffers[0])));
        break;
      }
      case "pressed":
      case "refused":
        handlers.onReply(answer.text);
        break;
    }
    handlers.onAnswer();
  }
}
