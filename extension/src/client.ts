/**
 * The panel's side of the protocol: asks the kernel, dispatches its answers, and polls its state while awake.
 *
 * It is independent of Jupyter: a channel is anything that carries messages. A missing answer is noticed after
 * SILENT_MS, reported, and requested again, so that a lost message, a laptop asleep or a kernel too busy to answer
 * never leaves an old state on the screen as if it were current.
 */
import { type IDisposable } from "@lumino/disposable";
import { type ISignal, Signal } from "@lumino/signaling";

import { type PanelAnswer, type PanelQuestion, type State, VERSION, type Welcome } from "./protocol";

/** Milliseconds without an answer after which the kernel counts as silent; it answers a `look` within a second. */
export const SILENT_MS = 1_800;

/** Questions in a row without an answer after which the kernel is more than slow: about ten seconds. */
export const MANY_SILENCES = 6;

/** Questions without an answer after which a socket is opened anew, since the server answers again: about nine seconds. */
export const MORE_SILENCES = 5;

/** Carries messages to the kernel; those from the kernel go to `Client.receive`. */
export interface Channel {
  send(question: PanelQuestion): void;
  /** Whether the kernel runs something, so that it may answer late. */
  readonly isBusy?: () => boolean;
  /** Whether messages reach the kernel now; JupyterLab reopens a lost socket. */
  readonly isConnected?: () => boolean;
  /** Whether the server answers at all: where a network loses everything, a socket stays open for minutes. */
  readonly isReachable?: () => Promise<boolean>;
  /** Open the connection to the kernel again. */
  readonly reconnect?: () => void;
}

/** State of the connection between panel and kernel. */
export type Standing =
  | { readonly kind: "away"; readonly why: Away; readonly text: string }
  | { readonly kind: "opening" }
  | { readonly kind: "refused"; readonly text: string }
  | { readonly kind: "live" }
  | { readonly kind: "silent"; readonly why: "cut" | "unreachable" | "busy" | "slow" | "lost" };

/** Why there is no kernel to ask. */
export type Away = "no notebook" | "no kernel" | "not loaded" | "restarting" | "dead" | "cut" | "connecting";

type WithoutNumber<T> = T extends { number: number } ? Omit<T, "number"> : never;

/** A question; it gets its number when it is sent. */
export type Asked = WithoutNumber<PanelQuestion>;

/** The answers that have a word, by that word. */
export type AnswerOf<W extends PanelAnswer["word"]> = Extract<PanelAnswer, { word: W }>;

/** Why a question without an answer was given up after the connection was lost for a while. */
export const LOST = "The connection was lost before the kernel answered. %fsdp output says how it ended.";

/** A question was refused, or its answer can no longer arrive. */
export class Refusal extends Error {}

interface Waiting {
  readonly word: PanelQuestion["word"];
  readonly resolve: (answer: PanelAnswer) => void;
  readonly reject: (why: Refusal) => void;
}

export class Client implements IDisposable {
  readonly #extension: string;
  readonly #standingChanged = new Signal<this, Standing>(this);
  readonly #stateChanged = new Signal<this, State>(this);
  readonly #waiting = new Map<number, Waiting>();
  #channel: Channel | null = null;
  #standing: Standing = { kind: "away", why: "no notebook", text: "" };
  #number = 0;
  #look = -1; // number of the pending `look`
  #silences = 0; // questions in a row
  #isUnreachable = false;
  #isAsking = false; // whether the server answers
  #reconnectAt = Infinity; // number of silences
  #doubted = -1; // number of the newest question whose answer may be lost
  #calm = 0; // states in a row, since then, of ranks that do nothing
  #timer: ReturnType<typeof setTimeout> | undefined;
  #restMs = 0;
  #isAwake = true;
  #isDisposed = false;

  /** @param extension - version of the JupyterLab extension. */
  constructor(extension: string) {
    this.#extension = extension;
  }

  get standing(): Standing {
    return this.#standing;
  }

  get standingChanged(): ISignal<this, Standing> {
    return this.#standingChanged;
  }

  /** A state has arrived. If it has no `units`, those of the state before still hold, as the protocol says. */
  get stateChanged(): ISignal<this, State> {
    return this.#stateChanged;
  }

  get isDisposed(): boolean {
    return this.#isDisposed;
  }

  dispose(): void {
    this.away("no notebook");
    this.#isDisposed = true;
    Signal.clearData(this);
  }

  /** Begin with a newly opened channel. */
  begin(channel: Channel): void {
    this.#end();
    this.#channel = channel;
    this.#stand({ kind: "opening" });
    this.ask<"welcome">({ word: "hello", version: VERSION, extension: this.#extension }).then(
      (welcome) => {
        if (this.#channel === channel) this.#welcomed(welcome);
      },
      () => undefined, // the channel is gone, which was reported
    );
  }

  /** Drop the channel: there is no kernel to ask. */
  away(why: Away, text = ""): void {
    this.#end();
    this.#stand({ kind: "away", why, text });
  }

  /** Handle a message from the kernel. */
  receive(answer: PanelAnswer): void {
    const waiting = this.#waiting.get(answer.number);
    this.#waiting.delete(answer.number);
    if (answer.word === "state") this.#took(answer);
    if (waiting === undefined) return; // no longer waited for
    if (answer.word === "refused") waiting.reject(new Refusal(answer.text));
    else waiting.resolve(answer);
  }

  /** Ask and return the answer; rejects with a Refusal. */
  async ask<W extends PanelAnswer["word"]>(question: Asked): Promise<AnswerOf<W>> {
    return new Promise((resolve, reject) => {
      const number = this.#send(question);
      if (number < 0) reject(new Refusal("No kernel answers."));
      else this.#waiting.set(number, { word: question.word, resolve: resolve as (answer: PanelAnswer) => void, reject });
    });
  }

  /** Set the minimum milliseconds from a state to the question for the next one. */
  set restMs(restMs: number) {
    this.#restMs = restMs;
  }

  /** Sleep while the panel is out of sight: ask nothing then, and everything again on waking. */
  set isAwake(isAwake: boolean) {
    if (isAwake === this.#isAwake) return;
    this.#isAwake = isAwake;
    clearTimeout(this.#timer);
    if (isAwake) this.refresh();
  }

  /** Ask for everything, now. */
  refresh(): void {
    if (this.#isAwake && (this.#standing.kind === "live" || this.#standing.kind === "silent")) this.#askState(false);
  }

  #welcomed(welcome: Welcome): void {
    if (welcome.problem) {
      this.#stand({ kind: "refused", text: welcome.problem });
      return;
    }
    this.#stand({ kind: "live" });
    this.refresh();
  }

  #took(state: State): void {
    if (state.number !== this.#look) return; // an older one arrived late
    clearTimeout(this.#timer);
    this.#look = -1;
    this.#silences = 0;
    if (this.#standing.kind === "silent" && ["cut", "unreachable", "lost"].includes(this.#standing.why)) {
      this.#doubted = this.#number;
      this.#calm = 0;
    }
    this.#isUnreachable = false;
    this.#reconnectAt = Infinity;
    this.#stand({ kind: "live" });
    this.#stateChanged.emit(state);
    this.#giveUpLost(state);
    if (this.#isAwake) this.#timer = setTimeout(() => { this.#askState(true); }, this.#restMs);
  }

  /** Give up the questions from before a cut, whose answers follow an event of the ranks, once there is none any more. */
  #giveUpLost({ request, cluster }: State): void {
    if (this.#doubted < 0) return;
    this.#calm = request === null && cluster.exchange === "" ? this.#calm + 1 : 0;
    if (this.#calm < 2) return;
    const lost = [...this.#waiting].filter(([number]) => number <= this.#doubted);
    this.#doubted = -1;
    for (const [number, { reject }] of lost) {
      this.#waiting.delete(number);
      reject(new Refusal(LOST));
    }
  }

  #askState(wait: boolean): void {
    clearTimeout(this.#timer);
    this.#look = this.#send({ word: "look", wait });
    if (this.#look < 0) return;
    this.#timer = setTimeout(() => {
      this.#silences += 1;
      if (this.#silences > 1) void this.#askServer(this.#channel);
      this.#stand({ kind: "silent", why: this.#whySilent() });
      this.#askState(false);
    }, SILENT_MS);
  }

  /**
   * Find out whether the server answers. If it does again, the socket to the kernel may bring what was sent meanwhile,
   * such as the end of a cell; or never notice, and is then opened anew.
   */
  async #askServer(channel: Channel | null): Promise<void> {
    if (this.#isAsking || channel?.isReachable === undefined) return;
    this.#isAsking = true;
    const isReachable = await channel.isReachable();
    this.#isAsking = false;
    if (channel !== this.#channel || this.#standing.kind !== "silent") return;
    if (!isReachable) this.#reconnectAt = Infinity;
    else if (this.#isUnreachable) this.#reconnectAt = this.#silences + MORE_SILENCES;
    this.#isUnreachable = !isReachable;
    if (this.#silences >= this.#reconnectAt) {
      this.#reconnectAt = Infinity;
      channel.reconnect?.();
    }
    this.#stand({ kind: "silent", why: this.#whySilent() });
  }

  #whySilent(): "cut" | "unreachable" | "busy" | "slow" | "lost" {
    if (this.#isUnreachable) return "unreachable";
    if (this.#channel?.isConnected?.() === false || this.#reconnectAt < Infinity) return "cut";
    if (this.#channel?.isBusy?.() === true) return "busy";
    return this.#silences < MANY_SILENCES ? "slow" : "lost";
  }

  #send(question: Asked): number {
    if (this.#channel === null) return -1;
    this.#number += 1;
    try {
      this.#channel.send({ ...question, number: this.#number });
    } catch {
      return -1; // closed meanwhile, which its owner reports
    }
    return this.#number;
  }

  #end(): void {
    clearTimeout(this.#timer);
    this.#channel = null;
    this.#look = this.#doubted = -1;
    this.#isUnreachable = false;
    this.#reconnectAt = Infinity;
    const waiting = [...this.#waiting.values()];
    this.#waiting.clear();
    for (const { word, reject } of waiting) reject(new Refusal(`The kernel ended before it answered (${word}).`));
  }

  #stand(standing: Standing): void {
    if (JSON.stringify(standing) === JSON.stringify(this.#standing)) return;
    this.#standing = standing;
    this.#standingChanged.emit(standing);
  }
}
