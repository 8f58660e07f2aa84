/** The active notebook and the ranks of its kernel: each notebook has its own model, awake while it is active. */
import { Dialog, type ISessionContext, showDialog } from "@jupyterlab/apputils";
import type { INotebookTracker, NotebookPanel } from "@jupyterlab/notebook";
import { ServerConnection } from "@jupyterlab/services";
import type { IDisposable } from "@lumino/disposable";
import { type ISignal, Signal } from "@lumino/signaling";

import { Client } from "./client";
import { Connection } from "./connection";
import { LOAD } from "./load";
import { PanelModel } from "./model";
import { type Attach, type PanelAnswer, type Start, TARGET } from "./protocol";
import { count, isCrowd } from "./words";

/** Milliseconds that a kernel may take to answer once it has loaded the workbench. */
const LOADED_MS = 20_000;

/** Milliseconds that a server that can be reached takes to answer, at most. */
const REACHED_MS = 4_000;

/** Whether the Jupyter server answers. */
async function isReachable(): Promise<boolean> {
  const settings = ServerConnection.makeSettings();
  const init = { signal: AbortSignal.timeout(REACHED_MS), cache: "no-store" as const };
  return ServerConnection.makeRequest(`${settings.baseUrl}api`, init, settings).then(
    () => true,
    () => false,
  );
}

/** One notebook, and the panel's side of its kernel. */
export class Followed implements IDisposable {
  readonly client: Client;
  readonly model: PanelModel;
  readonly #session: ISessionContext;
  readonly #connection: Connection;
  #isDisposed = false;

  constructor(session: ISessionContext, version: string) {
    this.client = new Client(version);
    this.model = new PanelModel(this.client);
    this.#session = session;
    this.#connection = new Connection(session, TARGET, {
      opened: (send) => {
        const kernel = session.session?.kernel;
        this.client.begin({
          send,
          isBusy: () => kernel?.status === "busy",
          isConnected: () => kernel?.connectionStatus === "connected",
          isReachable,
          reconnect: () => { this.reconnect(); },
        });
      },
      received: (data) => {
        this.client.receive(data as unknown as PanelAnswer);
      },
      lost: (why) => {
        this.client.away(why);
      },
    });
  }

  get isDisposed(): boolean {
    return this.#isDisposed;
  }

  dispose(): void {
    if (this.#isDisposed) return;
    this.#isDisposed = true;
    this.#connection.dispose();
    this.model.dispose();
    this.client.dispose();
  }

  /** Load the workbench in the kernel; `model.loadError` says why that failed. Returns whether the kernel answers. */
  async load(): Promise<boolean> {
    if (this.client.standing.kind === "live") return true;
    const kernel = this.#session.session?.kernel;
    if (!kernel) return false;
    const { content } = await kernel.requestExecute({ code: LOAD, store_history: false }).done;
    if (content.status === "error") {
      this.model.loadError = `${content.ename}: ${content.evalue}. Is fsdp-workbench installed where this kernel runs?`;
      return false;
    }
    this.#connection.open();
    return this.#answers();
  }

  /** Open the connection to the kernel again. */
  reconnect(): void {
    this.#connection.reconnect();
  }

  /** Start or attach ranks, after loading the workbench if needed; `isMeant` confirms it for the number of cores. */
  async start(command: Start | Attach, isMeant: (cores: number) => Promise<boolean>): Promise<boolean> {
    this.model.isStarting = true;
    try {
      if (!(await this.load())) return false;
      const { state } = this.model;
      return (state === null || (await isMeant(state.cluster.cores))) && (await this.model.do(command));
    } finally {
      this.model.isStarting = false;
    }
  }

  /** Whether the kernel answers, as soon as that is known. */
  #answers(): Promise<boolean> {
    return new Promise((resolve) => {
      const look = (): void => {
        if (this.model.state !== null || this.client.standing.kind === "refused") end(this.model.state !== null);
      };
      const end = (well: boolean): void => {
        clearTimeout(timer);
        this.model.changed.disconnect(look);
        resolve(well);
      };
      const timer = setTimeout(() => {
        end(false);
      }, LOADED_MS);
      this.model.changed.connect(look);
      look();
    });
  }
}

/** Ask for confirmation if there are too many ranks for the cores. */
async function isCrowdMeant(command: Start | Attach, cores: number): Promise<boolean> {
  if (command.word !== "start" || command.engines || command.profile || !isCrowd(command.num_ranks ?? 0, cores)) return true;
  const { button } = await showDialog({
    title: `Start ${count(command.num_ranks ?? 0, "rank")} on ${count(cores, "core")}?`,
    body: "They share the cores: the start may take minutes or fail.",
    buttons: [Dialog.cancelButton(), Dialog.warnButton({ label: "Start" })],
    defaultButton: 0, // Enter, which submits the form, must not confirm it
  });
  return button.accept;
}

/** Follows the active notebook. */
export class Notebooks implements IDisposable {
  readonly #tracker: INotebookTracker;
  readonly #version: string;
  readonly #changed = new Signal<this, void>(this);
  readonly #none: PanelModel;
  readonly #followed = new Map<NotebookPanel, Followed>();
  #current: NotebookPanel | null = null;
  #isLookedAt = true;
  #restMs = 0;
  #isDisposed = false;

  constructor(tracker: INotebookTracker, version: string) {
    this.#tracker = tracker;
    this.#version = version;
    this.#none = new PanelModel(new Client(version));
    tracker.currentChanged.connect(this.#onCurrent, this);
    this.#onCurrent();
  }

  get isDisposed(): boolean {
    return this.#isDisposed;
  }

  dispose(): void {
    this.#isDisposed = true;
    Signal.disconnectReceiver(this);
    for (const followed of this.#followed.values()) followed.dispose();
    this.#followed.clear();
    Signal.clearData(this);
  }

  /** Another notebook is followed, or the followed one has changed. */
  get changed(): ISignal<this, void> {
    return this.#changed;
  }

  /** The followed notebook; null: none. */
  get panel(): NotebookPanel | null {
    return this.#current;
  }

  get current(): Followed | null {
    return this.#current === null ? null : (this.#followed.get(this.#current) ?? null);
  }

  /** The model of the followed notebook; without one, a model that says so. */
  get model(): PanelModel {
    return this.current?.model ?? this.#none;
  }

  /** Whether the page is visible. */
  set isLookedAt(isLookedAt: boolean) {
    this.#isLookedAt = isLookedAt;
    this.#wake();
  }

  /** Minimum milliseconds from one state to the next. */
  set restMs(restMs: number) {
    this.#restMs = restMs;
    this.#wake();
  }

  /** Follow a notebook, as when one of its tabs is in front. */
  follow(panel: NotebookPanel | null): void {
    if (panel !== null && !this.#followed.has(panel)) {
      const followed = new Followed(panel.sessionContext, this.#version);
      followed.model.changed.connect(this.#tell, this);
      this.#followed.set(panel, followed);
      panel.disposed.connect(this.#onDisposed, this);
    }
    this.#current = panel;
    this.#wake();
    this.#tell();
  }

  /** Start or attach ranks of the followed notebook; many more than cores only after confirmation. */
  async start(command: Start | Attach): Promise<boolean> {
    return (await this.current?.start(command, async (cores) => isCrowdMeant(command, cores))) ?? false;
  }

  #onCurrent(): void {
    this.follow(this.#tracker.currentWidget);
  }

  #onDisposed(panel: NotebookPanel): void {
    this.#followed.get(panel)?.dispose();
    this.#followed.delete(panel);
    if (this.#current === panel) this.#current = null;
    this.#tell();
  }

  #wake(): void {
    for (const [panel, { client }] of this.#followed) {
      client.restMs = this.#restMs;
      client.isAwake = this.#isLookedAt && panel === this.#current;
    }
  }

  #tell(): void {
    if (!this.#isDisposed) this.#changed.emit();
  }
}
