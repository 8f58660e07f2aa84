/**
 * A comm with the kernel of one notebook, reopened whenever possible.
 *
 * A kernel that does not know the target closes the comm: the extension is not loaded there. The comm is tried again
 * after each execution, as only that can load it. A restart ends comms without a message. JupyterLab never reopens a
 * socket that was closed on purpose (1000, 1001), nor one that it could not open after several tries: the listener is
 * notified, and `reconnect` opens it.
 */
import type { ISessionContext } from "@jupyterlab/apputils";
import type { Kernel, KernelMessage } from "@jupyterlab/services";
import type { JSONValue } from "@lumino/coreutils";
import type { IDisposable } from "@lumino/disposable";
import { Signal } from "@lumino/signaling";

import type { Away } from "./client";

/** Receives the events of a connection. */
export interface Listener {
  /** A comm was opened; whether the kernel answers is not known yet. */
  opened(send: (data: object) => void): void;
  /** A message has arrived. */
  received(data: JSONValue, buffers: readonly (ArrayBuffer | ArrayBufferView)[]): void;
  /** There is no comm now. */
  lost(why: Away): void;
}

const GONE: Partial<Record<Kernel.Status, Away>> = {
  restarting: "restarting",
  autorestarting: "restarting",
  terminating: "no kernel",
  dead: "dead",
};

export class Connection implements IDisposable {
  readonly #session: ISessionContext;
  readonly #target: string;
  readonly #listener: Listener;
  #kernel: Kernel.IKernelConnection | null = null;
  #comm: Kernel.IComm | null = null;
  #tries = 0;
  #isNew = false; // the kernel has restarted and was not asked yet
  #isCut = false; // the socket is closed for good; messages sent meanwhile are lost
  #isDisposed = false;

  constructor(session: ISessionContext, target: string, listener: Listener) {
    this.#session = session;
    this.#target = target;
    this.#listener = listener;
    session.kernelChanged.connect(this.#take, this);
    session.disposed.connect(() => {
      this.dispose();
    }, this);
    this.#take();
    void session.ready.then(() => {
      if (!this.#isDisposed && this.#kernel === null) this.#take();
    });
  }

  get isDisposed(): boolean {
    return this.#isDisposed;
  }

  dispose(): void {
    if (this.#isDisposed) return;
    this.#isDisposed = true;
    this.#leave();
    Signal.clearData(this);
    Signal.disconnectReceiver(this);
  }

  /** Open a comm if there is none. */
  open(): void {
    if (this.#comm === null) void this.#open();
  }

  /** Reopen the socket to the kernel, for everything in this page that uses it. */
  reconnect(): void {
    this.#kernel?.reconnect().catch(() => undefined); // the status reports the result
  }

  #take(): void {
    this.#leave();
    this.#isCut = false;
    this.#kernel = this.#session.session?.kernel ?? null;
    if (this.#kernel === null) {
      this.#listener.lost(this.#session.isReady ? "no kernel" : "connecting"); // of a page that was just loaded
      return;
    }
    this.#kernel.statusChanged.connect(this.#onStatus, this);
    this.#kernel.connectionStatusChanged.connect(this.#onSocket, this);
    this.#kernel.iopubMessage.connect(this.#onMessage, this);
    this.open();
  }

  #leave(): void {
    this.#kernel?.statusChanged.disconnect(this.#onStatus, this);
    this.#kernel?.connectionStatusChanged.disconnect(this.#onSocket, this);
    this.#kernel?.iopubMessage.disconnect(this.#onMessage, this);
    this.#close();
    this.#kernel = null;
  }

  /** Drop the comm and notify the kernel. */
  #close(): void {
    const comm = this.#drop();
    if (comm !== null && this.#kernel?.isDisposed === false && !comm.isDisposed) comm.close();
  }

  #drop(): Kernel.IComm | null {
    const comm = this.#comm;
    this.#comm = null;
    this.#tries += 1;
    if (comm !== null) comm.onClose = comm.onMsg = () => undefined;
    return comm;
  }

  async #open(): Promise<void> {
    const kernel = this.#kernel;
    if (kernel === null) return;
    this.#tries += 1;
    const mine = this.#tries;
    const isMine = (): boolean => mine === this.#tries && !kernel.isDisposed;
    let comm: Kernel.IComm | null = null;
    try {
      await kernel.info;
      if (!isMine()) return;
      this.#comm = comm = kernel.createComm(this.#target);
      await hasSubshell(kernel, comm);
    } catch {
      if (isMine()) this.#comm = null; // the kernel has restarted, which its status reports
      return;
    }
    if (isMine()) this.#use(comm);
    else if (!comm.isDisposed) comm.dispose();
  }

  #use(comm: Kernel.IComm): void {
    comm.onMsg = ({ content, buffers }) => {
      this.#listener.received(content.data, buffers ?? []);
    };
    comm.onClose = () => {
      if (this.#comm !== comm) return;
      this.#drop();
      this.#listener.lost("not loaded");
    };
    comm.open();
    this.#listener.opened((data) => {
      comm.send(data as JSONValue);
    });
  }

  #onStatus(_: Kernel.IKernelConnection, status: Kernel.Status): void {
    const why = GONE[status];
    if (why !== undefined) {
      this.#isNew = true;
      this.#drop();
      this.#listener.lost(why);
    } else if (status === "idle" && this.#isNew) {
      this.#isNew = false;
      this.open();
    }
  }

  #onSocket(kernel: Kernel.IKernelConnection, status: Kernel.ConnectionStatus): void {
    if (kernel.isDisposed || kernel.status === "dead") return; // reported elsewhere, as a new kernel is
    if (status === "disconnected") {
      this.#isCut = true;
      this.#listener.lost("cut");
    } else if (this.#isCut && status === "connecting") {
      this.#listener.lost("connecting");
    } else if (this.#isCut) {
      this.#isCut = false;
      this.#close();
      this.open();
    }
  }

  #onMessage(_: Kernel.IKernelConnection, { header, parent_header, content }: KernelMessage.IIOPubMessage): void {
    const hasRun =
      header.msg_type === "status" &&
      "msg_type" in parent_header &&
      parent_header.msg_type === "execute_request" &&
      (content as { execution_state?: string }).execution_state === "idle";
    if (hasRun) this.open();
  }
}

/** Wait for the thread that serves a comm while a cell runs; without it a question waits for the end of the cell. */
async function hasSubshell(kernel: Kernel.IKernelConnection, comm: Kernel.IComm): Promise<void> {
  if (kernel.supportsSubshells && "subshellStarted" in comm) await comm.subshellStarted;
}
