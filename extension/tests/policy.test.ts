import { expect, it } from "vitest";

import { commandOf, standard } from "../src/policy";
import type { Model } from "../src/protocol";
import { ANSWERS } from "./answers";

const {
  models: [SHARDED],
} = ANSWERS.models;
const NOW = SHARDED.policy;
const MODEL: Model = { ...SHARDED, is_sharded: false, policy: null };

it("an untouched form is the command with the suggested classes alone", () => {
  expect(commandOf(MODEL, standard(MODEL))).toEqual({ word: "shard", model: "model", wrap: ["Block"] });
});

it("every field that was touched is in the command", () => {
  const policy = {
    wrap: [],
    mesh: " 2x2 ",
    reshard: "false",
    mp: "bf16,reduce=fp32",
    offload: true,
    prefetch: "2",
    ignore: "*.bias, head.*",
  };
  expect(commandOf(MODEL, policy)).toEqual({
    word: "shard",
    model: "model",
    mesh: "2x2",
    reshard_after_forward: "false",
    mp: "bf16,reduce=fp32",
    offload: true,
    prefetch: 2,
    ignore: ["*.bias", "head.*"],
  });
});

it("of a sharded model the form shows how it is, and untouched asks for nothing", () => {
  expect(standard(SHARDED)).toEqual({
    wrap: ["Block"],
    mesh: "2x2",
    reshard: "2",
    mp: "bf16,reduce=fp32",
    offload: true,
    prefetch: "2",
    ignore: "",
  });
  expect(commandOf(SHARDED, standard(SHARDED))).toEqual({ word: "reshard", model: "model" });
});

it("of a sharded model everything can be switched off again", () => {
  const off = { wrap: ["Linear"], mesh: "4", reshard: "auto", mp: "off", offload: false, prefetch: "0", ignore: "*.bias" };
  expect(commandOf(SHARDED, off)).toEqual({
    word: "reshard",
    model: "model",
    wrap: ["Linear"],
    mesh: "4",
    reshard_after_forward: "auto",
    mp: "off",
    offload: false,
    prefetch: 0,
  });
});

it("what the units do not have in common is left to them, until it is chosen", () => {
  const policy = { ...NOW, mesh: "", reshard_after_forward: "", mp: "", offload: null };
  const mixed = { ...SHARDED, policy };
  expect(commandOf(mixed, standard(mixed))).toEqual({ word: "reshard", model: "model" });
  expect(commandOf(mixed, { ...standard(mixed), offload: false, mp: "off" })).toMatchObject({ offload: false, mp: "off" });
});

it("classes in another order are the same classes", () => {
  const both = { ...SHARDED, policy: { ...NOW, wrap: ["A", "B"] } };
  expect(commandOf(both, { ...standard(both), wrap: ["B", "A"] })).not.toHaveProperty("wrap");
});

it.each(["", "-1", "many"])("what is no number of units to prefetch, such as %j, asks for none", (prefetch) => {
  expect(commandOf(MODEL, { ...standard(MODEL), prefetch })).not.toHaveProperty("prefetch");
  expect(commandOf(SHARDED, { ...standard(SHARDED), prefetch })).not.toHaveProperty("prefetch");
});
