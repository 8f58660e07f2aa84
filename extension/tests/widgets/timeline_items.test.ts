import { describe, expect, it } from "vitest";

import { Look } from "../../../workbench/widgets/static/look.js";
import { paintPixels } from "../../../workbench/widgets/static/timeline/colour_sums.js";
import { gallop, mergeOrder, picked, share, sorted } from "../../../workbench/widgets/static/timeline/items.js";
import { Track } from "../../../workbench/widgets/static/timeline/track.js";
import { Tracks } from "../../../workbench/widgets/static/timeline/tracks.js";
import { items, random, track } from "./made";

const RANK0 = { name: "compute", rank: 0 };

describe("searching a column", () => {
  it("finds the first value that is not less, from anywhere", () => {
    const values = Float64Array.of(1, 2, 2, 2, 5, 8, 8, 9, 99, 99); // of which 8 are valid
    for (let from = 0; from <= 8; from++) {
      for (const value of [0, 1, 1.5, 2, 2.5, 5, 8, 8.5, 9, 10]) {
        const after = values.slice(from, 8).findIndex((each) => each >= value);
        expect(gallop(values, 8, from, value)).toBe(after < 0 ? 8 : from + after);
      }
    }
    expect(gallop(values, 0, 0, 1)).toBe(0);
  });
});

describe("items", () => {
  it("are sorted by start, those of the same start in the order given", () => {
    const given = items([5, 6, { unit: 1 }], [1, 2, { unit: 2 }], [5, 9, { unit: 3 }], [1, 3, { unit: 4 }]);
    expect([...sorted(given).unit]).toEqual([2, 4, 1, 3]);
    const inOrder = items([1, 2], [1, 3], [4, 5]);
    expect(sorted(inOrder)).toBe(inOrder);
  });

  it("are picked with all columns", () => {
    const found = picked(items([1, 2, { bytes: 3 }], [4, 5, { kind: 6, unit: 7, bytes: 8, arrowFrom: 9, exposed: 10 }]), [1]);
    expect(found).toEqual(items([4, 5, { kind: 6, unit: 7, bytes: 8, arrowFrom: 9, exposed: 10 }]));
  });

  it("are merged: of the same start, first those of the first list", () => {
    expect([...mergeOrder(Float64Array.of(1, 3, 5), Float64Array.of(0, 3, 6))]).toEqual([3, 0, 1, 4, 2, 5]);
    expect([...mergeOrder(Float64Array.of(), Float64Array.of(4))]).toEqual([0]);
  });

  it("are exposed by a share of 255; 1 is an unknown part", () => {
    expect([0, 1, 2, 51, 255].map(share)).toEqual([0, 0, 2 / 255, 0.2, 1]);
  });
});

describe("a track", () => {
  it("keeps its items sorted, whatever comes late, and grows", () => {
    const made = new Track(RANK0), next = random(3), all: number[] = [];
    for (let part = 0; part < 30; part++) {
      const rows = Array.from({ length: 1 + (part % 7) }, () => 100 * next());
      all.push(...rows);
      made.append(items(...rows.map((start) => [start, start + 1, { bytes: start }] as const)));
    }
    all.sort((a, b) => a - b);
    expect(made.length).toBe(all.length);
    expect([...made.start.subarray(0, made.length)]).toEqual(all);
    expect([...made.bytes.subarray(0, made.length)]).toEqual(all);
    expect([...made.end.subarray(0, made.length)]).toEqual(all.map((start) => start + 1));
  });

  it("knows the latest end so far, also of what comes late", () => {
    const made = track(RANK0, [0, 10], [2, 3], [12, 13]);
    made.append(items([1, 20]));
    expect([...made.reach.subarray(0, 4)]).toEqual([10, 20, 20, 20]);
  });

  it("puts items that overlap into the halves of the row in turn", () => {
    const made = track(RANK0, [0, 5], [5, 6], [5.5, 9], [8, 10], [10, 11]);
    expect([...made.lane.subarray(0, 5)]).toEqual([0, 1, 2, 1, 0]);
  });

  it("finds what is visible", () => {
    const made = track(RANK0, [0, 100], [10, 20], [30, 40], [50, 60]);
    expect(made.within(25, 50)).toEqual([0, 3]); // the first item is still there
    expect(track(RANK0, [0, 1], [10, 20], [30, 40], [50, 60]).within(20, 30)).toEqual([1, 2]);
  });

  it("finds the item at a time, the one that began last", () => {
    const made = track(RANK0, [0, 100], [10, 20], [30, 40]);
    expect([-1, 0, 10, 19, 20, 30, 99, 100].map((t) => made.at(t))).toEqual([-1, 0, 1, 1, 0, 2, 0, -1]);
  });

  it("looks around a time for begins and ends", () => {
    const made = track(RANK0, ...Array.from({ length: 100 }, (_, k) => [k, k + 0.5] as const));
    expect([...made.near(80)]).toEqual(Array.from({ length: 68 }, (_, k) => 16 + k));
    expect([...made.near(1)]).toEqual([0, 1, 2, 3, 4]);
    expect([...made.near(99)].at(-1)).toBe(99);
  });

  it("drops its first items", () => {
    const made = track(RANK0, [0, 1, { unit: 1 }], [2, 3, { unit: 2 }], [4, 5, { unit: 3 }]);
    made.forget(2);
    expect([made.length, made.start[0], made.end[0], made.unit[0], made.at(4)]).toEqual([1, 4, 5, 3, 0]);
  });

  it("marks how much of a collective was waited for", () => {
    const made = track(RANK0, [0, 100], [200, 300], [400, 500], [600, 700, { exposed: 200 }]);
    made.expose(0, 50, 120); // its second half
    made.expose(1, 120, 200); // nothing
    made.expose(2, 499.9, 600); // little
    made.expose(3, 690, 700); // less than is known
    expect([...made.exposed.subarray(0, 4)]).toEqual([128, 0, 2, 200]);
  });
});

describe("tracks", () => {
  const names = [{ name: "compute", rank: 0 }, { name: "all-gather", rank: 0 }, { name: "wait", rank: 0 }, { name: "all-gather", rank: 1 }];

  it("mark a collective whose wait came before it", () => {
    const tracks = new Tracks(names);
    tracks.append(2, items([60, 100, { kind: 12, arrowFrom: 20.5 }]));
    tracks.append(3, items([20, 90, { kind: 6 }])); // of another rank
    expect(tracks.all[3]?.exposed[0]).toBe(0);
    tracks.append(1, items([20, 100, { kind: 6 }], [120, 130, { kind: 6 }]));
    expect([...(tracks.all[1]?.exposed.subarray(0, 2) ?? [])]).toEqual([128, 0]);
    expect(tracks.pending).toEqual([]);
    expect(tracks.count).toBe(4);
  });

  it("find the collective that began at a time, the nearest within 2 microseconds", () => {
    const tracks = new Tracks(names), wait = new Track({ name: "wait", rank: 0 });
    tracks.append(1, items([10, 11], [12.5, 13], [20, 21]));
    const place = (t: number): number | undefined => tracks.issue(wait, t)?.k;
    expect([11, 12, 18.5, 17.9, 21.9, 22].map(place)).toEqual([0, 1, 2, undefined, 2, undefined]);
    expect(tracks.issue(new Track({ name: "wait", rank: 1 }), 10)).toBeNull();
  });

  it("no longer expect a collective after 64 additions to its rank", () => {
    const tracks = new Tracks(names);
    tracks.append(2, items([60, 100, { arrowFrom: 20 }]));
    for (let k = 0; k < 62; k++) tracks.append(0, items([1000 + k, 1001 + k]));
    expect(tracks.pending).toHaveLength(1);
    tracks.append(3, items([1, 2])); // to another rank
    expect(tracks.pending).toHaveLength(1);
    tracks.append(0, items([90, 91]));
    expect(tracks.pending).toEqual([]);
  });

  it("drop the earlier half, by time", () => {
    const tracks = new Tracks(names);
    tracks.append(0, items(...Array.from({ length: 100 }, (_, k) => [k, k + 1] as const)));
    tracks.append(1, items(...Array.from({ length: 20 }, (_, k) => [90 + k / 10, 95] as const)));
    tracks.forget();
    expect(tracks.count).toBe(60);
    expect(tracks.all.map(({ start, length }) => (length ? start[0] : null))).toEqual([60, 90, null, null]);
  });
});

describe("the pixels of a track", () => {
  it.each([1, 2, 3])("have the mean colour of what happened in them (%d)", (seed) => {
    const next = random(seed), n = 200, width = 100, look = new Look(), made = new Track(RANK0);
    const rows = Array.from({ length: n }, () => { // some overlap, some leave a gap, some are wide; out of order
      const start = 400 * next(), end = start + (next() < 0.1 ? 30 : 1) * next();
      return [start, end, { kind: 1 + Math.floor(7 * next()), exposed: next() < 0.3 ? Math.floor(256 * next()) : 0 }] as const;
    });
    const colours = ({ red, green, blue }: Look, kind: number): number[] => [red[kind] ?? 0, green[kind] ?? 0, blue[kind] ?? 0];
    const difference = (count: number, t0: number, t1: number): number => {
      let worst = 0;
      const pixels = new Uint32Array(width + 1), step = (t1 - t0) / width;
      paintPixels(made, pixels, 1, width, t0, step, look);
      expect(pixels[0]).toBe(0);
      for (let x = 0; x < width; x++) {
        const begin = t0 + x * step, sum = [0, 0, 0];
        let time = 0;
        for (const [start, end, { kind, exposed }] of rows.slice(0, count)) {
          const turn = end - (end - start) * share(exposed);
          for (const [a, b, drawn] of [[start, turn, kind], [turn, end, 12]] as const) {
            const part = Math.max(Math.min(b, begin + step) - Math.max(a, begin), 0);
            colours(look, drawn).forEach((value, k) => { sum[k] = (sum[k] ?? 0) + part * value; });
            time += part;
          }
        }
        const alpha = time > 1e-6 * step ? Math.min(Math.max(time / step, 0.4), 1) : 0;
        const wanted = alpha ? [...sum.map((part) => part / time), 255 * alpha] : [0, 0, 0, 0];
        const found = [0, 8, 16, 24].map((shift) => ((pixels[x + 1] ?? 0) >>> shift) & 255);
        found.forEach((part, k) => { worst = Math.max(worst, Math.abs(part - (wanted[k] ?? 0))); });
      }
      return worst;
    };
    let from = 0;
    for (const to of [80, 81, n]) {
      made.append(items(...rows.slice(from, to)));
      expect(difference(to, -50, 500)).toBeLessThan(1.01); // sums are brought up to date with what came late
      from = to;
    }
    for (const [t0, t1] of [[100, 150], [390, 600], [600, 700]] as const) expect(difference(n, t0, t1)).toBeLessThan(1.01);
  });

  it("follow what is marked as exposed, and what is dropped", () => {
    const look = new Look(), kindAt = (k: number): number => (k < 30 ? 6 : 7);
    const made = track(RANK0, ...Array.from({ length: 60 }, (_, k) => [k, k + 1, { kind: kindAt(k) }] as const));
    const red = (from: number, to: number): number => { // of one pixel, also of many items
      const pixels = new Uint32Array(1);
      paintPixels(made, pixels, 0, 1, from, to - from, look);
      return (pixels[0] ?? 0) & 255;
    };
    const [gather = 0, reduce = 0, exposed = 0] = [look.red[6], look.red[7], look.red[12]];
    expect([red(0, 30), red(30, 60), red(0, 60)]).toEqual([gather, reduce, Math.round((gather + reduce) / 2)]);
    for (let k = 20; k < 30; k++) made.expose(k, k, k + 1);
    expect([red(20, 30), red(0, 20), red(10, 30)]).toEqual([exposed, gather, Math.round((gather + exposed) / 2)]);
    made.forget(30);
    expect([red(30, 60), red(30, 31)]).toEqual([reduce, reduce]);
  });
});
