import { describe, expect, it } from "vitest";

import { formatBytes, formatDuration, formatLoss, formatShare, formatTick, ranksInWords, ranksWithin, shorten, timeUnit } from "../../../workbench/widgets/static/format.js";
import { BYTES, DURATIONS, RANKS, SHARES } from "./python_cases";

describe("numbers and ranks as Python's views write them", () => {
  it.each(BYTES)("%d bytes", (bytes, text) => { expect(formatBytes(bytes)).toBe(text); });
  it.each(DURATIONS)("%d microseconds", (us, text) => { expect(formatDuration(us)).toBe(text); });
  it.each(SHARES)("a share of %d", (share, text) => { expect(formatShare(share)).toBe(text); });
  it.each(RANKS)("ranks %j", (ranks, text) => { expect(ranksInWords(ranks)).toBe(text); });
});

describe("the dashboard's own formats", () => {
  it.each([
    [0, "0"], [512, "512 B"], [100 * 1024, "100 KiB"], [1.5 * 2 ** 20, "1.5 MiB"], [2 ** 21, "2 MiB"], [1.25 * 2 ** 30, "1.25 GiB"],
  ])("%d bytes on a scale have no needless digits", (bytes, text) => { expect(formatTick(bytes)).toBe(text); });

  it.each([
    [NaN, "NaN"], ["nan", "NaN"], [Infinity, "inf"], ["inf", "inf"], [-Infinity, "-inf"], ["-inf", "-inf"], [0, "0.000"],
    [2.303, "2.303"], [1e-3, "0.001000"], [9.99e-4, "9.990e-4"], [9999, "9999"], [1e4, "1.000e+4"], [-3.975e-6, "-3.975e-6"],
  ] as const)("a loss of %s", (loss, text) => { expect(formatLoss(loss)).toBe(text); });

  it.each([[0, 1], [999.9, 1], [1e3, 1e3], [-1e3, 1e3], [999_999, 1e3], [1e6, 1e6]])("the unit for %d us", (us, divisor) => {
    expect(timeUnit(us)[0]).toBe(divisor);
  });

  it.each([
    ["model.layers.0", "\u2026layers.0"], ["model.layers.10", "\u2026layers.10"], ["blocks.2", "blocks.2"], ["0123456789", "0123456789"],
    ["0123456789a", "\u202623456789a"],
  ])("%s is cut at its begin, and no point begins the rest", (name, text) => { expect(shorten(name, 10)).toBe(text); });

  it("says only the number of ranks if there is no room for more", () => {
    expect(ranksWithin([0, 1, 2, 5], 12)).toBe("ranks 0-2, 5");
    expect(ranksWithin([0, 1, 2, 5], 11)).toBe("4 ranks");
  });
});
