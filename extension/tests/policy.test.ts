import { expect, it } from "vitest";

import { commandOf, standard } from "../src/policy";
import type { Model } from "../src/protocol";

const MODEL: Model = {
  name: "model",
  class_name: "GPT",
  is_sharded: false,
  ranks: [0, 1],
  num_params: 10,
  num_elements: 100,
  num_bytes: 400,
  classes: [{ name: "Block", count: 4, num_elements: 80 }],
  suggested: ["Block"],
};

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

it("a sharded model is resharded, and what was not touched stays as it is", () => {
  const sharded = { ...MODEL, is_sharded: true };
  expect(commandOf(sharded, { ...standard(sharded), ignore: "*.bias", reshard: "false" })).toEqual({
    word: "reshard",
    model: "model",
    reshard_after_forward: "false",
  });
});

it.each(["", "-1", "many"])("what is no number of units to prefetch, such as %j, asks for none", (prefetch) => {
  expect(commandOf(MODEL, { ...standard(MODEL), prefetch })).not.toHaveProperty("prefetch");
});
