import { describe, expect, it, vi } from "vitest";

import type { Answer, Question } from "../../../workbench/widgets/static/messages";
import { answerOf, channelTo } from "../../../workbench/widgets/static/record/kernel.js";
import { RankRecord, ValueChanges } from "../../../workbench/widgets/static/record/rank_record.js";
import { RecordedRun, unzipped } from "../../../workbench/widgets/static/record/recorded_run.js";
import { windowOf } from "../../../workbench/widgets/static/record/window_changes.js";
import { aligned, pack } from "../../../workbench/widgets/static/unpack.js";
import { news } from "./made";

const TYPES = { f8: Float64Array, i4: Int32Array, u1: Uint8Array };
type Given = readonly [name: string, code: keyof typeof TYPES, values: readonly number[]];

/** A blob as workbench/widgets/recorded.py makes it. */
function blob(told: object, columns: readonly Given[]): ArrayBuffer {
  const text = new TextEncoder().encode(JSON.stringify({ ...told, columns: columns.map(([name, code, { length }]) => [name, code, length]) }));
  const parts = columns.map(([, code, values]) => new Uint8Array(TYPES[code].from(values).buffer));
  const buffer = new ArrayBuffer(aligned(4 + text.length) + parts.reduce((sum, { length }) => sum + aligned(length), 0));
  new DataView(buffer).setUint32(0, text.length, true);
  new Uint8Array(buffer).set(text, 4);
  let at = aligned(4 + text.length);
  for (const part of parts) {
    new Uint8Array(buffer).set(part, at);
    at += aligned(part.length);
  }
  return buffer;
}

/** Five rows, 10 us apart, of which row 3 is no event; 5 us before it are cut out. Two classes of bytes, one unit. */
function rank(number: number, change: Partial<Record<string, readonly number[]>> = {}): Given[] {
  const columns: [string, keyof typeof TYPES, readonly number[]][] = [
    ["known", "f8", [0, 10_000, 10_000, 10_000, 10_000]], ["hidden", "f8", [0, 0, 0, 5000, 0]], ["step", "i4", [-1, 1, 0, 0, 1]],
    ["back", "i4", [0, 0, 0, 1, 0]], ["text", "i4", [0, 1, 2, 2, 3]], ["doing", "u1", [0, 0, 1, 1, 1]], ["event", "u1", [1, 1, 1, 0, 1]],
    ["bytes.row", "i4", [-1, 2, -1, 1, 4]], ["bytes.value", "f8", [100, 300, 0, 50, 0]], ["bytes.ends", "i4", [2, 5]],
    ["units.row", "i4", [-1, 1, 3]], ["units.value", "u1", [0, 1, 2]], ["units.ends", "i4", [3]],
  ];
  return columns.map(([name, code, values]) => [`${number}.${name}`, code, change[name] ?? values]);
}

const SPANS = { start: [0, 10, 30], duration: [10, 15, 5], bytes: [0, 0, 0], before: [NaN, NaN, NaN], unit: [0, 0, 0], track: [0, 0, 0], kind: [1, 6, 2], exposed: [0, 0, 0] };

function run(...ranks: readonly Given[][]): RecordedRun {
  const [counts, data] = pack({ spans: SPANS });
  const numbers = ranks.map(([first]) => Number(first?.[0].split(".")[0]));
  const feed = news({ counts, groups: numbers.map((number) => [number]), units: ["a"], restart: true });
  const told = { about: { buttons: [], panels: ["memory"], sizes: [] }, feed, ranks: numbers.map((number) => ({ rank: number, seq: 100 })),
    alike: 0.01, reserved: 1, texts: ["zero", "one", "two", "four"], doings: ["forward", "backward"] };
  return new RecordedRun(blob(told, [["feed", "u1", [...new Uint8Array(data.buffer)]], ...ranks.flat()]));
}

describe("values that change with rows", () => {
  const changes = new ValueChanges(Int32Array.of(-1, 2, -1, 1, 4), Float64Array.of(100, 300, 0, 50, 7), Int32Array.of(2, 5));

  it("are known after any row", () => {
    expect([-1, 0, 1, 2, 3, 4].map((row) => changes.after(row))).toEqual([[100, 0], [100, 0], [100, 50], [300, 50], [300, 50], [300, 7]]);
  });

  it("are listed in the order of the rows, after the first up to the last", () => {
    expect(changes.between(0, 4)).toEqual([{ row: 1, part: 1, value: 50 }, { row: 2, part: 0, value: 300 }, { row: 4, part: 1, value: 7 }]);
    expect(changes.between(1, 2)).toEqual([{ row: 2, part: 0, value: 300 }]);
    expect(changes.between(2, 3)).toEqual([]);
  });
});

describe("a rank's record", () => {
  const columns = new Map(rank(0).map(([name, code, values]) => [name.slice(2), TYPES[code].from(values)]));
  const record = new RankRecord(0, 100, (name) => columns.get(name) ?? new Int32Array());

  it("sums its differences up, and takes cut time out of the axis", () => {
    expect([...record.known]).toEqual([0, 10_000, 20_000, 30_000, 40_000]);
    expect([...record.shown]).toEqual([0, 10_000, 20_000, 25_000, 35_000]);
    expect([...record.step]).toEqual([-1, 0, 0, 0, 1]);
  });

  it("finds rows by time, at least the first", () => {
    expect([-5, 0, 9_999, 10_000, 99_999].map((t) => record.rowAt(record.shown, t))).toEqual([0, 0, 0, 1, 4]);
  });

  it("finds events beside a row", () => {
    expect([-1, 0, 1, 2, 9].map((by) => record.beside(102, by))).toEqual([1, 2, 4, 4, 4]);
    expect([record.beside(103, 0), record.beside(103, 1), record.beside(103, -1)]).toEqual([2, 4, 1]); // row 3 is no event
    expect([record.beside(7, 0), record.beside(999, 0)]).toEqual([0, 4]);
  });
});

describe("a recorded run", () => {
  it("knows all ranks at a time; the moment is the newest row's", () => {
    const found = run(rank(0)).at(26);
    expect(found).toEqual({ t_us: 25, rank: 0, seq: 102, step: 0, event: "rank 0: two",
      ranks: [{ ranks: [0], label: "rank 0", doing: "backward", units: [2], bytes: [300, 50], in_use: 300 }] });
    expect(run(rank(0)).at(-3)).toMatchObject({ t_us: 0, seq: 100, step: -1, event: "rank 0: zero", ranks: [{ units: [0], bytes: [100, 0] }] });
    expect(run().at(5)).toBeNull();
  });

  it("merges ranks that are alike, also with nearly the same bytes", () => {
    const near = rank(1, { "bytes.value": [101, 303, 0, 50, 0] }), other = rank(2, { "bytes.value": [104, 340, 0, 50, 0] });
    const found = run(rank(0), near, other).at(26);
    expect(found?.ranks.map(({ label, bytes }) => [label, bytes])).toEqual([["ranks 0-1", [300, 50]], ["rank 2", [340, 50]]]);
    expect(run(rank(0), rank(1, { "units.value": [0, 1, 3] })).at(26)?.ranks).toHaveLength(2);
    expect(run(rank(0), rank(1, { doing: [0, 0, 1, 0, 1] })).at(26)?.ranks).toHaveLength(2);
  });

  it("takes the moment of the rank whose row arrived last, of those that had begun", () => {
    const late = rank(1, { known: [20_000, 2_000, 10_000, 10_000, 10_000], hidden: [0, 0, 0, 0, 0] });
    expect(run(rank(0), late).at(23)).toMatchObject({ rank: 1, seq: 101, t_us: 22 });
    expect(run(rank(0), late).at(12)).toMatchObject({ rank: 0, seq: 101, t_us: 10 });
  });

  it("knows all ranks at the arrival of a row beside another", () => {
    const late = rank(1, { known: [20_000, 2_000, 10_000, 10_000, 10_000], hidden: [0, 0, 0, 0, 0] });
    expect(run(rank(0), late).beside(1, 100, 1)).toMatchObject({ rank: 1, seq: 101, ranks: [{ ranks: [0], bytes: [300, 50] }, { ranks: [1], bytes: [100, 50] }] });
    expect(run(rank(0)).beside(9, 100, 1)).toBeNull();
  });

  it("says which column is missing", () => {
    expect(() => run(rank(0).filter(([name]) => name !== "0.doing"))).toThrow("the record lacks 0.doing");
  });

  it("is read from compressed text", async () => {
    const bytes = Uint8Array.of(1, 2, 3);
    const gzip = await new Response(new Blob([bytes]).stream().pipeThrough(new CompressionStream("gzip"))).arrayBuffer();
    const text = btoa(String.fromCharCode(...new Uint8Array(gzip)));
    expect(new Uint8Array(await unzipped(text))).toEqual(bytes);
  });
});

describe("a window of a record", () => {
  it("has the state before it and every change in it", () => {
    const { exact, tables } = windowOf(run(rank(0)), 15, 40);
    expect(exact).toBe(true);
    expect(tables.memory).toEqual({ t: [15, 20, 35], bytes: [100, 50, 300, 50, 300, 0], group: [0, 0, 0] });
    expect(tables.states).toEqual({ t: [15, 25], unit: [0, 0], group: [0, 0], state: [1, 2] });
  });

  it("begins with the record, and puts all changes of a row into one entry", () => {
    const both = rank(0, { "bytes.row": [-1, 2, -1, 2, 4] });
    expect(windowOf(run(both), -50, 30).tables.memory).toEqual({ t: [0, 20], bytes: [100, 0, 300, 50], group: [0, 0] });
  });

  it("has the spans that overlap it", () => {
    const starts = (from: number, to: number): number[] | undefined => windowOf(run(rank(0)), from, to).tables.spans.start;
    expect([starts(10, 30), starts(10.5, 29), starts(26, 29)]).toEqual([[0, 10, 30], [10], []]);
  });

  it("lacks changes if there are too many", () => {
    expect(windowOf(run(rank(0)), 0, 40, 3)).toMatchObject({ exact: true });
    expect(windowOf(run(rank(0)), 0, 40, 2)).toMatchObject({ exact: false, tables: { memory: { t: [] }, states: { t: [] } } });
  });
});

describe("a record in a kernel's place", () => {
  it("answers each question, with its number", () => {
    const made = run(rank(0));
    expect(answerOf(made, { word: "at", view: "v", number: 5, t_us: 26 })?.[0]).toMatchObject({ word: "moment", view: "v", number: 5, moment: { t_us: 25 } });
    expect(answerOf(made, { word: "beside", view: "v", number: 6, rank: 0, seq: 100, by: 1 })?.[0]).toMatchObject({ number: 6, moment: { seq: 101 } });
    const [answer, [data] = []] = answerOf(made, { word: "window", view: "v", number: 7, from_us: 11, to_us: 40 }) ?? [];
    expect(answer).toMatchObject({ word: "window", number: 7, from_us: 11, to_us: 40, exact: true, counts: { spans: 2, memory: 3, states: 2, steps: 0 } });
    expect([data?.getFloat64(0, true), data?.getFloat64(8, true)]).toEqual([10, 30]); // begins of the spans
    expect(answerOf(made, { word: "bye", view: "v" })).toBeNull();
  });

  it("tells everything at first, and then for a while nothing new", () => {
    vi.useFakeTimers();
    const channel = channelTo(run(rank(0))), answers: Answer[] = [], ask: Omit<Question & { word: "feed" }, "wait"> = { word: "feed", view: "v" };
    const take = (answer: Answer): void => { answers.push(answer); };
    channel.on("msg:custom", take);
    channel.send({ ...ask, wait: false });
    vi.advanceTimersByTime(0);
    expect(answers).toMatchObject([{ word: "feed", view: "v", restart: true, counts: { spans: 3 } }]);
    channel.send({ ...ask, wait: true });
    vi.advanceTimersByTime(1499);
    expect(answers).toHaveLength(1);
    vi.advanceTimersByTime(1);
    expect(answers[1]).toMatchObject({ restart: false, units: null, now: null, counts: { spans: 0, memory: 0, states: 0, steps: 0 } });
    channel.off("msg:custom", take);
    channel.send({ ...ask, wait: false });
    vi.advanceTimersByTime(2000);
    expect(answers).toHaveLength(2);
    expect([channel.isRecord, channel.get("about").panels]).toEqual([true, ["memory"]]);
    vi.useRealTimers();
  });
});
