import type { ISessionContext } from "@jupyterlab/apputils";
import type { Kernel } from "@jupyterlab/services";
import { Signal } from "@lumino/signaling";
import { describe, expect, it } from "vitest";

import type { Away } from "../src/client";
import { Connection } from "../src/connection";

/** A comm of JupyterLab, as far as it is used; `close` is what the kernel says. */
class Comm {
  readonly sent: unknown[] = [];
  isOpen = false;
  isDisposed = false;
  onMsg: (message: unknown) => void = () => undefined;
  onClose: () => void = () => undefined;

  open(): void {
    this.isOpen = true;
  }

  send(data: unknown): void {
    this.sent.push(data);
  }

  close(): void {
    this.isDisposed = true;
  }

  dispose(): void {
    this.isDisposed = true;
  }
}

class FakeKernel {
  readonly statusChanged = new Signal<this, Kernel.Status>(this);
  readonly connectionStatusChanged = new Signal<this, Kernel.ConnectionStatus>(this);
  readonly iopubMessage = new Signal<this, unknown>(this);
  readonly info = Promise.resolve({});
  readonly comms: Comm[] = [];
  supportsSubshells = false;
  status: Kernel.Status = "idle";
  isDisposed = false;

  reconnect(): Promise<void> {
    this.connectionStatusChanged.emit("connecting");
    this.connectionStatusChanged.emit("connected");
    return Promise.resolve();
  }

  createComm(): Comm {
    const comm = new Comm();
    this.comms.push(comm);
    return comm;
  }

  get newest(): Comm | undefined {
    return this.comms.at(-1);
  }

  hasRun(type = "execute_request"): void {
    this.iopubMessage.emit({
      header: { msg_type: "status" },
      parent_header: { msg_type: type },
      content: { execution_state: "idle" },
    });
  }
}

class Session {
  readonly kernelChanged = new Signal<this, unknown>(this);
  readonly disposed = new Signal<this, void>(this);
  session: { kernel: FakeKernel } | null;
  isReady = true;
  ready = Promise.resolve();

  constructor(kernel: FakeKernel | null) {
    this.session = kernel === null ? null : { kernel };
  }
}

/** A connection to a kernel, and what it has told. */
function connected(kernel: FakeKernel | null, unready?: Partial<Session>): {
  session: Session;
  connection: Connection;
  told: (Away | "opened" | object)[];
  settle: () => Promise<void>;
} {
  const told: (Away | "opened" | object)[] = [];
  const session = Object.assign(new Session(kernel), unready);
  const connection = new Connection(session as unknown as ISessionContext, "target", {
    opened: () => told.push("opened"),
    received: (data) => told.push(data as object),
    lost: (why) => told.push(why),
  });
  return { session, connection, told, settle: () => new Promise((done) => setTimeout(done)) };
}

describe("a connection", () => {
  it("opens a comm and hands out what comes", async () => {
    const kernel = new FakeKernel();
    const { told, settle } = connected(kernel);
    await settle();
    expect(kernel.newest?.isOpen).toBe(true);
    kernel.newest?.onMsg({ content: { data: { word: "state" } } });
    expect(told).toEqual(["opened", { word: "state" }]);
  });

  it("says that there is no kernel, and opens when one comes", async () => {
    const { session, told, settle } = connected(null);
    await settle();
    expect(told.at(-1)).toBe("no kernel");
    session.session = { kernel: new FakeKernel() };
    session.kernelChanged.emit({});
    await settle();
    expect(told.at(-1)).toBe("opened");
  });

  it("says in a page that was just loaded that it connects, until it is known whether there is a kernel", async () => {
    let find = (): void => undefined;
    const ready = new Promise<void>((resolve) => { find = resolve; });
    const { session, told, settle } = connected(null, { isReady: false, ready });
    expect(told).toEqual(["connecting"]);
    session.isReady = true;
    find();
    await settle();
    expect(told).toEqual(["connecting", "no kernel"]);
  });

  it("tries again when something was run, and not because it has tried", async () => {
    const kernel = new FakeKernel();
    const { told, settle } = connected(kernel);
    await settle();
    kernel.newest?.onClose(); // the kernel knows no such target
    expect(told.at(-1)).toBe("not loaded");
    kernel.hasRun("comm_open");
    await settle();
    expect(kernel.comms).toHaveLength(1);
    kernel.hasRun();
    await settle();
    expect(kernel.comms).toHaveLength(2);
    expect(told.at(-1)).toBe("opened");
    kernel.hasRun();
    await settle();
    expect(kernel.comms).toHaveLength(2); // it is open
  });

  it.each([
    ["restarting", "restarting"],
    ["autorestarting", "restarting"],
    ["dead", "dead"],
  ] as const)("is lost when the kernel is %s, and hears no more of the old one", async (status, why) => {
    const kernel = new FakeKernel();
    const { told, settle } = connected(kernel);
    await settle();
    const old = kernel.newest;
    kernel.statusChanged.emit(status);
    old?.onMsg({ content: { data: { word: "state" } } });
    expect(told).toEqual(["opened", why]);
  });

  it("asks a restarted kernel once, when it is idle", async () => {
    const kernel = new FakeKernel();
    const { settle } = connected(kernel);
    await settle();
    kernel.statusChanged.emit("restarting");
    kernel.statusChanged.emit("starting");
    kernel.statusChanged.emit("idle");
    await settle();
    expect(kernel.comms).toHaveLength(2);
    kernel.newest?.onClose();
    kernel.statusChanged.emit("busy");
    kernel.statusChanged.emit("idle");
    await settle();
    expect(kernel.comms).toHaveLength(2);
  });

  it("that loses its kernel while it opens leaves nothing open", async () => {
    const kernel = new FakeKernel();
    const { told, settle } = connected(kernel);
    kernel.statusChanged.emit("restarting");
    await settle();
    expect(kernel.comms.every(({ isOpen }) => !isOpen)).toBe(true);
    expect(told).toEqual(["restarting"]);
  });

  it("whose socket is never opened again says so, and opens another comm when it was opened after all", async () => {
    const kernel = new FakeKernel();
    const { connection, told, settle } = connected(kernel);
    await settle();
    const old = kernel.newest;
    kernel.connectionStatusChanged.emit("disconnected");
    expect(told).toEqual(["opened", "cut"]);
    connection.reconnect();
    await settle();
    expect(told).toEqual(["opened", "cut", "connecting", "opened"]);
    expect(old?.isDisposed).toBe(true); // nothing is left of it in the kernel
    expect(kernel.comms).toHaveLength(2);
  });

  it("goes on over a socket that JupyterLab has opened again by itself", async () => {
    const kernel = new FakeKernel();
    const { told, settle } = connected(kernel);
    await settle();
    kernel.connectionStatusChanged.emit("connecting");
    kernel.connectionStatusChanged.emit("connected");
    await settle();
    expect(told).toEqual(["opened"]);
    expect(kernel.comms).toHaveLength(1);
  });

  it("to a kernel that has died or gone says nothing of its socket", async () => {
    const kernel = new FakeKernel();
    const { told, settle } = connected(kernel);
    await settle();
    kernel.status = "dead";
    kernel.connectionStatusChanged.emit("disconnected");
    kernel.status = "idle";
    kernel.isDisposed = true;
    kernel.connectionStatusChanged.emit("disconnected");
    expect(told).toEqual(["opened"]);
  });

  it("closes its comm when it ends, and with its notebook", async () => {
    const kernel = new FakeKernel();
    const { connection, session, told, settle } = connected(kernel);
    await settle();
    session.disposed.emit();
    expect(connection.isDisposed).toBe(true);
    expect(kernel.newest?.isDisposed).toBe(true);
    kernel.hasRun();
    await settle();
    expect(told).toEqual(["opened"]);
    expect(kernel.comms).toHaveLength(1);
  });
});
