import { expect, it } from "vitest";

import { commandOf, hasMesh, standard } from "../src/policy";
import type { Model } from "../src/protocol";
import { ANSWERS } from "./answers";

const {
  models: [SHARDED],
} = ANSWERS.models;
const NOW = SHARDED.policy;
const MODEL: Model = { ...SHARDED, is_sharded: false, policy: null };

const CLASSIC: Model = { ...SHARDED, policy: { ...NOW, api: "classic", strategy: "hybrid", reshard_after_forward: "auto" } };

it("an untouched form is the command with the suggested classes alone", () => {
  expect(commandOf(MODEL, standard(MODEL))).toEqual({ word: "shard", model: "model", wrap: ["Block"] });
});

it("another engine is named for a model that is not sharded yet", () => {
  const policy = { ...standard(MODEL), engine: "torch" } as const;
  expect(commandOf(MODEL, policy)).toEqual({ word: "shard", model: "model", engine: "torch", wrap: ["Block"] });
  expect(commandOf(SHARDED, { ...standard(SHARDED), engine: "torch" })).toEqual({ word: "reshard", model: "model" });
});

it("every field that was touched is in the command", () => {
  const policy = {
    ...standard(MODEL),
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
    engine: "workbench",
    api: "fully_shard",
    strategy: "hybrid",
    origParams: false,
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
  expect(commandOf(SHARDED, { ...standard(SHARDED), ...off })).toEqual({
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
  const policy = { ...NOW, strategy: "" as const, mesh: "", reshard_after_forward: "", mp: "", offload: null };
  const mixed = { ...SHARDED, policy };
  expect(commandOf(mixed, standard(mixed))).toEqual({ word: "reshard", model: "model" });
  expect(commandOf(mixed, { ...standard(mixed), offload: false, mp: "off" })).toMatchObject({ offload: false, mp: "off" });
});

it("a precision takes the place of another: what that one names besides is off", () => {
  const chosen = (mp: string, before: string): unknown => {
    const model = { ...SHARDED, policy: { ...NOW, mp: before } };
    return commandOf(model, { ...standard(model), mp }).mp;
  };
  expect(chosen("bf16", "bf16,reduce=fp32")).toBe("bf16,reduce=off");
  expect(chosen("fp16", "bf16")).toBe("fp16");
  expect(chosen("bf16,reduce=fp32", "bf16,output=fp32")).toBe("bf16,reduce=fp32,output=off");
  expect(chosen("bf16", "")).toBe("bf16,reduce=off,output=off");
  expect(chosen("off", "bf16,reduce=fp32")).toBe("off");
});

it("classes in another order are the same classes", () => {
  const both = { ...SHARDED, policy: { ...NOW, wrap: ["A", "B"] } };
  expect(commandOf(both, { ...standard(both), wrap: ["B", "A"] })).not.toHaveProperty("wrap");
});

it.each(["", "-1", "many"])("what is no number of units to prefetch, such as %j, asks for none", (prefetch) => {
  expect(commandOf(MODEL, { ...standard(MODEL), prefetch })).not.toHaveProperty("prefetch");
  expect(commandOf(SHARDED, { ...standard(SHARDED), prefetch })).not.toHaveProperty("prefetch");
});

it("with the classic API a model has what that takes, and nothing of fully_shard's", () => {
  const form = { ...standard(MODEL), api: "classic", reshard: "false" } as const;
  expect(commandOf(MODEL, form)).toEqual({ word: "shard", model: "model", api: "classic", wrap: ["Block"] });
  expect(commandOf(MODEL, { ...form, strategy: "grad", origParams: true, prefetch: "1" })).toEqual({
    word: "shard",
    model: "model",
    api: "classic",
    strategy: "grad",
    orig_params: true,
    wrap: ["Block"],
    prefetch: 1,
  });
});

it.each([
  ["full", false],
  ["grad", false],
  ["none", false],
  ["hybrid", true],
  ["hybrid2", true],
] as const)("with the classic API %s has a mesh: %j", (strategy, expected) => {
  const form = { ...standard(MODEL), api: "classic", strategy, mesh: "2x2" } as const;
  expect(hasMesh(form)).toBe(expected);
  expect("mesh" in commandOf(MODEL, form)).toBe(expected);
  expect(hasMesh({ ...form, api: "fully_shard" })).toBe(true);
});

it("from one API to the other a model keeps what there is like it, until something else is chosen", () => {
  const there = { ...standard(SHARDED), api: "classic" } as const;
  expect(commandOf(SHARDED, there)).toEqual({ word: "reshard", model: "model", api: "classic" });
  expect(commandOf(SHARDED, { ...there, strategy: "full", origParams: true, reshard: "false" })).toEqual({
    word: "reshard",
    model: "model",
    api: "classic",
    strategy: "full",
    orig_params: true,
  });
  const back = { ...standard(CLASSIC), api: "fully_shard", strategy: "none", origParams: true } as const;
  expect(commandOf(CLASSIC, back)).toEqual({ word: "reshard", model: "model", api: "fully_shard" });
  expect(commandOf(CLASSIC, { ...back, reshard: "false", mesh: "4" })).toEqual({
    word: "reshard",
    model: "model",
    api: "fully_shard",
    mesh: "4",
    reshard_after_forward: "false",
  });
});

it("of a classic model untouched fields ask for nothing, and pieces can be given up for a flat parameter", () => {
  expect(commandOf(CLASSIC, standard(CLASSIC))).toEqual({ word: "reshard", model: "model" });
  const pieces: Model = { ...CLASSIC, policy: { ...NOW, api: "classic", orig_params: true } };
  expect(commandOf(pieces, { ...standard(pieces), origParams: false })).toMatchObject({ orig_params: false });
});
