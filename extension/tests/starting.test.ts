import { expect, it } from "vitest";

import { commandOf, hasMore, PLAIN, type Wanted, withWord } from "../src/starting";

const START: Wanted = { ...PLAIN, ranks: "4", device: "auto" };
const ATTACH: Wanted = { ...START, word: "attach", ranks: "" };

it("what is not filled in is left to the command", () => {
  expect(commandOf(START)).toEqual({ word: "start", num_ranks: 4 });
  expect(commandOf(ATTACH)).toEqual({ word: "attach" });
});

it("everything that is filled in is in the command, of what goes with its word", () => {
  const all = { ranks: " 8", device: "cpu", profile: " mine ", interface: "eth1", engines: "ssh", clusterId: "one", file: "c.json", take: true } as const;
  expect(commandOf({ ...START, ...all })).toEqual({
    word: "start",
    num_ranks: 8,
    device: "cpu",
    profile: "mine",
    interface: "eth1",
    engines: "ssh",
  });
  expect(commandOf({ ...ATTACH, ...all })).toEqual({
    word: "attach",
    num_ranks: 8,
    device: "cpu",
    profile: "mine",
    interface: "eth1",
    cluster_id: "one",
    file: "c.json",
    take: true,
  });
});

it.each(["0", "-1", "2.5", "x", "1025"])("%s is no number of ranks", (ranks) => {
  expect(commandOf({ ...START, ranks })).toBeNull();
  expect(commandOf({ ...ATTACH, ranks })).toBeNull();
});

it("what few need is in sight where it is set", () => {
  expect([START, ATTACH].map(hasMore)).toEqual([false, false]);
  expect(hasMore({ ...START, engines: "mpi" })).toBe(true);
  expect(hasMore({ ...START, profile: "mine" })).toBe(true);
  expect(hasMore({ ...ATTACH, profile: "mine" })).toBe(false); // it has a field that is always there
  expect(hasMore({ ...ATTACH, take: true })).toBe(true);
});

it("a profile of a cluster is not one to start processes with, nor the other way round", () => {
  const typed = { ...ATTACH, profile: "running", file: "c.json" };
  const start = withWord(typed, "start", 4);
  expect(commandOf(start)).toEqual({ word: "start", num_ranks: 4 });
  expect(hasMore(start)).toBe(false);
  expect(commandOf(withWord({ ...START, profile: "mine" }, "attach", 4))).toEqual({ word: "attach" });
  expect(withWord(start, "attach", 4).file).toBe("c.json");
});

it("ranks are started only if it is said how many", () => {
  expect(commandOf({ ...START, ranks: "" })).toBeNull();
});
