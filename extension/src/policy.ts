/** What the form that shards holds, and the command that it stands for. */
import { HYBRID, type Model, type ModelPolicy, type Reshard, type Shard } from "./protocol";

/** The fields of the form, as they are typed; what is empty stays as it is. Those of the other API wait unseen. */
export interface Policy {
  readonly api: ModelPolicy["api"];
  readonly strategy: ModelPolicy["strategy"];
  readonly origParams: boolean;
  readonly wrap: readonly string[];
  readonly mesh: string;
  readonly reshard: string;
  readonly mp: string;
  /** null: some units are, and stay so. */
  readonly offload: boolean | null;
  readonly prefetch: string;
  readonly ignore: string;
}

/** What `shard` does if it is told nothing. */
const PLAIN: Policy = {
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

/** What the form shows first: what `shard` does with the suggested classes; of a sharded model, how it is now. */
export function standard({ suggested, policy }: Model): Policy {
  if (policy === null) return { ...PLAIN, wrap: suggested };
  const { api, strategy, orig_params: origParams, wrap, mesh, mp, offload } = policy;
  const reshard = String(policy.reshard_after_forward), prefetch = String(policy.prefetch);
  return { api, strategy, origParams, wrap, mesh, reshard, mp, offload, prefetch, ignore: "" };
}

/** Whether a mesh says anything: without copies the classic API shards over all ranks. */
export function hasMesh({ api, strategy }: Policy): boolean {
  return api === "fully_shard" || HYBRID.includes(strategy);
}

/** The command that a form stands for; what is as by default, or of a sharded model as it is now, is left out. */
export function commandOf(model: Model, policy: Policy): Shard | Reshard {
  const isSharded = model.policy !== null;
  const before = isSharded ? standard(model) : PLAIN;
  const mesh = policy.mesh.trim();
  const prefetch = unitsAhead(policy.prefetch);
  const ignore = policy.ignore.split(/[\s,]+/).filter(Boolean);
  return {
    word: isSharded ? "reshard" : "shard",
    model: model.name,
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

/** A precision in the place of another: what that one names besides is off, as a field that is not named stays. */
function instead(mp: string, before: string): string {
  if (mp === "off") return mp;
  const given = mp.split(","), had = before === "" ? ["reduce=", "output="] : before.split(","); // units differ
  const others = ["reduce", "output"].filter(
    (name) => had.some((each) => each.startsWith(`${name}=`)) && !given.some((each) => each.startsWith(`${name}=`)),
  );
  return [...given, ...others.map((name) => `${name}=off`)].join();
}

/** What only the classic API takes. */
function ofClassic(policy: Policy, before: Policy): Pick<Shard, "strategy" | "orig_params"> {
  const { strategy, origParams } = policy;
  return {
    ...(strategy === "" || strategy === before.strategy ? {} : { strategy }),
    ...(origParams === before.origParams ? {} : { orig_params: origParams }),
  };
}

/** What only `fully_shard` takes. */
function ofFullyShard({ reshard }: Policy, before: Policy): Pick<Shard, "reshard_after_forward"> {
  return reshard === before.reshard ? {} : { reshard_after_forward: reshard };
}

/** How many units are gathered ahead by what was typed; null: that is no such number. */
function unitsAhead(typed: string): number | null {
  const number = Math.round(Number(typed));
  return typed.trim() !== "" && number >= 0 ? number : null;
}

function sameNames(some: readonly string[], others: readonly string[]): boolean {
  return [...some].sort().join() === [...others].sort().join();
}
