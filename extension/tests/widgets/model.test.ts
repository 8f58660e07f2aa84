import { beforeEach, describe, expect, it, vi } from "vitest";

import { Cursor } from "../../../workbench/widgets/static/cursor.js";
import type { FeedUpdate, Moment, RankHealth } from "../../../workbench/widgets/static/messages";
import { RunModel } from "../../../workbench/widgets/static/model.js";
import { announcement, badge, changeTable, dotted, headline, highestPeak, memoryEntries, peakWords, rankLines, stepNumber, unshardedWords } from "../../../workbench/widgets/static/words.js";
import { health, moment, news, ranksAt, steps, tables } from "./made";

/** A model that has taken some news, one after the other. */
function told(...parts: readonly (Partial<FeedUpdate> & { tables?: Parameters<typeof tables>[0] })[]): RunModel {
  const model = new RunModel();
  for (const { tables: given, ...more } of parts) {
    const found = tables(given);
    model.take(news({ counts: found.counts, ...more }), found.tables);
  }
  return model;
}

const MEMORY = { memory: { t: [5], bytes: [1, 0, 0, 0, 0, 0, 0, 0, 0, 0], group: [0] } };

describe("a model stores the news", () => {
  const first = { now: moment(100, { step: 3 }), late: "rank 1", units: ["a", "b"], order: [1, 0], holds: [[5, 7]],
    peaks: [{ num_bytes: 1, t_us: 2, step: 0, text: "x" }], tracks: [0, 2], clock: ["GPU", "host"], begin_us: -5, groups: [[0], [2]],
    change: { what: "w", at_step: 1, before: { num_steps: 1, ms: 1, exposed: 0, peak_bytes: 1 }, after: { num_steps: 1, ms: 1, exposed: 0, peak_bytes: 1 } } };

  it("until there is something else", () => {
    const model = told(first, { clock: [] });
    expect([model.now?.t_us, model.late, model.units, model.order, model.holds, model.peaks.length, model.change?.what, model.end])
      .toEqual([100, "rank 1", ["a", "b"], [1, 0], [[5, 7]], 1, "w", 100]);
    expect([model.clocks, model.groups, model.begin]).toEqual([{ timeline: "", others: "" }, [], 0]);
    expect(told(first, { late: "" }).late).toBe("");
  });

  it("with five tracks for each rank", () => {
    expect(told(first).tracks.map(({ name, rank }) => `${rank} ${name}`)).toEqual(
      [0, 2].flatMap((rank) => ["compute", "all-gather", "reduce-scatter", "other", "wait"].map((name) => `${rank} ${name}`)));
    expect(told(first).clocks).toEqual({ timeline: "GPU", others: "host" });
  });

  it("also memory, states and steps, and counts the news with changes", () => {
    const model = told({ units: ["a"], order: [0], tables: MEMORY }, { tables: { states: { t: [1], unit: [0], group: [0], state: [2] } } }, { tables: { steps: steps([9, 1]) } });
    expect([model.history.memory[0]?.length, model.history.states[0]?.[0]?.length, model.steps.length, model.numChanges]).toEqual([1, 1, 1, 2]);
  });

  it("but for a record that comes again: then only the steps", () => {
    const model = told({ ...first, exact: false, tables: { ...MEMORY, steps: steps([9, 1]) } });
    expect([model.end, model.simplifiedTo]).toEqual([100, 100]);
    const before = model.history, { tables: none } = tables();
    model.take(news({ restart: true, now: moment(50), holds: null }), none);
    expect(model.history).not.toBe(before);
    expect([model.history.memory, model.end, model.simplifiedTo, model.holds, model.steps.length, model.late]).toEqual([[], 50, -Infinity, [], 1, "rank 1"]);
  });

  it("but for other ranks: then not even these", () => {
    const model = told({ ...first, tables: { steps: steps([9, 1]) } });
    model.take(news({ restart: true, another: true }), tables().tables);
    expect([model.steps.length, model.now, model.peaks, model.late, model.change, model.end]).toEqual([0, null, [], "", null, 0]);
  });

  it("and ends no earlier than it did", () => {
    expect(told({ now: moment(100) }, { now: moment(60) }).end).toBe(100);
  });
});

describe("a model of ranks", () => {
  const can = (states: readonly RankHealth["state"][], more: Partial<FeedUpdate> = {}, isRecord = false): string =>
    [...told({ health: states.map((state, rank) => health(state, [rank])), ...more }).enabledButtons(isRecord)].join(" ");
  const goesOn = { status: { word: "stopped", why: "", can_go_on: true, fault: "" } } as const;

  it("has the buttons that do something", () => {
    expect(new RunModel().enabledButtons(false).size).toBe(0);
    expect(can(["idle", "idle"])).toBe("step break fault");
    expect(can(["running", "waiting"])).toBe("pause abort break");
    expect(can(["running", "held"])).toBe("abort break");
    expect(can(["held", "held"], goesOn)).toBe("next continue abort break");
    expect(can(["held", "gone"], goesOn)).toBe("abort");
    expect(can(["idle"], {}, true)).toBe("");
    expect(can([])).toBe("");
  });

  it("is over once there are no ranks, or some died", () => {
    expect(new RunModel().isOver(false)).toBe(false);
    expect(new RunModel().isOver(true)).toBe(true);
    expect([told({}).isOver(false), told({ health: [health("idle", [0])] }).isOver(false)]).toEqual([true, false]);
    expect(told({ health: [health("idle", [0]), health("gone", [1])] }).isOver(false)).toBe(true);
  });

  it("shows the last few steps, by the median of their lengths", () => {
    const model = told({ begin_us: 0, now: moment(100_000), tables: { steps: steps([10_000, 900], [20_000, 1], [30_000, 2], [40_000, 3], [50_000, 4], [60_000, 10]) } });
    expect(model.lastStep).toEqual([50_000, 60_000]);
    const [t0 = 0, t1 = 0] = model.latestView(false) ?? [];
    expect([t0, t1]).toEqual([100_000 - 7200, 100_000 + 72]);
    expect(model.latestView(true)).toEqual([60_000 - 7200, 60_000 + 72]);
    expect([told({}).latestView(false), told({}).lastStep, told({ tables: { steps: steps([5, 1]) } }).latestView(false)]).toEqual([null, null, null]);
  });

  it("shows no more than the record", () => {
    expect(told({ begin_us: 0, now: moment(1000), tables: { steps: steps([1000, 900]) } }).latestView(false)).toEqual([-20, 1010.2]);
  });

  it("knows the step of a moment, or the last one before it", () => {
    const model = told({ tables: { steps: { ...steps([10, 1], [20, 1]), step: [5, 6] } } });
    expect([moment(12, { step: 6 }), moment(12), moment(20), moment(9)].map((at) => model.stepAt(at))).toEqual([6, 5, 6, -1]);
  });

  it("has the spans that have not ended, up to now", () => {
    const model = told({ tracks: [0], now: moment(100) });
    const open = [{ track: 1, kind: 6, unit: 3, start: 40, bytes: 8 }, { track: 4, kind: 12, unit: -1, start: 120, bytes: 0 }] as const;
    const found = model.openItems(open);
    expect(found.map(({ start }) => start.length)).toEqual([0, 1, 0, 0, 1]);
    expect([found[1]?.end[0], found[1]?.kind[0], found[1]?.unit[0], found[1]?.bytes[0], found[1]?.arrowFrom[0]]).toEqual([100, 6, 3, 8, NaN]);
    expect(found[4]?.end[0]).toBe(120);
  });
});

describe("the cursor", () => {
  const asks = { askAt: vi.fn<(us: number) => void>(), askBeside: vi.fn<(at: Moment, by: number) => void>(), forgetMoment: vi.fn<() => void>(), isWaiting: false };
  const timeline = { setCursor: vi.fn<(us: number | null) => void>(), setView: vi.fn<(t0: number, t1: number) => void>(), follow: vi.fn<(on: boolean) => void>(), view: [0, 100] as const };
  const draw = vi.fn<() => void>();
  let model = new RunModel(), cursor = new Cursor(model, asks, timeline, { isRecord: false, draw });

  beforeEach(() => {
    vi.clearAllMocks();
    asks.isWaiting = false;
    model = told({ now: moment(90, { rank: 1, seq: 30 }), tables: { steps: steps([50_000, 10]) } });
    cursor = new Cursor(model, asks, timeline, { isRecord: false, draw });
  });

  it("is put to whole nanoseconds; the view holds, and the ranks there are asked for", () => {
    cursor.snaps = true;
    cursor.put(12.34567);
    expect([cursor.us, cursor.isLive, cursor.snaps]).toEqual([12.346, false, false]);
    expect(timeline.follow.mock.calls).toEqual([[false]]);
    expect(timeline.setCursor.mock.calls).toEqual([[12.346]]);
    expect(asks.askAt.mock.calls).toEqual([[12.346]]);
    expect(draw).toHaveBeenCalled();
  });

  it("shows what was answered; until then the newest event", () => {
    expect(cursor.at).toBe(model.now);
    cursor.put(10);
    expect(cursor.at).toBe(model.now);
    const there = moment(9);
    cursor.takeMoment(there, true);
    expect([cursor.at, cursor.us]).toEqual([there, 10]); // it stays where it was put
  });

  it("steps from event to event, and snaps to that of the last answer", () => {
    cursor.step(-1);
    expect(asks.askBeside.mock.calls).toEqual([[model.now, -1]]);
    expect(cursor.isLive).toBe(false);
    cursor.takeMoment(moment(80, { seq: 29 }), false); // another question waits
    expect(cursor.us).toBeNull();
    cursor.takeMoment(moment(70, { seq: 28 }), true);
    expect([cursor.us, timeline.setCursor.mock.lastCall]).toEqual([70, [70]]);
    cursor.step(2);
    expect(asks.askBeside.mock.lastCall).toEqual([moment(70, { seq: 28 }), 2]);
    new Cursor(new RunModel(), asks, timeline, { isRecord: false, draw }).step(1);
    expect(asks.askBeside).toHaveBeenCalledTimes(2);
  });

  it("comes into view only if it is not", () => {
    cursor.show(100);
    expect(timeline.setView).not.toHaveBeenCalled();
    cursor.show(-10);
    expect(timeline.setView.mock.calls).toEqual([[-60, 40]]);
    cursor.show(101);
    expect(timeline.setView.mock.lastCall).toEqual([51, 151]);
  });

  it("holds at the newest event, once", () => {
    cursor.hold();
    expect([cursor.us, cursor.isLive]).toEqual([90, false]);
    cursor.us = 5;
    cursor.hold();
    expect(cursor.us).toBe(5);
  });

  it("holds the last step", () => {
    cursor.holdStep();
    expect([cursor.us, timeline.setView.mock.lastCall]).toEqual([50_000, [40_000 - 300, 50_000 + 300]]);
    new Cursor(new RunModel(), asks, timeline, { isRecord: false, draw }).holdStep();
    expect(timeline.setView).toHaveBeenCalledTimes(1);
  });

  it("lets go", () => {
    cursor.put(10);
    cursor.takeMoment(moment(9), true);
    cursor.follow();
    expect([cursor.us, cursor.moment, cursor.isLive, timeline.setCursor.mock.lastCall, timeline.follow.mock.lastCall]).toEqual([null, null, true, [null], [true]]);
    expect([asks.forgetMoment.mock.calls.length, timeline.setView.mock.calls.length]).toEqual([1, 1]);
    cursor.takeMoment(moment(9), true); // too late
    expect(cursor.moment).toBeNull();
  });

  it("goes where %fsdp back has moved it, and lets go with it", () => {
    cursor.snaps = true;
    const there = moment(200);
    cursor.takeMoved({ t_us: 200, moment: there });
    expect([cursor.us, cursor.moment, cursor.isLive, cursor.snaps, timeline.setCursor.mock.lastCall]).toEqual([200, there, false, false, [200]]);
    expect([asks.askAt.mock.calls.length, asks.forgetMoment.mock.calls.length]).toEqual([0, 1]);
    cursor.takeMoved(null);
    expect([cursor.us, cursor.isLive]).toEqual([null, true]);
    const { length } = timeline.follow.mock.calls;
    cursor.takeMoved(null);
    expect(timeline.follow).toHaveBeenCalledTimes(length);
  });

  it("is asked about again, by time or by event, as it was put", () => {
    cursor.askAgain();
    cursor.put(10);
    cursor.askAgain(); // nothing is known there
    expect([asks.askAt.mock.calls.length, asks.askBeside.mock.calls.length]).toEqual([1, 0]);
    cursor.takeMoment(moment(9), true);
    cursor.askAgain();
    expect(asks.askAt.mock.calls).toEqual([[10], [10]]);
    cursor.step(1);
    cursor.askAgain();
    expect(asks.askBeside.mock.lastCall).toEqual([moment(9), 0]);
    asks.isWaiting = true;
    cursor.askAgain();
    expect(asks.askBeside).toHaveBeenCalledTimes(2);
  });
});

describe("words", () => {
  it("of a status", () => {
    expect(badge(null)).toBe("");
    expect(badge({ word: "dead", why: "x", can_go_on: false, fault: "" })).toBe("\u2715 ranks died");
    expect(announcement({ word: "training", why: "step 3", can_go_on: false, fault: "" })).toEqual({ key: "training", text: "training: step 3" });
    expect(announcement({ word: "stopped", why: "before a", can_go_on: false, fault: "" })).toEqual({ key: "stopped before a", text: "stopped: before a" });
    expect(announcement({ word: "idle", why: "", can_go_on: false, fault: "" }).text).toBe("idle");
  });

  it("of the time that is shown; a live view has none before the first step", () => {
    expect(headline(null, true, "")).toEqual({ when: "", event: "" });
    expect(headline(moment(1500, { step: 4 }), true, "said")).toEqual({ when: "step 4 \u00b7 1.50 ms", event: "an event" });
    expect(headline(moment(1500, { step: 4 }), true, "", "step 4 was the last").when).toBe("1.50 ms");
    expect(headline(moment(1500, { step: 4 }), false, "", "step 4 was the last").when).toBe("step 4 \u00b7 1.50 ms");
    expect(headline(moment(1500), true, "said")).toEqual({ when: "", event: "" });
    expect(headline(moment(1500), true, "")).toEqual({ when: "1.50 ms", event: "an event" });
    expect(headline(moment(1500), false, "said")).toEqual({ when: "1.50 ms", event: "an event" });
    expect(dotted(["", "a", "", "b"])).toBe("a \u00b7 b");
  });

  it("of the ranks: how they are while live, and what they did where the cursor is", () => {
    const then = moment(1, { ranks: [ranksAt({ label: "ranks 0-1", doing: "forward of a" })] });
    const texts = (...given: Parameters<typeof rankLines>): string[] => rankLines(...given).map(({ state, label, text }) => `${state}|${label}|${text}`);
    expect(texts([health("running", [0, 1])], then, true)).toEqual(["running|ranks 0-1|running \u00b7 forward of a"]);
    expect(texts([health("running", [0, 1])], null, true)).toEqual(["running|rank 0,1|running"]);
    expect(texts([health("idle", [0, 1])], then, true)).toEqual(["idle|rank 0,1|idle"]);
    expect(texts([health("held", [0], "before a")], then, true)).toEqual(["held|rank 0|held before a"]);
    expect(texts([health("running", [0]), health("gone", [1])], then, true)).toEqual(["gone|rank 1|gone", "running|rank 0|running"]);
    expect(texts([health("running", [0])], then, false)).toEqual(["running|rank 0|running", "|ranks 0-1|forward of a"]);
    expect(texts([], then, true)).toEqual(["|ranks 0-1|forward of a"]);
  });

  it("of what is unsharded, ranks with the same units together, without dead ones", () => {
    const model = told({ units: ["a", "b"], order: [1, 0], health: [health("running", [0, 1, 3]), health("gone", [2])] });
    const at = moment(1, { ranks: [ranksAt({ ranks: [1, 2], units: [2, 2] }), ranksAt({ ranks: [3], units: [0, 3] }), ranksAt({ ranks: [0], units: [2, 2] })] });
    const dead = moment(1, { ranks: [ranksAt({ ranks: [2], units: [2, 0] }), ranksAt({ ranks: [0], units: [0, 2] })] });
    expect(unshardedWords(model, dead)).toBe("unsharded on rank 0: b \u00b7 rank 2 gone");
    expect(unshardedWords(model, at)).toBe("unsharded on ranks 0-1: b, a \u00b7 unsharded on rank 3: none \u00b7 rank 2 gone");
    expect(unshardedWords(told({}), null)).toBe("");
  });

  it("of the peak", () => {
    const peak = (num_bytes: number, step = -1): Parameters<typeof peakWords>[0] => ({ num_bytes, t_us: 1, step, text: "x" });
    expect(highestPeak([])).toBeNull();
    expect(highestPeak([peak(3), peak(7, 1), peak(7, 2), peak(5)])).toEqual(peak(7, 1));
    expect([peakWords(peak(2048)), peakWords(peak(2048, 0))]).toEqual(["peak 2.00 KiB", "peak 2.00 KiB, step 0"]);
  });

  it("of memory by class: what was ever in use stays", () => {
    const at = moment(1, { ranks: [ranksAt({ bytes: [1024, 0, 0, 0, 0, 0, 0, 0, 0, 2048], in_use: 1024 })] });
    expect(memoryEntries(null, new Set([0]))).toEqual([]);
    expect(memoryEntries(at, new Set([0, 3])).map(({ words, size }) => [words, size])).toEqual(
      [["rank 0: in use", "1.00 KiB"], ["sharded params", "1.00 KiB"], ["unsharded grads", "0 B"]]);
  });

  it("of a step's numbers", () => {
    const { steps: found } = told({ tables: { steps: { ...steps([1, 2.5], [2, 3]), has_loss: [1, 0] } } });
    expect([stepNumber(found, "loss", 0), stepNumber(found, "loss", 1), stepNumber(found, "loss", -1)]).toEqual(["1.000", "\u2013", "\u2013"]);
    expect([stepNumber(found, "ms", 0), stepNumber(found, "exposed", 1), stepNumber(found, "ms", -1)]).toEqual(["2.50 ms", "25%", "\u2013"]);
  });

  it("of a changed setting", () => {
    const costs = { num_steps: 4, ms: 1.5, exposed: 0.125, peak_bytes: 1024 };
    expect(changeTable({ what: "prefetch 2", at_step: 9, before: costs, after: { ...costs, num_steps: 5 } })).toEqual({
      heading: "changed at step 9: prefetch 2", columns: ["", "steps", "step time", "exposed", "peak"],
      rows: [["before", "4", "1.50 ms", "12%", "1.00 KiB"], ["after", "5", "1.50 ms", "12%", "1.00 KiB"]],
    });
  });
});
