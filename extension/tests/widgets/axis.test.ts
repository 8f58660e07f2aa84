import { describe, expect, it } from "vitest";

import { Axis, cursorTime, niceStep } from "../../../workbench/widgets/static/axis.js";

describe("an axis", () => {
  const axis = new Axis({ left: 100, width: 400 }, [1000, 3000]);

  it("maps times to pixels and back", () => {
    expect([1000, 2000, 3000, 500].map((t) => axis.x(t))).toEqual([100, 300, 500, 0]);
    expect([100, 300, 500, 0].map((x) => axis.t(x))).toEqual([1000, 2000, 3000, 500]);
    expect([axis.span, axis.right]).toEqual([2000, 500]);
  });

  it("shows both ends of its time", () => {
    expect([999, 1000, 3000, 3001].map((t) => axis.shows(t))).toEqual([false, true, true, false]);
  });

  it("labels multiples of a round number, at least 110 pixels apart", () => {
    expect(axis.ticks()).toEqual([{ t: 1000, text: "1 ms" }, { t: 2000, text: "2 ms" }, { t: 3000, text: "3 ms" }]);
    const fine = new Axis({ left: 0, width: 1100 }, [-0.5, 1.5]).ticks();
    expect(fine.map(({ text }) => text)).toEqual(["-0.4 \u00b5s", "-0.2 \u00b5s", "0.0 \u00b5s", "0.2 \u00b5s", "0.4 \u00b5s", "0.6 \u00b5s",
      "0.8 \u00b5s", "1.0 \u00b5s", "1.2 \u00b5s", "1.4 \u00b5s"]);
  });

  it("has no negative zero", () => {
    const [first] = new Axis({ left: 0, width: 220 }, [-1e-12, 2]).ticks();
    expect(first?.text).toBe("0 \u00b5s");
  });
});

it.each([[1, 1], [1.1, 2], [2, 2], [2.1, 5], [5, 5], [5.1, 10], [0.03, 0.05], [700, 1000]])("the round number above %d is %d", (us, wanted) => {
  expect(niceStep(us)).toBeCloseTo(wanted, 12);
});

it.each([
  [1500, 100_000, "1.5 ms"], [1600, 1_000_000, "2 ms"], [1500, 1000, "1.500 ms"], [2.5, 1e-9, "2.5000000 \u00b5s"], [2e6, 1e6, "2.000 s"],
])("the time %d in a view of %d us", (us, span, text) => { expect(cursorTime(us, span)).toBe(text); });
