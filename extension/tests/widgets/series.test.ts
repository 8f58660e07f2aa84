import { describe, expect, it } from "vitest";

import { Axis } from "../../../workbench/widgets/static/axis.js";
import { highest, memoryColumns } from "../../../workbench/widgets/static/memory_columns.js";
import { History, Memory, StateChanges, Steps, lastUpTo } from "../../../workbench/widgets/static/series.js";
import { stepLine } from "../../../workbench/widgets/static/step_line.js";
import { aligned, itemsOf, pack, unpack } from "../../../workbench/widgets/static/unpack.js";
import { steps, tables } from "./made";
import { TABLES } from "./python_cases";

const bytesOf = (...values: readonly number[]): Float32Array => Float32Array.from({ length: 10 }, (_, k) => values[k] ?? 0);

it.each([[0, -1], [1, 0], [2, 2], [3, 2], [5, 3], [9, 3]])("the last value up to %d is at %d", (value, place) => {
  expect(lastUpTo(Float64Array.of(1, 2, 2, 5, 6, 7), 4, value)).toBe(place);
});

describe("growing columns", () => {
  it("keep all entries while they grow, each with its bytes", () => {
    const memory = new Memory();
    for (let k = 0; k < 200; k++) memory.push(k, bytesOf(k, 2 * k));
    expect(memory.length).toBe(200);
    expect([...memory.t.subarray(0, 200)]).toEqual(Array.from({ length: 200 }, (_, k) => k));
    for (const k of [0, 63, 64, 199]) expect([...memory.bytes(k)]).toEqual([k, 2 * k, 0, 0, 0, 0, 0, 0, 0, 0]);
  });

  it("drop the older half beyond the maximum", () => {
    const changes = new StateChanges(100);
    for (let k = 0; k < 101; k++) changes.push(k, k % 4);
    expect(changes.length).toBe(51);
    expect([...changes.t.subarray(0, 51)]).toEqual(Array.from({ length: 51 }, (_, k) => 50 + k));
    expect([...changes.state.subarray(0, 51)]).toEqual(Array.from({ length: 51 }, (_, k) => (50 + k) % 4));
    const memory = new Memory();
    for (let k = 0; k < 20_001; k++) memory.push(k, bytesOf(0, 0, k));
    expect([memory.length, memory.t[0], memory.bytes(0)[2], memory.bytes(10_000)[2]]).toEqual([10_001, 10_000, 10_000, 20_000]);
  });

  it("find steps by time and by number", () => {
    const found = new Steps();
    found.take(tables({ steps: { ...steps([10, 1], [20, 1], [30, 1]), step: [4, 5, 7] } }).tables.steps);
    found.take(tables({ steps: { ...steps([40, 2]), step: [9], loss: [0.5], has_loss: [0], exposed: [0.5], model: [3] } }).tables.steps);
    expect([9, 10, 29, 30, 50].map((us) => found.endedAt(us))).toEqual([-1, 0, 1, 2, 3]);
    expect([3, 4, 6, 7, 10].map((step) => found.numbered(step))).toEqual([-1, 0, 1, 2, 3]);
    const { columns: { t, ms, loss, has_loss, exposed, model } } = found;
    expect([t, ms, loss, has_loss, exposed, model].map((column) => column[3])).toEqual([40, 2, 0.5, 0, 0.5, 3]);
  });
});

describe("a history", () => {
  it("has the memory of each group, and the classes that ever held bytes", () => {
    const history = new History();
    history.takeMemory(tables({ memory: { t: [1, 2], bytes: [...bytesOf(0, 5), ...bytesOf(0, 0, 0, 7)], group: [1, 0] } }).tables.memory);
    history.takeMemory(tables({ memory: { t: [3], bytes: [...bytesOf(9)], group: [0] } }).tables.memory);
    expect(history.memory.map(({ t, length }) => [...t.subarray(0, length)])).toEqual([[2, 3], [1]]);
    expect([...history.memory[1]?.bytes(0) ?? []]).toEqual([...bytesOf(0, 5)]);
    expect([...history.classes].sort()).toEqual([0, 1, 3]);
  });

  it("has the states of each unit of each group", () => {
    const history = new History();
    history.takeStates(tables({ states: { t: [1, 2, 3], unit: [0, 2, 2], group: [0, 1, 1], state: [1, 2, 3] } }).tables.states, 3);
    expect(history.states.map((units) => units.map(({ length }) => length))).toEqual([[1], [0, 0, 2]]);
    expect([...history.states[1]?.[2]?.state.subarray(0, 2) ?? []]).toEqual([2, 3]);
  });
});

describe("tables in a buffer", () => {
  it("are read as Python lays them out", () => {
    const data = Uint8Array.from(atob(TABLES.buffer), (letter) => letter.charCodeAt(0));
    const shifted = new Uint8Array(data.length + 3);
    shifted.set(data, 3); // a view may begin anywhere
    const found = unpack(TABLES.counts, new DataView(shifted.buffer, 3));
    const read = Object.entries(found).map(([table, columns]) =>
      [table, Object.fromEntries(Object.entries(columns as Record<string, Float64Array>).map(([name, values]) => [name, [...values]]))] as const);
    expect(Object.fromEntries(read)).toEqual(TABLES.columns);
  });

  it("come back as they were packed", () => {
    const [counts, data] = pack({ spans: { start: [1.5], duration: [2], bytes: [3], before: [4], unit: [-5], track: [6], kind: [7], exposed: [8] } });
    expect(counts).toEqual({ spans: 1, memory: 0, states: 0, steps: 0 });
    const { spans } = unpack(counts, data);
    expect([spans.start[0], spans.duration[0], spans.bytes[0], spans.before[0], spans.unit[0], spans.exposed[0]]).toEqual([1.5, 2, 3, 4, -5, 8]);
  });

  it("begin at multiples of 8 bytes", () => { expect([0, 1, 8, 9].map(aligned)).toEqual([0, 8, 8, 16]); });

  it("have spans of several tracks, in the order of each", () => {
    const { tables: { spans } } = tables({ spans: { start: [10, 20, 30], duration: [1, 2, 4], bytes: [5, 6, 7], before: [NaN, 8, NaN],
      unit: [0, 1, 2], track: [1, 0, 1], kind: [6, 12, 7], exposed: [9, 0, 255] } });
    const [first, second, third] = itemsOf(spans, 3);
    expect([first?.start, first?.end, first?.arrowFrom].map((column) => column?.[0])).toEqual([20, 22, 12]);
    expect([[...second?.start ?? []], [...second?.end ?? []], [...second?.unit ?? []]]).toEqual([[10, 30], [11, 34], [0, 2]]);
    expect([[...second?.kind ?? []], [...second?.exposed ?? []], [...second?.bytes ?? []]]).toEqual([[6, 7], [9, 255], [5, 7]]);
    expect(second?.arrowFrom).toEqual(Float64Array.of(NaN, NaN));
    expect(third?.start).toHaveLength(0);
  });
});

describe("the memory of each pixel", () => {
  const columns = (rows: readonly (readonly [number, Float32Array])[], axis: Axis): { totals: number[]; most: number } => {
    const memory = new Memory();
    for (const [t, bytes] of rows) memory.push(t, bytes);
    const found = memoryColumns(memory, axis);
    return { totals: [...found.totals], most: highest(found) };
  };
  const axis = new Axis({ left: 100, width: 5 }, [0, 50]); // 10 microseconds a pixel

  it("is that of the moment with the most bytes in use", () => {
    expect(columns([[0, bytesOf(1)], [12, bytesOf(9)], [14, bytesOf(4)], [31, bytesOf(2)]], axis).totals).toEqual([1, 9, 4, 4, 2, 2]);
  });

  it("begins with the state before the view, and is unknown before the first moment", () => {
    expect(columns([[-90, bytesOf(7)], [-20, bytesOf(5)], [25, bytesOf(3)], [60, bytesOf(99)]], axis).totals).toEqual([5, 5, 5, 3, 3, 3]);
    expect(columns([[25, bytesOf(3)]], axis).totals).toEqual([-1, -1, 3, 3, 3, 3]);
  });

  it("does not count what is reserved as in use, but has room for it", () => {
    const reserved = bytesOf(3, 0, 0, 0, 0, 0, 0, 0, 0, 20);
    expect(columns([[0, reserved]], axis)).toEqual({ totals: [3, 3, 3, 3, 3, 3], most: 23 });
  });
});

describe("the line of a number per step", () => {
  const size = { width: 48, height: 40 };
  const line = (loss: readonly number[], at: number | null, model = loss.map(() => 0)): ReturnType<typeof stepLine> => {
    const found = new Steps();
    found.take(tables({ steps: { ...steps(...loss.map((_, k) => [k, 1] as const)), loss: [...loss], model } }).tables.steps);
    return stepLine(found, "loss", at, size);
  };

  it.each([
    [[3, 2, 1], null, [3, 23, 43], 43, 36],
    [[3, 2, NaN], null, [3, 23], 43, null], // the newest has no place on the line
    [[3, NaN, 1], 1, [3, 43], 23, null],
    [[3, NaN, 1], 2, [3, 43], 43, 36],
    [[3, 2, 1], 0, [3, 23, 43], 3, 4],
    [[5, 5], 7, [3, 43], 43, 20], // a constant, after the last step
  ] as const)("of %j at %s ends where its numbers do", (loss, at, xs, x, y) => {
    const { points, here } = line(loss, at);
    expect(points.map(([place]) => place)).toEqual(xs);
    expect(here).toEqual({ x, point: y === null ? null : [x, y] });
  });

  it("is that of the model of the step that is shown", () => {
    expect(line([9, 8, 1, 2], null, [0, 0, 1, 1]).points).toEqual([[3, 36], [43, 4]]);
    expect(line([9, 8, 1, 2], 1, [0, 0, 1, 1]).points).toEqual([[3, 4], [43, 36]]);
  });

  it("has the last 400 steps, and nothing where nothing is known", () => {
    expect(line(Array.from({ length: 500 }, (_, k) => k), null).points).toHaveLength(400);
    expect([line([], null), line([NaN], null)]).toEqual([{ points: [], here: null }, { points: [], here: null }]);
  });
});
