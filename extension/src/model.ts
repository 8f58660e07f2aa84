/** What the panel shows and does: the state of one notebook's ranks, without any UI. */
import type { IDisposable } from "@lumino/disposable";
import { type ISignal, Signal } from "@lumino/signaling";

import { type Client, Refusal, type Standing } from "./client";
import type { Model, ParamInfo, Preview, Reshard, CommandOutput, Shard, State, UnitInfo } from "./protocol";
import { PrintedOutput } from "./printed_output";
import type { Wanted } from "./starting";
import { type Prepared, type Typed, wordOf } from "./words";

/** A command run from this panel, and its result. */
export interface Spoken {
  readonly key: number;
  /** The line to type; empty: not known yet. */
  readonly line: string;
  readonly text: string;
  readonly outcome: "runs" | "done" | "failed";
}

/** The newest reply, shown under the buttons until the next one arrives or the user closes it. */
export interface Reply {
  /** Line of its command; empty: the reply says why a button does nothing. */
  readonly line: string;
  readonly text: string;
  readonly isBad: boolean;
}

/** Commands whose result shows in the state of the ranks, if they did not fail. */
export const HEARD: ReadonlySet<string> = new Set(["step", "run", "pause", "next", "continue"]);

/** Maximum number of commands kept. */
export const MAX_SPOKEN = 30;

const UNCERTAIN = "The kernel ended before it reported the result.";

export class PanelModel implements IDisposable {
  readonly #client: Client;
  readonly #changed = new Signal<this, void>(this);
  #state: State | null = null;
  #units: readonly UnitInfo[] = [];
  #models: readonly Model[] = [];
  #modelsText = "";
  #hasStep: boolean | null = null; // whether the ranks have a step function; null: their names are not known
  #reply: Reply | null = null;
  #aborts = 0; // requested and not ended
  #isStarting = false;
  #numEnded: number | null = null;
  #wasBehind = false; // whether something was running in the background
  #preview: Preview | null = null;
  #tried = 0;
  #subject = "";
  #isAskedFor = false;
  #spoken: readonly Spoken[] = [];
  #key = 0;
  #opened: ReadonlyMap<number, readonly ParamInfo[] | null> = new Map();
  #loadError = "";
  /** What the ranks printed. */
  readonly output: PrintedOutput;
  /** Values typed into the form that starts ranks, which may vanish with the kernel; null: none yet. */
  wanted: Wanted | null = null;
  #seen = "";
  #isDisposed = false;

  constructor(client: Client) {
    this.#client = client;
    this.output = new PrintedOutput(client, () => { this.#tell(); });
    client.standingChanged.connect(this.#onStanding, this);
    client.stateChanged.connect(this.#onState, this);
  }

  get isDisposed(): boolean {
    return this.#isDisposed;
  }

  dispose(): void {
    this.#isDisposed = true;
    Signal.disconnectReceiver(this);
    Signal.clearData(this);
  }

  get changed(): ISignal<this, void> {
    return this.#changed;
  }

  get standing(): Standing {
    return this.#client.standing;
  }

  /** The newest state; null: there is none, or its kernel has gone. */
  get state(): State | null {
    return this.#state;
  }

  /** The units of all sharded models. */
  get units(): readonly UnitInfo[] {
    return this.#units;
  }

  /** The models on the ranks, as last found. */
  get models(): readonly Model[] {
    return this.#models;
  }

  /** Why no models are shown, a sentence; empty if some are, or the ranks have not been asked. */
  get modelsText(): string {
    return this.#modelsText;
  }

  /** What the ranks have of what a step needs. */
  get prepared(): Prepared {
    const hasModel = this.#models.length > 0, isSharded = this.#units.length > 0;
    return { isKnown: this.#hasStep !== null, hasModel, isSharded, hasStep: this.#hasStep === true };
  }

  /** The reply under the buttons; null: none. */
  get reply(): Reply | null {
    return this.#reply;
  }

  set reply(reply: Reply | null) {
    this.#reply = reply;
    this.#tell();
  }

  /** Whether an abort was requested and has not ended. */
  get isGivingUp(): boolean {
    return this.#aborts > 0;
  }

  /** Whether ranks are being started or attached from here, including loading the workbench. */
  get isStarting(): boolean {
    return this.#isStarting;
  }

  set isStarting(isStarting: boolean) {
    this.#isStarting = isStarting;
    this.#tell();
  }

  /** The preview of the last command tried. */
  get preview(): Preview | null {
    return this.#preview;
  }

  /** The model, or unit such as `model.blocks.2`, that the form shards; empty: the first model. */
  get subject(): string {
    return this.#subject;
  }

  set subject(name: string) {
    this.#subject = name;
    this.#tell();
  }

  /** Show the form for a model or a unit, and focus it. */
  askFor(name: string): void {
    this.#isAskedFor = true;
    this.subject = name;
  }

  /** Whether the form should take the focus; true once per request. */
  takeAskedFor(): boolean {
    const isAskedFor = this.#isAskedFor;
    this.#isAskedFor = false;
    return isAskedFor;
  }

  /** Commands run from this panel, newest first. */
  get spoken(): readonly Spoken[] {
    return this.#spoken;
  }

  /** Parameters of the open units; null while they are loading. */
  get opened(): ReadonlyMap<number, readonly ParamInfo[] | null> {
    return this.#opened;
  }

  /** Why the workbench could not be loaded; empty: it was not tried, or is loaded. */
  get loadError(): string {
    return this.#loadError;
  }

  set loadError(text: string) {
    this.#loadError = text;
    this.#tell();
  }

  /** Run a command and keep it with its result. Returns whether it succeeded. */
  async do(command: Typed): Promise<boolean> {
    return (await this.#say(command)) !== null;
  }

  /** Run a command that draws; returns the picture by MIME type, null if there is none. */
  async show(command: Typed): Promise<Readonly<Record<string, unknown>> | null> {
    const said = await this.#say(command, true);
    return (said?.data as Readonly<Record<string, unknown>> | null | undefined) ?? null;
  }

  /** Run a command; null if it failed. `isShown`: its output is shown elsewhere. */
  async #say(command: Typed, isShown = false): Promise<CommandOutput | null> {
    this.#key += 1;
    const key = this.#key;
    const word = wordOf(command);
    if (word === "abort") this.#aborts += 1;
    this.#reply = null;
    this.#remember({ key, line: `%fsdp ${word} \u2026`, text: "", outcome: "runs" });
    void this.line(command).then((line) => {
      if (line !== null) this.#amend(key, { line });
    });
    try {
      const said = await this.#client.ask<"said">({ word: "do", command });
      const { line, text, is_error: isBad } = said;
      if (isBad || (text !== "" && !HEARD.has(word) && !isShown)) this.#reply = { line, text, isBad };
      this.#amend(key, { line, text, outcome: isBad ? "failed" : "done" });
      return isBad ? null : said;
    } catch (error) {
      const text = error instanceof Refusal ? error.message : UNCERTAIN;
      this.#reply = { line: this.#spoken.find((one) => one.key === key)?.line ?? "", text, isBad: true };
      this.#amend(key, { text, outcome: "failed" });
      return null;
    } finally {
      if (word === "abort") this.#aborts -= 1;
    }
  }

  /** The line to type for a command; null: no kernel answers. */
  async line(command: Typed): Promise<string | null> {
    try {
      return (await this.#client.ask<"line">({ word: "spell", command })).line;
    } catch {
      return null;
    }
  }

  /** Find the models on the ranks. */
  async findModels(): Promise<void> {
    try {
      const { models, text, has_step: hasStep } = await this.#client.ask<"models">({ word: "find models" });
      this.#models = models;
      this.#hasStep = hasStep;
      this.#modelsText = text;
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      if (this.#state?.cluster.is_running !== true) return; // the ranks have gone meanwhile
      if (this.#models.length === 0) this.#modelsText = error.message;
      this.#seen = ""; // ask again with the next state
    }
    this.#tell();
  }

  /** Request the preview of a command; only the answer to the last such request is shown. */
  async try(command: Shard | Reshard | null): Promise<void> {
    this.#tried += 1;
    const mine = this.#tried;
    let preview: Preview | null = null;
    if (command !== null) {
      try {
        preview = await this.#client.ask<"preview">({ word: "try", command });
      } catch (error) {
        if (!(error instanceof Refusal)) throw error;
        preview = refused(error.message);
      }
    }
    if (mine !== this.#tried) return;
    this.#preview = preview;
    this.#tell();
  }

  /** Show or hide the parameters of a unit. */
  async toggle(unit: number): Promise<void> {
    const opened = new Map(this.#opened);
    if (!opened.delete(unit)) opened.set(unit, null);
    this.#opened = opened;
    this.#tell();
    if (opened.has(unit)) await this.#findParams(unit);
  }

  async #findParams(unit: number): Promise<void> {
    try {
      const { params } = await this.#client.ask<"params">({ word: "find params", unit });
      if (!this.#opened.has(unit)) return;
      this.#opened = new Map(this.#opened).set(unit, params);
    } catch {
      const opened = new Map(this.#opened);
      opened.delete(unit);
      this.#opened = opened;
    }
    this.#tell();
  }

  #onState(_: Client, state: State): void {
    const wasFree = this.#state?.cluster.is_free === true;
    this.#state = state;
    this.#loadError = "";
    this.#takeEnding(state);
    this.output.follow(state.output);
    if (state.units !== null) this.#takeUnits(state.units);
    const { cluster, ended, request } = state;
    if (!cluster.is_running) this.#forgetModels();
    if (cluster.is_free && !wasFree) this.#reply = null; // which may say that the ranks can only be viewed
    this.#tell();
    const seen = JSON.stringify([cluster.is_running, cluster.num_ranks, ended?.count, this.#units, request === null]);
    if (seen === this.#seen) return;
    this.#seen = seen;
    if (this.#reply?.line === "") this.#reply = null; // why a button was disabled, which may have changed
    if (cluster.is_running) void this.findModels(); // a cell may have made some
  }

  /** Show how a background command ended. The reply to `abort` reports aborted ones. */
  #takeEnding({ ended, request }: State): void {
    const numEnded = ended?.count ?? 0;
    const newest = this.#spoken[0]?.line;
    const isOwn = newest === ended?.line && HEARD.has(newest?.split(" ")[1] ?? ""); // may end between two states
    const wasSeen = this.#wasBehind || isOwn;
    const isLater = this.#numEnded !== null && numEnded > this.#numEnded, isNews = isLater && wasSeen;
    if (isNews && ended !== null && newest?.startsWith("%fsdp abort") !== true) {
      this.#reply = { line: ended.line, text: ended.text, isBad: ended.is_error };
    } else if (isLater && ended?.is_error === false && this.#reply?.isBad === true) {
      this.#reply = null; // a failure before a success is over
    }
    this.#numEnded = numEnded;
    this.#wasBehind = request?.in_background === true;
  }

  #takeUnits(units: readonly UnitInfo[]): void {
    if (JSON.stringify(units) === JSON.stringify(this.#units)) return;
    const names = new Map(this.#units.map(({ index, name }) => [index, name]));
    const kept = new Set(units.filter(({ index, name }) => names.get(index) === name).map(({ index }) => index));
    this.#units = units;
    // another record has other units; the parameters of the same units may be sharded differently now
    this.#opened = new Map([...this.#opened].filter(([unit]) => kept.has(unit)));
    for (const unit of this.#opened.keys()) void this.#findParams(unit);
  }

  #forgetModels(): void {
    this.#models = [];
    this.#modelsText = "";
    this.#hasStep = null;
  }

  #onStanding(_: Client, standing: Standing): void {
    if (standing.kind !== "live" && standing.kind !== "silent") {
      this.#state = null;
      this.#units = [];
      this.#forgetModels();
      this.#numEnded = null;
      this.#wasBehind = false;
      this.#preview = null;
      this.output.forget();
      this.#subject = "";
      this.#opened = new Map();
      this.#seen = "";
    }
    this.#tell();
  }

  #remember(spoken: Spoken): void {
    this.#spoken = [spoken, ...this.#spoken].slice(0, MAX_SPOKEN);
    this.#tell();
  }

  #amend(key: number, more: Partial<Spoken>): void {
    this.#spoken = this.#spoken.map((one) => (one.key === key ? { ...one, ...more } : one));
    this.#tell();
  }

  #tell(): void {
    if (!this.#isDisposed) this.#changed.emit();
  }
}

function refused(problem: string): Preview {
  return {
    word: "preview",
    number: -1,
    line: "",
    problem,
    units: [],
    bytes_unsharded: 0,
    bytes_ignored: 0,
    at_rest: [],
    sent: [],
    sent_bytes: 0,
  };
}
