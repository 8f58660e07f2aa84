/** Fields of the form that shards, and the command made of them. */
import { HYBRID, type Model, type ModelPolicy, type Reshard, type Shard } from "./protocol";

/** The fields of the form as typed; empty ones stay unchanged. Those of the other API are kept while hidden. */
export interface Policy {
  readonly engine: NonNullable<Shard["engine"]>;
  readonly api: ModelPolicy["api"];
  readonly strategy: ModelPolicy["strategy"];
  readonly origParams: boolean;
  readonly wrap: readonly string[];
  readonly mesh: string;
  readonly reshard: string;
  readonly mp: string;
  /** null: some units are offloaded, and stay so. */
  readonly offload: boolean | null;
  readonly prefetch: string;
  readonly ignore: string;
}

/** The defaults of `shard`. */
const PLAIN: Policy = {
  engine: "workbench",
  api: "fully_shard",
  strategy: "full",
  origParams: false,
  wrap: [],
  mesh: "",
  reshard: "auto",
  mp: "off",
  offload: false,
  prefetch: "0",
  ignore: "",
};

/** Initial values of the form: the defaults of `shard` with the suggested classes, or a sharded model's policy. */
export function standard({ suggested, policy }: Model): Policy {
  if (policy === null) return { ...PLAIN, wrap: suggested };
  const { api, strategy, orig_params: origParams, wrap, mesh, mp, offload } = policy;
  const reshard = String(policy.reshard_after_forward), prefetch = String(policy.prefetch);
  return { engine: PLAIN.engine, api, strategy, origParams, wrap, mesh, reshard, mp, offload, prefetch, ignore: "" };
}

/** Whether a mesh applies: without copies the classic API shards over all ranks. */
export function hasMesh({ api, strategy }: Policy): boolean {
  return api === "fully_shard" || HYBRID.includes(strategy);
}

/** The command of a form, without defaults, or without values that a sharded model already has. */
export function commandOf(model: Model, policy: Policy): Shard | Reshard {
  const isSharded = model.policy !== null;
  const before = isSharded ? standard(model) : PLAIN;
  const mesh = policy.mesh.trim();
  const prefetch = unitsAhead(policy.prefetch);
  const ignore = policy.ignore.split(/[\s,]+/).filter(Boolean);
  return {
    word: isSharded ? "reshard" : "shard",
    model: model.name,
    ...(isSharded || policy.engine === before.engine ? {} : { engine: policy.engine }),
    ...(policy.api === before.api ? {} : { api: policy.api }),
    ...(policy.api === "classic" ? ofClassic(policy, before) : ofFullyShard(policy, before)),
    ...(policy.wrap.length === 0 || sameNames(policy.wrap, before.wrap) ? {} : { wrap: policy.wrap }),
    ...(!hasMesh(policy) || mesh === "" || mesh === before.mesh ? {} : { mesh }),
    ...(policy.mp === before.mp ? {} : { mp: isSharded ? instead(policy.mp, before.mp) : policy.mp }),
    ...(policy.offload === null || policy.offload === before.offload ? {} : { offload: policy.offload }),
    ...(prefetch === null || prefetch === unitsAhead(before.prefetch) ? {} : { prefetch }),
    ...(!isSharded && ignore.length > 0 ? { ignore } : {}),
  };
}

/** A precision that replaces another: fields that only the old one names become off, as unnamed fields stay. */
function instead(mp: string, before: string): string {
  if (mp === "off") return mp;
  const given = mp.split(","), had = before === "" ? ["reduce=", "output="] : before.split(","); // units differ
  const others = ["reduce", "output"].filter(
    (name) => had.some((each) => each.startsWith(`${name}=`)) && !given.some((each) => each.startsWith(`${name}=`)),
  );
  return [...given, ...others.map((name) => `${name}=off`)].join();
}

/** Arguments of the classic API only. */
function ofClassic(policy: Policy, before: Policy): Pick<Shard, "strategy" | "orig_params"> {
  const { strategy, origParams } = policy;
  return {
    ...(strategy === "" || strategy === before.strategy ? {} : { strategy }),
    ...(origParams === before.origParams ? {} : { orig_params: origParams }),
  };
}

/** Arguments of `fully_shard` only. */
function ofFullyShard({ reshard }: Policy, before: Policy): Pick<Shard, "reshard_after_forward"> {
  return reshard === before.reshard ? {} : { reshard_after_forward: reshard };
}

/** The typed number of units to gather ahead; null: invalid. */
function unitsAhead(typed: string): number | null {
  const number = Math.round(Number(typed));
  return typed.trim() !== "" && number >= 0 ? number : null;
}

function sameNames(some: readonly string[], others: readonly string[]): boolean {
  return [...some].sort().join() === [...others].sort().join();
}
