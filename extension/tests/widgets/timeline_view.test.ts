import { describe, expect, it } from "vitest";

import { Axis } from "../../../workbench/widgets/static/axis.js";
import { holdAt, itemAt, nextEdge } from "../../../workbench/widgets/static/timeline/find_item.js";
import { describe as describeItem, exposure, tipLines } from "../../../workbench/widgets/static/timeline/item_words.js";
import { OTHER, laneBox, placeLegend, placeRows, rowAt } from "../../../workbench/widgets/static/timeline/row_layout.js";
import { Tracks } from "../../../workbench/widgets/static/timeline/tracks.js";
import { ViewRange } from "../../../workbench/widgets/static/timeline/view_range.js";
import { items, track } from "./made";

const view = ({ t0, t1 }: ViewRange): [number, number] => [t0, t1];

describe("the range in view", () => {
  function range(): ViewRange {
    const made = new ViewRange();
    made.include(items([100, 200], [150, 1100]));
    return made;
  }

  it("is the whole record with margins until it is moved", () => {
    const made = range();
    expect(view(made)).toEqual([80, 1120]);
    made.include(items([50, 60]));
    expect(view(made)).toEqual([29, 1121]);
    made.show(200, 400);
    made.include(items([0, 2000]));
    expect([...view(made), made.low, made.high]).toEqual([200, 400, 0, 2000]);
    made.fit();
    expect(view(made)).toEqual([-40, 2040]);
    made.include(items([2000, 3000])); // it is not moved any more
    expect(view(made)).toEqual([-60, 3060]);
  });

  it("takes what it is given before anything is recorded", () => {
    const made = new ViewRange();
    made.show(5, 10);
    expect([...view(made), made.isEmpty]).toEqual([5, 10, true]);
  });

  it("stays within half a view of the record, and shows at least half a microsecond of it", () => {
    const made = range();
    made.show(-1000, -800);
    expect(view(made)).toEqual([-20, 180]); // the record's begin, less the margin, is in the middle
    made.show(5000, 5200);
    expect(view(made)).toEqual([1020, 1220]);
    made.show(-5000, 9000);
    expect(view(made)).toEqual([80, 1120]);
    made.show(500, 500.1);
    expect(view(made)).toEqual([499.8, 500.3]);
  });

  it("keeps its zoom while it follows the end", () => {
    const made = range();
    made.show(200, 400);
    made.follow(true);
    expect(view(made)).toEqual([904, 1104]);
    made.include(items([1100, 1300]));
    expect(view(made)).toEqual([1104, 1304]);
    made.follow(false);
    made.include(items([1300, 1500]));
    expect(view(made)).toEqual([1104, 1304]);
  });

  it("is all of a record that is shorter than the view while it follows", () => {
    const made = range();
    made.show(100, 1100);
    made.follow(true);
    expect(view(made)).toEqual([80, 1120]);
  });

  it("zooms around a time, and says whether that changed anything", () => {
    const made = range();
    made.show(200, 400);
    expect(made.zoom(0.5, 250)).toBe(true);
    expect(view(made)).toEqual([225, 325]);
    expect(made.zoom(1e-9, 250)).toBe(true);
    expect(made.span).toBeCloseTo(0.5, 9);
    made.fit();
    expect(made.zoom(2, 600)).toBe(false);
  });

  it("takes the ends of a record that has more than its items", () => {
    const made = range();
    expect(made.setRecord(0, 2000)).toBe(true);
    expect([made.low, made.high, ...view(made)]).toEqual([0, 2000, -40, 2040]);
    expect(made.setRecord(0, 1500)).toBe(false);
    expect(made.setRecord(500, 1500)).toBe(true);
    expect([made.low, made.high]).toEqual([500, 2000]);
  });

  it("knows its edges", () => {
    const made = range();
    made.show(200, 400);
    expect([203, 204, 396, 397].map((t) => made.isWellInView(t))).toEqual([false, true, true, false]);
    expect([99, 100, 500, 1101].map((t) => made.clamp(t))).toEqual([100, 100, 500, 1100]);
  });
});

const TRACKS = [
  track({ name: "compute", rank: 0 }, [0, 100, { unit: 0 }], [100, 200, { unit: 1 }]),
  track({ name: "other", rank: 0 }),
  track({ name: "compute", rank: 1 }, [0, 50], [40, 90]),
];

describe("rows", () => {
  const { rows, left, bottom } = placeRows(TRACKS, ({ length }) => length > 0, 1200, OTHER);

  it("are placed by rank, without tracks that no rank uses", () => {
    expect(rows.map(({ index, y, height }) => [index, y, height])).toEqual([[0, 34, 20], [2, 65, 20]]);
    expect([left, bottom]).toEqual([168, 90]);
    expect(placeRows(TRACKS, ({ length }) => length > 0, 559, OTHER).left).toBe(104);
  });

  it("of a track that one rank uses are there for all ranks", () => {
    expect(placeRows(TRACKS, (_, index) => index === 1, 1200, OTHER).rows.map(({ index }) => index)).toEqual([1]);
    expect(placeRows(TRACKS, (_, index) => index === 2, 1200, OTHER).rows.map(({ index }) => index)).toEqual([0, 2]);
  });

  it("get lower where there are many", () => {
    const many = (count: number): number | undefined =>
      placeRows(Array.from({ length: count }, (_, rank) => track({ name: "compute", rank }, [0, 1])), () => true, 1200, OTHER).rows[0]?.height;
    expect([10, 32, 40, 100].map(many)).toEqual([20, 18, 14, 12]);
  });

  it("reach one pixel beyond what is drawn", () => {
    expect([32, 33, 54, 55, 64, 85, 86].map((y) => rowAt(rows, y))).toEqual([-1, 0, 0, -1, 1, 1, -1]);
  });

  it("have two lanes", () => {
    const [row] = rows;
    if (!row) throw new Error("no row");
    expect([0, 1, 2].map((lane) => laneBox(row, lane))).toEqual([{ y: 34, height: 20 }, { y: 34, height: 9.5 }, { y: 44.5, height: 9.5 }]);
  });
});

describe("the legend", () => {
  const entries = [1, 2, 3].map((kind) => ({ kind, text: `kind ${kind}`, textWidth: 68 })); // 100 pixels each

  it("is below the plot", () => {
    const { legend, height } = placeLegend(entries, { left: 168, bottom: 90, width: 1000 });
    expect(legend.map(({ x, y }) => [x, y])).toEqual([[168, 102], [268, 102], [368, 102]]);
    expect(height).toBe(128);
  });

  it("begins further left if it then fits, and is wrapped if it does not", () => {
    expect(placeLegend(entries, { left: 168, bottom: 90, width: 400 }).legend[0]?.x).toBe(100);
    const { legend, height } = placeLegend(entries, { left: 168, bottom: 90, width: 200 });
    expect(legend.map(({ x, y }) => [x, y])).toEqual([[4, 102], [104, 102], [4, 122]]);
    expect(height).toBe(148);
  });
});

describe("the item at a point", () => {
  const { rows } = placeRows(TRACKS, ({ length }) => length > 0, 1200, OTHER);
  const axis = new Axis({ left: 168, width: 1000 }, [0, 1000]); // a microsecond is a pixel
  const at = (x: number, y: number, open: Parameters<typeof itemAt>[0]["open"] = []): number | undefined => itemAt({ rows, axis, open }, x, y)?.k;

  it("is the nearest one within 3 pixels", () => {
    expect([168, 250, 268, 300, 368, 371].map((x) => at(x, 40))).toEqual([0, 0, 1, 1, 1, 1]);
    expect([at(371.5, 40), at(167, 40), at(250, 60)]).toEqual([undefined, undefined, undefined]);
  });

  it("is the one of the pointer's half of the row", () => {
    expect([at(168 + 45, 67), at(168 + 45, 83)]).toEqual([0, 1]);
    expect(at(168 + 20, 83)).toBe(0); // no item is below
  });

  it("is first one that has not ended", () => {
    const open = items([100, 150]);
    const found = itemAt({ rows, axis, open: [open] }, 168 + 120, 40);
    expect([found?.items, found?.k]).toEqual([open, 0]);
    expect(itemAt({ rows, axis, open: [open] }, 168 + 154, 40)?.items).toBe(TRACKS[0]);
  });
});

describe("holds and edges", () => {
  it("a hold is found within 4 pixels", () => {
    const axis = new Axis({ left: 0, width: 100 }, [0, 100]), holds = [[10, 500], [50, 700]] as const;
    expect([5, 6, 14, 15, 46].map((x) => holdAt(holds, axis, x)?.[1])).toEqual([undefined, 500, 500, undefined, 700]);
  });

  it("the next begin or end is of any of the tracks", () => {
    const [first, , last] = TRACKS, both = [first, last].flatMap((each) => each ?? []);
    expect([0, 40, 90, 199].map((t) => nextEdge(both, t, 1))).toEqual([40, 50, 100, 200]);
    expect([200, 100, 45].map((t) => nextEdge(both, t, -1))).toEqual([100, 90, 40]);
    expect([nextEdge(both, 200, 1), nextEdge(both, 0, -1)]).toEqual([null, null]);
  });
});

describe("an item in words", () => {
  const tracks = new Tracks([{ name: "all-gather", rank: 0 }, { name: "wait", rank: 0 }]);
  tracks.append(0, items([10, 110, { kind: 6, unit: 1, bytes: 2048 }]));
  tracks.append(1, items([90, 110, { kind: 12, arrowFrom: 10 }]));
  const { rows } = placeRows(tracks.all, () => true, 1200, OTHER);
  const found = (row: number, k = 0): ReturnType<typeof describeItem> => {
    const place = rows[row];
    if (!place) throw new Error("no row");
    return describeItem({ row: place, items: place.track, k }, tracks, ["a", "b"]);
  };

  it("says what it is, of which unit, and how much of it was waited for", () => {
    expect(found(0)).toMatchObject({ title: "all-gather of b", duration: 100, isCommunication: true, isExposed: true, hasEnded: true, bytes: 2048 });
    expect(tipLines(found(0))).toEqual(["all-gather of b", "2.00 KiB \u00b7 100 \u00b5s", "20.0 \u00b5s exposed, 80.0 \u00b5s hidden", "rank 0, from 10.0 \u00b5s"]);
  });

  it("says what a wait is for", () => {
    expect(tipLines(found(1))).toEqual(["wait for all-gather", "20.0 \u00b5s", "exposed: compute waited", "rank 0, from 90.0 \u00b5s"]);
  });

  it("says that an item has not ended, and the number of a unit without a name", () => {
    const [row] = rows;
    if (!row) throw new Error("no row");
    const open = describeItem({ row, items: items([5, 9, { kind: 1, unit: 7 }]), k: 0 }, tracks, ["a", "b"]);
    expect(tipLines(open)).toEqual(["forward of unit 7", "4.00 \u00b5s, not ended", "rank 0, from 5.00 \u00b5s"]);
  });

  it.each([
    [0, false, "hidden behind compute"], [0, true, "exposed: compute waited for it"], [99.6, true, "exposed: compute waited for all of it"],
    [99.5, true, "99.5 \u00b5s exposed, 0.50 \u00b5s hidden"],
  ])("%d of 100 us exposed (%s)", (exposed, isExposed, text) => { expect(exposure({ duration: 100, exposed, isExposed })).toBe(text); });
});
