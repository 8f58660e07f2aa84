/** The dashboard beside a notebook: the widget's program over a comm of its own, in a tab. */
import type { INotebookTracker } from "@jupyterlab/notebook";
import type { JSONValue } from "@lumino/coreutils";
import type { Message } from "@lumino/messaging";
import { Signal } from "@lumino/signaling";
import { Widget } from "@lumino/widgets";

import type { Channel, OnMessage } from "../../workbench/widgets/static/client.js";
import type { Away } from "./client";
import { Connection, type Listener } from "./connection";
import {
  type InitialState,
  type RankHealth,
  TARGET,
  VERSION,
  type ViewAnswer,
  type ViewQuestion,
  type Welcome,
} from "./protocol";
import { closedWords } from "./words";

type Send = (data: object) => void;

/** Loads the workbench in the kernel of the followed notebook; returns why that failed, else an empty text. */
export type Load = () => Promise<string>;

const WHY: Readonly<Record<Exclude<Away, "no notebook">, string>> = {
  "no kernel": "has no kernel.",
  "not loaded": "has not loaded the workbench yet.",
  restarting: "is restarting its kernel\u2026",
  dead: "has a kernel that died.",
  cut: "has lost its connection to the kernel, and JupyterLab does not reopen it.",
  connecting: "is connecting to its kernel\u2026",
};

/** Reasons for which the ranks are gone as well. */
const ENDS_RANKS: ReadonlySet<Away> = new Set(["no kernel", "not loaded", "restarting", "dead"]);

/** The channel that the widget's program needs, over a comm instead of ipywidgets. */
class CommChannel implements Channel {
  readonly #about: InitialState;
  readonly #calls = new Set<OnMessage>();

  constructor(
    about: InitialState,
    readonly send: (question: ViewQuestion) => void,
  ) {
    this.#about = about;
  }

  get(): InitialState {
    return this.#about;
  }

  on(_event: "msg:custom", call: OnMessage): void {
    this.#calls.add(call);
  }

  off(_event: "msg:custom", call: OnMessage): void {
    this.#calls.delete(call);
  }

  receive(answer: ViewAnswer, buffers: DataView[]): void {
    for (const call of this.#calls) call(answer, buffers);
  }
}

export class DashboardWidget extends Widget implements Listener {
  readonly #notebooks: INotebookTracker;
  readonly #sentence = document.createElement("p");
  readonly #button = document.createElement("button");
  readonly #extension: string;
  readonly #load: Load;
  readonly #box = document.createElement("div");
  #path: string;
  #numRanks = 0; // alive, as the kernel last reported
  #connection: Connection | null = null;
  #send: Send = () => undefined;
  #model: CommChannel | null = null;
  #unrender: () => void = () => undefined;

  /** @param extension - version of the JupyterLab extension. */
  constructor(notebooks: INotebookTracker, path: string, load: Load, extension: string) {
    super();
    this.#extension = extension;
    this.#load = load;
    this.#notebooks = notebooks;
    this.#path = path;
    this.addClass("fsdp-Dashboard");
    this.#sentence.setAttribute("role", "status");
    this.#button.className = "jp-mod-styled jp-mod-accept";
    this.node.append(this.#sentence, this.#button, this.#box);
    this.lost("no notebook");
    notebooks.widgetAdded.connect(this.#find, this);
    this.#find();
  }

  /** Path of the notebook whose ranks are shown. */
  get path(): string {
    return this.#path;
  }

  opened(send: Send): void {
    this.#send = send;
    send({ word: "hello", number: 0, version: VERSION, extension: this.#extension });
  }

  received(data: JSONValue, buffers: readonly (ArrayBuffer | ArrayBufferView)[]): void {
    const message = data as unknown as Welcome | ViewAnswer;
    if (message.word === "welcome") {
      if (message.problem) this.#sentence.textContent = message.problem;
      else void this.#render(message.dashboard);
      return;
    }
    if (message.word === "feed") this.#numRanks = numAlive(message.health);
    this.#model?.receive(message, buffers.map(viewOf));
  }

  lost(why: Away): void {
    this.#end();
    if (ENDS_RANKS.has(why)) this.#numRanks = 0;
    this.#sentence.textContent = why === "no notebook" ? closedWords(this.#path, this.#numRanks) : `${this.#path} ${WHY[why]}`;
    const isCut = why === "cut";
    this.#button.hidden = !isCut && why !== "not loaded";
    this.#button.disabled = false;
    this.#button.textContent = isCut ? "Reconnect" : "Load the workbench";
    this.#button.onclick = isCut ? () => this.#connection?.reconnect() : () => void this.#loads();
  }

  async #loads(): Promise<void> {
    this.#button.disabled = true;
    const why = await this.#load();
    this.#button.disabled = false;
    if (why !== "" && this.#model === null) this.#sentence.textContent = why;
  }

  override dispose(): void {
    if (this.isDisposed) return;
    this.#connection?.dispose();
    this.#end();
    Signal.disconnectReceiver(this);
    super.dispose();
  }

  protected override onActivateRequest(message: Message): void {
    super.onActivateRequest(message);
    this.node.querySelector<HTMLElement>(".fw-dashboard")?.focus();
  }

  async #render(about: InitialState): Promise<void> {
    const { default: program } = await import("../../workbench/widgets/static/dashboard.js");
    if (this.isDisposed) return;
    this.#end();
    this.#model = new CommChannel(about, (data) => {
      if (this.#model !== null) this.#send(data);
    });
    this.#sentence.textContent = "";
    this.#button.hidden = true;
    this.#unrender = program.render({ model: this.#model, el: this.#box });
  }

  #end(): void {
    this.#model = null; // drop its messages from now on
    this.#unrender();
    this.#unrender = () => undefined;
  }

  /** Connect to the notebook once it is open. */
  #find(): void {
    if (this.#connection !== null) return;
    const panel = this.#notebooks.find(({ context }) => context.path === this.#path);
    if (panel === undefined) return;
    this.#connection = new Connection(panel.sessionContext, TARGET, this);
    panel.context.pathChanged.connect(this.#onPath, this);
    panel.disposed.connect(this.#onClosed, this);
  }

  #onPath(_context: unknown, path: string): void {
    this.#path = path;
  }

  #onClosed(): void {
    this.#connection?.dispose();
    this.#connection = null;
    if (!this.isDisposed) this.lost("no notebook");
  }
}

function numAlive(health: readonly RankHealth[]): number {
  return health.reduce((sum, { ranks, state }) => sum + (state === "gone" ? 0 : ranks.length), 0);
}

function viewOf(buffer: ArrayBuffer | ArrayBufferView): DataView {
  return ArrayBuffer.isView(buffer)
    ? new DataView(buffer.buffer, buffer.byteOffset, buffer.byteLength)
    : new DataView(buffer);
}
