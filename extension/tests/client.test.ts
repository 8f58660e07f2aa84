import { beforeEach, describe, expect, it, vi } from "vitest";

import { Client, LOST, MORE_SILENCES, Refusal, MANY_SILENCES, SILENT_MS } from "../src/client";
import { type PanelQuestion, type State, VERSION } from "../src/protocol";
import { ANSWERS } from "./answers";
import { state } from "./told";

beforeEach(() => {
  vi.useFakeTimers();
});

/** A fake kernel; the test sends its answers. */
class Kernel {
  readonly asked: PanelQuestion[] = [];
  readonly client = new Client("0.2.0");
  readonly states: State[] = [];
  isConnected = true;
  isReachable = true;
  reconnects = 0;

  constructor() {
    this.client.stateChanged.connect((_, told) => {
      this.states.push(told);
    });
  }

  get last(): PanelQuestion {
    const question = this.asked.at(-1);
    if (question === undefined) throw new Error("nothing was asked");
    return question;
  }

  begin(): void {
    this.client.begin({
      send: (question) => this.asked.push(question),
      isConnected: () => this.isConnected,
      isReachable: () => Promise.resolve(this.isReachable),
      reconnect: () => { this.reconnects += 1; },
    });
  }

  async welcome(problem = ""): Promise<void> {
    this.client.receive({ ...ANSWERS.welcome, number: this.last.number, problem });
    await vi.advanceTimersByTimeAsync(0);
  }

  tell(more: Partial<State> = {}): void {
    this.client.receive(state({ number: this.last.number, ...more }));
  }

  async live(): Promise<this> {
    this.begin();
    await this.welcome();
    this.tell();
    await vi.advanceTimersByTimeAsync(0);
    return this;
  }
}

describe("a client", () => {
  it("says hello first, with its versions, and looks once it is welcome", async () => {
    const kernel = new Kernel();
    kernel.begin();
    expect(kernel.asked).toEqual([{ word: "hello", number: 1, version: VERSION, extension: "0.2.0" }]);
    expect(kernel.client.standing.kind).toBe("opening");
    await kernel.welcome();
    expect(kernel.last).toMatchObject({ word: "look", wait: false });
    expect(kernel.client.standing.kind).toBe("live");
  });

  it("asks nothing of a kernel of another version, and says why", async () => {
    const kernel = new Kernel();
    kernel.begin();
    await kernel.welcome("The panel is of version 1, the workbench of version 2: reload the page.");
    expect(kernel.client.standing).toEqual({ kind: "refused", text: expect.stringContaining("reload the page") as string });
    await vi.advanceTimersByTimeAsync(60_000);
    expect(kernel.asked).toHaveLength(1);
  });

  it("waits for news after a state, and rests between", async () => {
    const kernel = new Kernel();
    kernel.client.restMs = 100;
    await kernel.live();
    expect(kernel.last).toMatchObject({ wait: false });
    await vi.advanceTimersByTimeAsync(100);
    expect(kernel.last).toMatchObject({ word: "look", wait: true });
    kernel.tell({ said: "news" });
    expect(kernel.states.map(({ said }) => said)).toEqual(["", "news"]);
  });

  it("notices silence, says it, and asks for everything until there is an answer", async () => {
    const kernel = await new Kernel().live();
    const before = kernel.asked.length;
    await vi.advanceTimersByTimeAsync(SILENT_MS);
    expect(kernel.client.standing).toEqual({ kind: "silent", why: "slow" });
    expect(kernel.last).toMatchObject({ wait: false });
    await vi.advanceTimersByTimeAsync((MANY_SILENCES - 1) * SILENT_MS);
    expect(kernel.asked.length).toBe(before + MANY_SILENCES);
    expect(kernel.client.standing).toEqual({ kind: "silent", why: "lost" });
    kernel.isConnected = false;
    await vi.advanceTimersByTimeAsync(SILENT_MS);
    expect(kernel.client.standing).toEqual({ kind: "silent", why: "cut" });
    kernel.tell();
    expect(kernel.client.standing.kind).toBe("live");
  });

  it("says that the server does not answer, and reconnects once it does", async () => {
    const kernel = await new Kernel().live();
    kernel.isReachable = false;
    await vi.advanceTimersByTimeAsync(2 * SILENT_MS);
    expect(kernel.client.standing).toEqual({ kind: "silent", why: "unreachable" });
    await vi.advanceTimersByTimeAsync(150_000);
    expect([kernel.client.standing, kernel.reconnects]).toEqual([{ kind: "silent", why: "unreachable" }, 0]);
    kernel.isReachable = true;
    await vi.advanceTimersByTimeAsync(MORE_SILENCES * SILENT_MS);
    expect([kernel.client.standing, kernel.reconnects]).toEqual([{ kind: "silent", why: "cut" }, 0]);
    await vi.advanceTimersByTimeAsync(2 * SILENT_MS);
    expect([kernel.client.standing, kernel.reconnects]).toEqual([{ kind: "silent", why: "lost" }, 1]);
    kernel.tell();
    expect(kernel.client.standing.kind).toBe("live");
  });

  it("gives up what it asked before a cut once the ranks do nothing", async () => {
    const kernel = await new Kernel().live();
    const lost = kernel.client.ask({ word: "output", rank: null });
    const failed = expect(lost).rejects.toEqual(new Refusal(LOST));
    kernel.isConnected = false;
    await vi.advanceTimersByTimeAsync(SILENT_MS);
    const { cluster } = state();
    const request = { line: "%fsdp step 9", is_stopped: false, stop: "", reasons: [], in_background: true, steps_done: 0, steps_total: 9 };
    const states = [{ request }, { cluster: { ...cluster, exchange: "start" as const } }, {}, {}];
    let isOver = false;
    void lost.catch(() => { isOver = true; });
    const over: boolean[] = [];
    for (const more of states) {
      kernel.tell(more);
      await vi.advanceTimersByTimeAsync(0);
      over.push(isOver);
    }
    expect(over).toEqual([false, false, false, true]);
    await failed;
    const kept = kernel.client.ask<"lines">({ word: "output", rank: null }); // asked since
    kernel.client.receive({ ...ANSWERS.lines, number: kernel.last.number });
    expect((await kept).word).toBe("lines");
  });

  it("takes no state that comes late for a new one", async () => {
    const kernel = await new Kernel().live();
    const late = kernel.last.number;
    await vi.advanceTimersByTimeAsync(SILENT_MS);
    kernel.client.receive(state({ number: late, said: "old" }));
    expect(kernel.states.map(({ said }) => said)).not.toContain("old");
    expect(kernel.client.standing.kind).toBe("silent");
  });

  it("asks nothing while it sleeps, and for everything when it wakes", async () => {
    const kernel = await new Kernel().live();
    kernel.client.isAwake = false;
    const before = kernel.asked.length;
    await vi.advanceTimersByTimeAsync(60_000);
    expect(kernel.asked).toHaveLength(before);
    expect(kernel.client.standing.kind).toBe("live");
    kernel.client.isAwake = true;
    expect(kernel.last).toMatchObject({ word: "look", wait: false });
  });

  it("gives each answer to who has asked, in any order", async () => {
    const { client, asked } = await new Kernel().live();
    const first = client.ask<"line">({ word: "spell", command: { word: "status" } });
    const second = client.ask<"line">({ word: "spell", command: { word: "stop" } });
    const [a, b] = asked.slice(-2).map(({ number }) => number);
    client.receive({ ...ANSWERS.line, number: b ?? 0, line: "%fsdp stop" });
    client.receive({ ...ANSWERS.line, number: a ?? 0, line: "%fsdp status" });
    expect([(await first).line, (await second).line]).toEqual(["%fsdp status", "%fsdp stop"]);
  });

  it("tells who has asked that the question was refused, or that nobody is there any more", async () => {
    const { client, asked } = await new Kernel().live();
    const refused = client.ask({ word: "recall" });
    client.receive({ ...ANSWERS.refused, number: asked.at(-1)?.number ?? 0 });
    await expect(refused).rejects.toThrow(ANSWERS.refused.text);
    const lost = client.ask({ word: "recall" });
    client.away("restarting");
    await expect(lost).rejects.toThrow(Refusal);
    await expect(client.ask({ word: "recall" })).rejects.toThrow("No kernel");
  });

  it("begins again after a restart, and forgets what it waited for", async () => {
    const kernel = await new Kernel().live();
    kernel.client.away("restarting");
    const before = kernel.asked.length;
    await vi.advanceTimersByTimeAsync(60_000);
    expect(kernel.asked).toHaveLength(before);
    expect(kernel.client.standing).toMatchObject({ kind: "away", why: "restarting" });
    await kernel.live();
    expect(kernel.client.standing.kind).toBe("live");
  });
});
