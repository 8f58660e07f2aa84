import { describe, expect, it } from "vitest";

import {
  announcement,
  asOf,
  can,
  closedWords,
  commonState,
  crowding,
  exchanging,
  explained,
  headline,
  heldAtRest,
  isTable,
  lies,
  nameInUnit,
  obstacles,
  originOf,
  pathOf,
  piecesOf,
  ranges,
  statesOf,
  statusLine,
  tree,
  unitsIn,
  wordOf,
} from "../src/words";
import { ANSWERS } from "./answers";
import { cluster, rank, state, STEP, unit } from "./told";

const STOPPED = { ...STEP, is_stopped: true, stop: "2 ranks stopped before all-gather of blocks.2, step 11", reasons: ["breakpoint 1"] };

describe("the word of a command", () => {
  it("is that of its data, or the first one of its line", () => {
    expect([wordOf({ word: "step" }), wordOf("explain rank 1"), wordOf("explain")]).toEqual(["step", "explain", "explain"]);
  });
});

describe("the tree of units", () => {
  it("has modules inside modules, and their units in the order told", () => {
    const [root] = tree([unit(0, "(root)"), unit(1, "blocks.0"), unit(2, "blocks.1"), unit(3, "head")]);
    expect(root?.unit?.index).toBe(0);
    expect(root?.children.map(({ label }) => label)).toEqual(["blocks", "head"]);
    expect(root?.children[0]?.unit).toBeNull();
    expect(root?.children[0]?.children.map(({ label, place }) => [label, place])).toEqual([
      ["0", 1],
      ["1", 2],
    ]);
    expect(root === undefined ? [] : unitsIn(root).map(({ place }) => place)).toEqual([0, 1, 2, 3]);
  });

  it("joins a module with the only thing in it", () => {
    const [root] = tree([unit(0, "(root)"), unit(1, "encoder.layers.0")]);
    expect(root?.children.map(({ label, children }) => [label, children.length])).toEqual([["encoder.layers.0", 0]]);
  });

  it("does not join a unit with what is inside it", () => {
    const [root] = tree([unit(0, "(root)"), unit(1, "block"), unit(2, "block.mlp")]);
    expect(root?.children[0]?.label).toBe("block");
    expect(root?.children[0]?.children[0]?.label).toBe("mlp");
  });

  it("has a root for each model, with keys of its own", () => {
    const roots = tree([unit(0, "(root)"), unit(1, "a"), unit(5, "(root)", { root: 5 }), unit(6, "a", { root: 5 })]);
    expect(roots).toHaveLength(2);
    const keys = roots.flatMap(unitsIn).map(({ key }) => key);
    expect(new Set(keys).size).toBe(4);
  });

  it("shows a root that is no unit itself", () => {
    const [root] = tree([unit(1, "a", { root: 9 }), unit(2, "b", { root: 9 })]);
    expect(root?.unit).toBeNull();
    expect(root?.children).toHaveLength(2);
  });
});

describe("what a line calls a unit", () => {
  const found = ANSWERS.models.models[0];
  const models = [{ ...found, name: "other", units: [5, 6] }, { ...found, units: [0, 1, 2] }];

  it("begins with the variable of its model", () => {
    expect(pathOf(unit(1, "blocks.0", { is_flat: false }), models)).toBe("model.blocks.0");
    expect(pathOf(unit(6, "blocks.0", { root: 5, is_flat: false }), models)).toBe("other.blocks.0");
  });

  it("is for the root that of the model, and for a call on several modules that of the first", () => {
    expect(pathOf(unit(0, "(root)"), models)).toBe("model");
    expect(pathOf(unit(2, "embed, head", { is_flat: false }), models)).toBe("model.embed");
    expect(pathOf(unit(1, "blocks.0", { is_flat: true }), models)).toBe("model"); // it has one strategy for all
  });

  it("is not there for a model that no variable holds", () => {
    expect(pathOf(unit(9, "blocks.0"), models)).toBeNull();
  });
});

describe("states of units", () => {
  const told = state({
    unit_states: [
      { ranks: [0, 1, 2], states: "02" },
      { ranks: [3], states: "22" },
    ],
  });

  it("are told for each group of ranks, and the most frequent is shown", () => {
    expect(statesOf(told, 0)).toEqual([0, 2]);
    expect(commonState(told, 0)).toBe(0);
    expect(commonState(told, 1)).toBe(2);
  });

  it("are unknown where nothing was told", () => {
    expect(statesOf(told, 7)).toEqual([-1, -1]);
    expect(commonState(told, 7)).toBeUndefined();
    expect(commonState(null, 0)).toBeUndefined();
  });
});

const SLURM = "Stop the ranks, then start them again, as ipyparallel's SlurmEngineSetLauncher starts all of them as one job.";
const GONE = rank(1, { health: "gone", where: "died: ended by signal 9" });

describe("what can be done", () => {
  it.each([
    ["without ranks nothing", null, [false, false, false, false]],
    ["idle ranks can step", state(), [true, false, false, false]],
    ["running ranks can be paused and given up", state({ request: STEP }), [false, true, false, true]],
    ["stopped ranks can go on or be given up", state({ request: STOPPED }), [false, false, true, true]],
    ["with a rank gone there is no step", state({ ranks: [rank(0), GONE] }), [false, false, false, false]],
    ["with a rank gone no step goes on", state({ ranks: [rank(0), GONE], request: STOPPED }), [false, false, false, true]],
  ])("%s", (_name, told, wanted) => {
    const { step, pause, goOn, abort } = can(told);
    expect([step, pause, goOn, abort]).toEqual(wanted);
  });
});

describe("a control that cannot be used", () => {
  const prepared = { isKnown: true, hasModel: true, isSharded: true, hasStep: true };

  it.each([
    ["without a kernel", null, prepared, "No ranks are running: start some first."],
    ["without ranks", state({ cluster: cluster({ is_running: false }) }), prepared, "No ranks are running: start some first."],
    ["before they have said what they have", state(), { ...prepared, isKnown: false, hasModel: false, hasStep: false }, "Looking for models\u2026"],
    ["without a model", state(), { ...prepared, hasModel: false, isSharded: false, hasStep: false }, "Define a model in a %%fsdp cell, and run the cell."],
    ["before it is sharded", state(), { ...prepared, isSharded: false }, "Choose below how to shard the model."],
    ["without a function", state(), { ...prepared, hasStep: false }, "Define train_step() in a %%fsdp cell, with an optimizer, and run the cell."],
    ["while a step runs", state({ request: STEP }), prepared, "%fsdp step 40 is still running."],
    ["while it is stopped", state({ request: STOPPED }), prepared, "%fsdp step 40 is stopped: continue or abort it first."],
    ["with a rank gone", state({ ranks: [rank(0), GONE] }), prepared, "rank 1 is gone: replace what is gone, or stop the ranks."],
    ["of another notebook", state({ cluster: cluster({ held_by: "ada's notebook" }) }), prepared, "ada's notebook controls these ranks."],
    ["when nothing is missing", state(), prepared, ""],
  ])("says why there is no step %s", (_name, told, has, wanted) => {
    expect(obstacles(told, has).step).toBe(wanted);
    expect(obstacles(told, has).lint).toBe(wanted.includes("train_step") ? "" : wanted); // it runs nothing
    expect(can(told, has).step).toBe(wanted === "");
  });

  it("says why nothing can be paused, continued or given up", () => {
    const { pause, goOn, abort } = obstacles(state());
    expect([pause, goOn, abort]).toEqual(["Nothing is running.", "Nothing is running.", "Nothing is running."]);
    expect(obstacles(state({ request: STEP })).goOn).toBe("The ranks are not stopped: pause them first.");
    expect(obstacles(state({ request: STOPPED })).pause).toBe("The ranks are stopped already.");
  });
});

describe("starting and stopping", () => {
  it.each([
    ["with ranks they can be stopped", state(), [false, true]],
    ["without ranks some can be started", state({ cluster: cluster({ is_running: false }) }), [true, false]],
    ["before anything was told some can be started", null, [true, false]],
    ["while ranks end none can be started", state({ cluster: cluster({ is_running: false, exchange: "stop" }) }), [false, false]],
    ["while ranks start no others can be", state({ cluster: cluster({ is_running: false, exchange: "start" }) }), [false, false]],
    ["nor can these be stopped yet", state({ cluster: cluster({ exchange: "start" }) }), [false, false]],
    ["while a file is opened none can be started", state({ cluster: cluster({ is_running: false, exchange: "open" }) }), [false, false]],
  ])("%s", (_name, told, wanted) => {
    const { start, stop } = can(told);
    expect([start, stop]).toEqual(wanted);
  });

  it.each([
    ["what was started here is not left", {}, [true, false]],
    ["what was attached can be left or stopped", { outlives: true }, [true, true]],
    ["what another notebook has can be looked at no more", { outlives: true, held_by: "the notebook of ada" }, [false, true]],
    ["nothing can while ranks are exchanged", { outlives: true, exchange: "stop" as const }, [false, false]],
  ])("%s", (_name, changed, wanted) => {
    const { stop, detach } = can(state({ cluster: cluster(changed) }));
    expect([stop, detach]).toEqual(wanted);
    expect(can(state({ cluster: cluster(changed), request: STEP })).detach).toBe(false);
  });

  it.each([
    ["", /^$/],
    ["start", /^Starting or attaching ranks\.$/],
    ["stop", /ranks are stopping/],
    ["open", /file is being opened/],
  ] as const)("says why they cannot: %j", (exchange, wanted) => {
    expect(exchanging(state({ cluster: cluster({ exchange }) }))).toMatch(wanted);
  });
});

it.each([
  [[0, 1, 2, 5], 11, "0-2, 5 \u00b7 step 11"],
  [[3], null, "3"],
  [[], null, ""],
])("a line of ranks %j in step %j is headed %j", (ranks, step, wanted) => {
  expect(originOf({ ...ANSWERS.lines.lines[0], ranks, step })).toBe(wanted);
});

describe("a rank that is gone", () => {
  const ranks = [rank(0), GONE], slurm = cluster({ one_job: "ipyparallel's SlurmEngineSetLauncher" });

  it.each([
    ["is replaced", { ranks }, "", "Replace what is gone, or stop the ranks."],
    ["is not, while others run", { ranks, request: STEP }, "%fsdp step 40 is still running.", "Abort what still runs first."],
    ["is not, while it is being replaced", { ranks, cluster: cluster({ exchange: "start" }) }, "Starting or attaching ranks.", "Replace what is gone, or stop the ranks."],
    ["is not, if all are gone", { ranks: [GONE] }, "Stop the ranks, then start them again.", "Stop the ranks, then start them again."],
    ["is not, in one job", { ranks, cluster: slurm }, SLURM, SLURM],
    ["is not, for another notebook", { ranks, cluster: cluster({ held_by: "ada" }) }, "ada controls these ranks.", "Replace what is gone, or stop the ranks."],
    ["is nowhere", {}, "All ranks run.", undefined],
  ])("%s", (_name, more, why, advice) => {
    const found = state(more);
    expect([obstacles(found).heal, headline(found).todo]).toEqual([why, advice]);
    expect(can(found).heal).toBe(why === "");
  });
});

describe("the headline", () => {
  it("says first which rank is gone, even while others are stopped", () => {
    expect(headline(state({ ranks: [rank(0), GONE], request: STOPPED }))).toEqual({
      tone: "bad",
      text: "rank 1 died: ended by signal 9",
      todo: "Abort what still runs first.",
    });
    const killed = [2, 3].map((number) => rank(number, { health: "gone", where: "died: killed" }));
    expect(headline(state({ ranks: [rank(0), GONE, ...killed] })).text).toBe("rank 1 died: ended by signal 9; ranks 2-3 died: killed");
  });

  it("says where and why ranks are stopped", () => {
    expect(headline(state({ request: STOPPED }))).toEqual({
      tone: "held",
      text: "2 ranks stopped before all-gather of blocks.2, step 11 (breakpoint 1)",
      short: "2 ranks stopped before all-gather of blocks.2 (breakpoint 1)",
    });
  });

  it.each([
    [[], "stands"],
    [["breakpoint 12: all_gather:blocks.2 --when 'num_bytes > 1e6'"], "stands (breakpoint 12)"],
    [["--until backward:blocks.2"], "stands (--until)"],
    [["breakpoint 1: wait", "breakpoint 2: wait", "breakpoint 3"], "stands (breakpoint 1 and 2 more)"],
    [["breakpoint 1: optimizer --when nan", "rank 1: 3 of 8"], "stands (breakpoint 1: rank 1: 3 of 8)"],
  ] as const)("says in short which breakpoints hold them: %j", (reasons, wanted) => {
    expect(headline(state({ request: { ...STOPPED, stop: "stands", reasons } })).short).toBe(wanted);
  });

  it("says who has ranks that can only be looked at, and nothing can be done with", () => {
    const told = state({ cluster: cluster({ outlives: true, held_by: "the notebook of ada on node1" }) });
    expect(headline(told)).toEqual({
      tone: "plain",
      text: "View only: the notebook of ada on node1 controls these ranks.",
      todo: "To take control, detach there, then attach here.",
    });
    expect(can(told).step).toBe(false);
  });

  it("says that ranks which another notebook had are free", () => {
    const told = state({ cluster: cluster({ outlives: true, held_by: "the notebook of ada on node1", is_free: true }) });
    expect(headline(told).text).toBe("These ranks are free now.");
  });

  it("says that what was aborted is being given up, until it has ended", () => {
    expect(headline(state({ request: STEP }), true).text).toBe("Aborting %fsdp step 40\u2026");
    expect(announcement(state({ request: STEP }), true)).toBe("Aborting %fsdp step 40\u2026");
    expect(headline(state(), true).text).toBe("2 ranks, idle");
    const { cluster } = state();
    expect(headline(state({ fault: "random" })).text).toBe("2 ranks, idle, fault on");
    expect(headline(state({ fault: "straggler" })).text).toBe("2 ranks, idle, fault on: straggler");
    const healing = headline(state({ cluster: { ...cluster, exchange: "start" } }));
    expect(healing).toEqual({ tone: "busy", text: "2 ranks: one that died is being replaced" });
  });

  it("counts the steps that have ended", () => {
    expect(headline(state({ request: STEP })).text).toBe("%fsdp step 40: 11 of 40 steps");
  });
});

it.each([
  [-1, null, ""],
  [4, null, "as of step 4; press Layout again to refresh"],
  [5, STOPPED, "as of step 5, stopped inside it; press Layout again to refresh"],
])("a picture says that it shows step %d", (step, request, words) => {
  const now = state({ request });
  expect(asOf({ ...now, training: { ...now.training, step } }, "layout")).toBe(words);
});

describe("what a screen reader is told", () => {
  it("is how it goes, and not each step of it", () => {
    const first = announcement(state({ request: STEP }));
    expect(first).toBe("%fsdp step 40");
    expect(announcement(state({ request: { ...STEP, steps_done: 12 } }))).toBe(first);
  });

  it("is where ranks are stopped, and what to do about one that is gone", () => {
    expect(announcement(state({ request: STOPPED }))).toBe("2 ranks stopped before all-gather of blocks.2, step 11 (breakpoint 1)");
    expect(announcement(state({ ranks: [rank(0), GONE] }))).toMatch(/^rank 1 died.* Replace what is gone/);
  });
});

describe("the status line", () => {
  const training = { step: 12, loss: 2.30259, loss_step: 12, steps_per_s: 3.14159, tokens_per_s: null };

  it("has ranks, loss and steps a second", () => {
    expect(statusLine({ kind: "live" }, state({ training }))?.text).toBe("FSDP: 2 ranks \u00b7 loss 2.303 \u00b7 3.14 steps/s");
    expect(statusLine({ kind: "live" }, state({ training: { ...training, steps_per_s: 93_900 } }))?.text).toContain("93,900 steps/s");
    const small = { ...training, loss: 0.000003975 };
    expect(statusLine({ kind: "live" }, state({ training: small }))?.text).toContain("loss 3.975e-6 ");
  });

  it.each([
    ["nan", "NaN"],
    ["inf", "inf"],
    ["-inf", "-inf"],
  ] as const)("shows a loss of %s, which crosses as text", (loss, shown) => {
    const training = { step: 11, loss, loss_step: 11, steps_per_s: 2, tokens_per_s: null };
    expect(statusLine({ kind: "live" }, state({ training }))?.text).toContain(`loss ${shown} `);
  });

  it("is red where a rank is dead, and where nobody answers", () => {
    expect(statusLine({ kind: "live" }, state({ ranks: [rank(0, { health: "gone" })] }))?.tone).toBe("bad");
    expect(statusLine({ kind: "silent", why: "lost" }, state())?.tone).toBe("bad");
    expect(statusLine({ kind: "silent", why: "slow" }, state())?.tone).toBe("plain");
  });

  it("says of a kernel that runs something that it is busy", () => {
    const busy = { kind: "silent", why: "busy" } as const;
    expect(statusLine(busy, state())).toEqual({ tone: "plain", text: "FSDP: the kernel is busy" });
    expect(explained(busy, "").text).toMatch(/^The kernel is busy\./);
    expect(explained({ kind: "silent", why: "lost" }, "").text).toMatch(/^The kernel does not answer\./);
  });

  it("says of a socket that JupyterLab reopens that the connection is lost", () => {
    const cut = { kind: "silent", why: "cut" } as const;
    expect(statusLine(cut, state())).toEqual({ tone: "bad", text: "FSDP: connection lost" });
    expect(explained(cut, "").text).toContain("JupyterLab tries to reopen it. The panel shows its last state.");
    expect(explained(cut, "").action).toBe("reconnect");
  });

  it("says that the connection is lost for good, and the panel what to do", () => {
    const cut = { kind: "away", why: "cut", text: "" } as const;
    expect(statusLine(cut, null)).toEqual({ tone: "bad", text: "FSDP: connection lost" });
    expect(explained(cut, "").action).toBe("reconnect");
  });

  it("is nothing where there are no ranks", () => {
    expect(statusLine({ kind: "away", why: "not loaded", text: "" }, null)).toBeNull();
  });
});

describe("a reply", () => {
  it("has sentences, and facts that stand below each other", () => {
    const text = "model: 4 units on 2 ranks\n  units           (root), blocks.0\n  each rank keeps  1.58 MiB (50%)\nWait: then go on\n  a b\n  note  two words";
    expect(piecesOf(text)).toEqual([
      "model: 4 units on 2 ranks",
      [["units", "(root), blocks.0"], ["each rank keeps", "1.58 MiB (50%)"]],
      "Wait: then go on\n  a b",
      [["note", "two words"]],
    ]);
  });

  it.each(["done", "", "Traceback:\n    x = 1  # why\n  File 'a.py', line 3"])("%j has no facts", (text) => {
    expect(piecesOf(text)).toEqual([text]);
  });

  it("keeps the lines of a table with more columns", () => {
    expect(isTable("  rank 0  idle  3.2 MiB")).toBe(true);
    expect(isTable("2 ranks\n  units            (root)\n  each rank keeps  1.58 MiB")).toBe(false);
  });
});

it.each([
  [0, "a.ipynb is not open. Open it to see its ranks here."],
  [1, "a.ipynb is not open. Its rank keeps running while its kernel runs. Open it to see it here."],
  [8, "a.ipynb is not open. Its 8 ranks keep running while its kernel runs. Open it to see them here."],
])("of a notebook that was closed it is said that its %d ranks go on", (ranks, words) => {
  expect(closedWords("a.ipynb", ranks)).toBe(words);
});

it("a start says what it waits for", () => {
  const told = state({ cluster: cluster({ is_running: false, exchange: "start", waits_for: "starting 4 ranks, 12 s: importing torch" }) });
  expect(exchanging(told)).toBe("Starting 4 ranks, 12 s: importing torch.");
});

it.each([
  [2, 2, ""],
  [4, 2, "2 cores here: 4 ranks share them."],
  [9, 2, "2 cores here: 9 ranks share them, and the start may take minutes or fail."],
  [2, 1, "1 core here: 2 ranks share it."],
  [Number.NaN, 2, ""],
  [60, undefined, ""], // no kernel has said so yet
])("%s ranks on %s cores: %j", (ranks, cores, wanted) => {
  expect(crowding(ranks, cores)).toBe(wanted);
});

it("a parameter is called by what its unit does not have", () => {
  expect(nameInUnit("model.layers.0.q_proj.weight", unit(1, "model.layers.0"))).toBe("q_proj.weight");
  expect(nameInUnit("embed.weight", unit(0, "(root)"))).toBe("embed.weight");
  expect(nameInUnit("blocks.10.weight", unit(1, "blocks.1"))).toBe("blocks.10.weight");
});

it("ranks are counted in ranges", () => {
  expect(ranges([0, 1, 2, 5])).toBe("0-2, 5");
  expect(ranges([])).toBe("");
});

it("ranks that hold the same but for a few bytes are one entry beforehand, the others are not", () => {
  const held = (ranks: readonly number[], adam: number) => ({ ranks, params: 4096, grads: 4096, adam });
  const at = (...entries: ReturnType<typeof held>[]) => heldAtRest({ ...ANSWERS.preview, at_rest: entries });
  expect(at(held([0, 2], 8192), held([1], 8196))).toEqual([{ ranks: [0, 1, 2], params: "4.00 KiB", total: "16.0 KiB" }]);
  expect(at(held([0], 8192), held([1], 0)).map(({ ranks, total }) => [ranks, total])).toEqual([
    [[0], "16.0 KiB"],
    [[1], "8.00 KiB"],
  ]);
});

it("a parameter lies in shards of a flat one, or is kept by every rank", () => {
  const [param] = ANSWERS.params.params;
  expect(lies(param)).toBe("1.00 KiB of 2.00 KiB");
  const within = (...elements: number[]) => lies({ ...param, flat: "_flat_param", rows_per_rank: elements });
  expect([within(0, 4, 0), within(0, 4, 8), within(0, 0)]).toEqual(["in shard 1", "split over shards 1-2", "empty"]);
});
