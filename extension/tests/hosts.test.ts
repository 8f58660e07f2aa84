import { expect, it } from "vitest";

import { clockOf, doing, FEW, hosts } from "../src/hosts";
import type { RankState } from "../src/protocol";
import { hostsInWords } from "../src/words";
import { ANSWERS } from "./answers";

const [EXAMPLE] = ANSWERS.state.ranks;

/** Ranks on hosts of four each. */
function ranks(number: number, odd: Partial<Record<number, Partial<RankState>>> = {}): readonly RankState[] {
  return Array.from({ length: number }, (_, rank) => ({ ...EXAMPLE, rank, host: `node${Math.floor(rank / 4)}`, ...odd[rank] }));
}

const numbers = (all: readonly RankState[]): readonly (readonly number[])[] =>
  hosts(all).flatMap(({ rows }) => rows.map((row) => row.ranks.map(({ rank }) => rank)));

it("of few ranks each has a row, by its host", () => {
  const few = ranks(FEW);
  expect(numbers(few)).toEqual(few.map(({ rank }) => [rank]));
  expect(hosts(few).map(({ name, ranks: there }) => [name, there.length])).toEqual([["node0", 4], ["node1", 4], ["node2", 4], ["node3", 4]]);
});

it("of many ranks those at work are one row a host, and each that is gone or stands elsewhere is its own", () => {
  const many = ranks(FEW + 4, {
    1: { health: "waiting", where: "all-gather of blocks.1, step 3" },
    2: { where: "backward of blocks.0, step 2" },
    5: { health: "gone", where: "died" },
    9: { health: "held", where: "before forward of blocks.1, step 3" },
    10: { health: "held", where: "before forward of blocks.1, step 3" },
    11: { health: "held", where: "before forward of blocks.0, step 3" },
  });
  expect(numbers(many)).toEqual([[0, 1, 2, 3], [4, 6, 7], [5], [8], [9, 10], [11], [12, 13, 14, 15], [16, 17, 18, 19]]);
});

it("what several ranks do is counted", () => {
  expect(doing(ranks(4))).toBe("running");
  expect(doing(ranks(4, { 1: { health: "waiting" }, 3: { health: "waiting" } }))).toBe("2 running, 2 waiting");
});

it("how exact the times of a host are is said of its clock, unless that is rank 0's", () => {
  const clocks = [{ ranks: [4, 5, 6, 7], error_ns: 40_000, text: "its clock is 5.00 ms behind rank 0's, \u00b1 40.0 \u00b5s" }];
  const [first, second] = hosts(ranks(8)).map((host) => clockOf(host, clocks));
  expect(first).toBeNull();
  expect(second).toEqual({ note: "clock \u00b1 40.0 \u00b5s", text: clocks[0]?.text });
});

it("one host is named, and several are counted", () => {
  expect(hostsInWords(ranks(2))).toBe("node0");
  expect(hostsInWords(ranks(12))).toBe("3 hosts");
  expect(hostsInWords([])).toBe("");
});
