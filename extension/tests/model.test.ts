import { beforeEach, describe, expect, it, vi } from "vitest";

import { Client } from "../src/client";
import { MAX_SPOKEN, PanelModel } from "../src/model";
import type { PanelAnswer, Command, PanelQuestion, CommandOutput, UnitInfo } from "../src/protocol";
import { ANSWERS } from "./answers";
import { cluster, state, unit } from "./told";

type Unnumbered<T> = T extends { number: number } ? Omit<T, "number"> : never;
type Reply = Unnumbered<PanelAnswer>;

beforeEach(() => {
  vi.useFakeTimers();
});

/** A model and a kernel that answers at once what `replies` says for a word, and nothing to the rest. */
async function beginning(replies: Partial<Record<PanelQuestion["word"], Reply>> = {}): Promise<{
  model: PanelModel;
  client: Client;
  asked: PanelQuestion[];
  settle: () => Promise<unknown>;
}> {
  const client = new Client("0.2.0");
  const model = new PanelModel(client);
  const asked: PanelQuestion[] = [];
  const all: Partial<Record<PanelQuestion["word"], Reply>> = {
    hello: ANSWERS.welcome,
    look: state(),
    ...replies,
  };
  const settle = (): Promise<unknown> => vi.advanceTimersByTimeAsync(0);
  client.begin({
    send: (question) => {
      asked.push(question);
      const reply = all[question.word];
      if (reply === undefined || ("wait" in question && question.wait)) return;
      queueMicrotask(() => {
        client.receive({ ...reply, number: question.number });
      });
    },
  });
  await settle();
  return { model, client, asked, settle };
}

describe("a command", () => {
  const { said, line } = ANSWERS;
  const step: Command = { word: "step", count: 3 };

  it("is remembered with its line and what came of it", async () => {
    const { model } = await beginning({ do: said, spell: line });
    const done = model.do(step);
    expect(model.spoken[0]).toMatchObject({ outcome: "runs" });
    await vi.advanceTimersByTimeAsync(0);
    expect(await done).toBe(true);
    expect(model.spoken).toEqual([expect.objectContaining({ line: said.line, text: said.text, outcome: "done" })]);
  });

  it("shows its line while it still runs", async () => {
    const { model, settle } = await beginning({ spell: line });
    void model.do(step);
    await settle();
    expect(model.spoken[0]).toMatchObject({ line: line.line, outcome: "runs" });
  });

  it("is sent as the line that was typed, for the kernel to parse", async () => {
    const { model, asked, settle } = await beginning({ do: said });
    void model.do("explain rank 1");
    expect(model.spoken[0]?.line).toBe("%fsdp explain \u2026");
    await settle();
    expect(asked).toContainEqual(expect.objectContaining({ word: "do", command: "explain rank 1" }));
  });

  it("that fails says why", async () => {
    const { model } = await beginning({ do: { ...said, text: "No step function.", is_error: true } });
    const done = model.do(step);
    await vi.advanceTimersByTimeAsync(0);
    expect(await done).toBe(false);
    expect(model.spoken[0]).toMatchObject({ text: "No step function.", outcome: "failed" });
  });

  it("is not left running when its kernel goes", async () => {
    const { model, client } = await beginning();
    const done = model.do(step);
    client.away("restarting");
    expect(await done).toBe(false);
    expect(model.spoken[0]?.outcome).toBe("failed");
  });

  it("is forgotten after many others", async () => {
    const { model, settle } = await beginning({ do: said });
    for (let k = 0; k < MAX_SPOKEN + 5; k += 1) void model.do(step);
    await settle();
    expect(model.spoken).toHaveLength(MAX_SPOKEN);
  });
});

describe("the reply under the buttons", () => {
  const { said } = ANSWERS;
  const shard: Command = { word: "shard", model: "model" };

  /** Have a command done whose answer is `reply`; returns what is told. */
  async function after(command: Command | string, reply: Partial<CommandOutput>): Promise<PanelModel> {
    const { model, settle } = await beginning({ do: { ...said, ...reply } });
    void model.do(command);
    await settle();
    return model;
  }

  it("is that of the newest command, until it is closed or another one begins", async () => {
    const model = await after(shard, { line: "%fsdp shard model", text: "sharded" });
    expect(model.reply).toEqual({ line: "%fsdp shard model", text: "sharded", isBad: false });
    void model.do(shard);
    expect(model.reply).toBeNull();
    await vi.advanceTimersByTimeAsync(0);
    model.reply = null;
    expect(model.reply).toBeNull();
  });

  it("is a failure of whatever command", async () => {
    const model = await after({ word: "step" }, { text: "no step function", is_error: true });
    expect(model.reply).toMatchObject({ text: "no step function", isBad: true });
  });

  it("is nothing where the state says what came of it", async () => {
    expect((await after({ word: "pause" }, {})).reply).toBeNull();
    expect((await after("run train.py", {})).reply).toBeNull();
    expect((await after("run train.py", { text: "no script", is_error: true })).reply).toMatchObject({ text: "no script" });
  });

  it("says how what went on in the background has ended, and nothing of what a cell did", async () => {
    const behind = { ...ANSWERS.state.request, in_background: true };
    const ended = { count: 1, line: "%fsdp step 40", text: "NameError: x", is_error: true };
    const { model, client, asked, settle } = await beginning({ look: state({ request: behind }) });
    const tell = async (more: Parameters<typeof state>[0]): Promise<void> => {
      await vi.advanceTimersByTimeAsync(1);
      client.receive(state({ number: asked.findLast(({ word }) => word === "look")?.number ?? 0, ...more }));
      await settle();
    };
    await tell({ request: null, ended });
    expect(model.reply).toEqual({ line: "%fsdp step 40", text: "NameError: x", isBad: true });
    await tell({ request: null, ended: { ...ended, count: 2 } });
    expect(model.reply?.isBad).toBe(true); // a cell failed
    await tell({ request: null, ended: { ...ended, count: 3, is_error: false } });
    expect(model.reply).toBeNull(); // the failure is over
    await tell({ request: null, ended: { ...ended, count: 4 } });
    expect(model.reply).toBeNull();
  });

  it("says how its own run has ended, even if that was between two states, and of other commands what they answered", async () => {
    for (const [command, word] of [[{ word: "run", script: "a.py" }, "run"], [{ word: "lint" }, "lint"]] as const) {
      const line = `%fsdp ${word} it`;
      const { model, client, asked, settle } = await beginning({ do: { ...ANSWERS.said, line, text: "" } });
      await model.do(command);
      await vi.advanceTimersByTimeAsync(1);
      const number = asked.findLast((one) => one.word === "look")?.number ?? 0;
      client.receive(state({ number, request: null, ended: { count: 9, line, text: "over", is_error: false } }));
      await settle();
      expect(model.reply?.text).toBe(word === "run" ? "over" : undefined);
    }
  });
});

it("a reply that ranks can only be viewed goes when they are free", async () => {
  const { model, client, asked, settle } = await beginning({ do: ANSWERS.said });
  void model.do({ word: "attach" });
  await settle();
  expect(model.reply).not.toBeNull();
  client.refresh();
  const look = asked.findLast(({ word }) => word === "look");
  client.receive(state({ number: look?.number ?? 0, cluster: cluster({ held_by: "ada's notebook", is_free: true }) }));
  expect(model.reply).toBeNull();
});

describe("an abort", () => {
  it("is being done until its answer comes", async () => {
    const { model, client, asked, settle } = await beginning();
    void model.do({ word: "abort" });
    expect(model.isGivingUp).toBe(true);
    const question = asked.findLast(({ word }) => word === "do");
    client.receive({ ...ANSWERS.said, number: question?.number ?? 0 });
    await settle();
    expect(model.isGivingUp).toBe(false);
  });
});

describe("the state", () => {
  it("keeps the units that are not told again", async () => {
    const { model, client, asked, settle } = await beginning({ look: state({ units: [unit(0, "(root)")] }) });
    await settle();
    const question = asked.findLast(({ word }) => word === "look");
    client.receive(state({ number: question?.number ?? 0, units: null }));
    expect(model.units.map(({ name }) => name)).toEqual(["(root)"]);
  });

  it("is gone with its kernel: nothing old is shown", async () => {
    const { model, client } = await beginning({ look: state({ units: [unit(0, "(root)")] }) });
    expect(model.state).not.toBeNull();
    client.away("restarting");
    expect(model.state).toBeNull();
    expect(model.units).toEqual([]);
    expect(model.models).toEqual([]);
  });

  it("has models looked for when ranks are there, and again when something has ended", async () => {
    const { client, asked, settle } = await beginning();
    const found = (): number => asked.filter(({ word }) => word === "find models").length;
    expect(found()).toBe(1);
    client.refresh();
    await settle();
    expect(found()).toBe(1);
    const question = asked.findLast(({ word }) => word === "look");
    client.refresh();
    client.receive(
      state({
        number: (question?.number ?? 0) + 1,
        ended: ANSWERS.state.ended,
      }),
    );
    expect(found()).toBe(2);
  });
});

describe("the models", () => {
  const { models, refused } = ANSWERS;

  it("are not missing while no rank has answered: they are looked for, and asked for again", async () => {
    const { model, client, asked, settle } = await beginning();
    const search = (): PanelQuestion | undefined => asked.findLast(({ word }) => word === "find models");
    const first = search();
    expect(model.prepared).toMatchObject({ isKnown: false, hasModel: false });
    expect(model.modelsText).toBe("");
    client.receive({ ...refused, number: first?.number ?? 0 });
    await settle();
    expect(model.prepared.isKnown).toBe(false);
    expect(model.modelsText).toBe(refused.text);
    client.refresh();
    client.receive(state({ number: asked.findLast(({ word }) => word === "look")?.number ?? 0 }));
    const second = search();
    expect(second).not.toBe(first);
    client.receive({ ...models, number: second?.number ?? 0 });
    await settle();
    expect(model.prepared).toMatchObject({ isKnown: true, hasModel: true });
    expect(model.modelsText).toBe("");
  });

  it("stay where ranks do not answer for once, and go with the ranks", async () => {
    const { model, client, asked, settle } = await beginning({ "find models": models });
    await settle();
    expect(model.models).toHaveLength(1);
    const again = model.findModels();
    const question = asked.findLast(({ word }) => word === "find models");
    client.receive({ ...refused, number: question?.number ?? 0 });
    await again;
    expect(model.models).toHaveLength(1);
    client.refresh();
    const look = asked.findLast(({ word }) => word === "look");
    client.receive(state({ number: look?.number ?? 0, cluster: cluster({ is_running: false }) }));
    expect(model.models).toEqual([]);
    expect(model.prepared.isKnown).toBe(false);
  });
});

describe("a preview", () => {
  it("is that of the last question, whatever comes later", async () => {
    const { model, client, asked, settle } = await beginning();
    const answer = (number: number, line: string): void => {
      client.receive({ ...ANSWERS.preview, number, line });
    };
    void model.try({ word: "shard", model: "one" });
    void model.try({ word: "shard", model: "two" });
    const [one, two] = asked.filter(({ word }) => word === "try").map(({ number }) => number);
    answer(two ?? 0, "two");
    answer(one ?? 0, "one");
    await settle();
    expect(model.preview?.line).toBe("two");
  });

  it("that is refused says so in its place", async () => {
    const { model } = await beginning({ try: ANSWERS.refused });
    void model.try({ word: "shard", model: "model" });
    await vi.advanceTimersByTimeAsync(0);
    expect(model.preview?.problem).toBe(ANSWERS.refused.text);
  });
});

describe("a unit", () => {
  it("is opened with its parameters, and closed again", async () => {
    const { model, settle } = await beginning({ "find params": ANSWERS.params });
    void model.toggle(0);
    expect(model.opened.get(0)).toBeNull();
    await settle();
    expect(model.opened.get(0)).toEqual(ANSWERS.params.params);
    void model.toggle(0);
    expect(model.opened.has(0)).toBe(false);
  });

  it("stays open while it changes, and closes when another has its number", async () => {
    const before = unit(0, "blocks.0");
    const { model, client, asked, settle } = await beginning({
      look: state({ units: [before] }),
      "find params": ANSWERS.params,
    });
    const receive = async (units: readonly UnitInfo[]): Promise<void> => {
      client.refresh();
      const question = asked.findLast(({ word }) => word === "look");
      client.receive(state({ number: question?.number ?? 0, units }));
      await settle();
    };
    void model.toggle(0);
    await settle();
    await receive([{ ...before, reshard_after_forward: "false" }]);
    expect(model.opened.get(0)).toEqual(ANSWERS.params.params);
    expect(asked.filter(({ word }) => word === "find params").length).toBe(2);
    await receive([unit(0, "layers.0")]);
    expect(model.opened.has(0)).toBe(false);
  });
});

describe("output", () => {
  const tail = ANSWERS.lines;
  const asks = (asked: readonly PanelQuestion[]): readonly PanelQuestion[] => asked.filter(({ word }) => word === "output");

  it("is asked for only while it is shown, and once for each change", async () => {
    const { model, client, asked, settle } = await beginning({ output: tail });
    expect([asks(asked), model.output.tail]).toEqual([[], null]);
    const end = model.output.watch();
    await settle();
    expect([asks(asked).length, model.output.tail?.lines]).toEqual([1, tail.lines]);
    const look = asked.findLast(({ word }) => word === "look")?.number ?? -1;
    client.receive(state({ number: look })); // nothing new
    await settle();
    expect(asks(asked)).toHaveLength(1);
    end();
    model.output.rank = 1;
    expect(asks(asked)).toHaveLength(1);
  });

  it("is that of the chosen rank", async () => {
    const { model, asked, settle } = await beginning({ output: tail });
    model.output.watch();
    model.output.rank = 1;
    await settle();
    expect(asks(asked)).toEqual([expect.objectContaining({ rank: null }), expect.objectContaining({ rank: 1 })]);
    expect(model.output.tail).toEqual(expect.objectContaining({ lines: tail.lines }));
  });

  it("is forgotten with its kernel", async () => {
    const { model, client, settle } = await beginning({ output: tail });
    model.output.watch();
    await settle();
    client.away("dead");
    expect([model.output.tail, model.output.rank]).toEqual([null, null]);
  });
});
