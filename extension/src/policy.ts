/** What the form that shards holds, and the command that it stands for. */
import type { Model, Reshard, Shard } from "./protocol";

/** The fields of the form, as they are typed; what is empty stays as it is. */
export interface Policy {
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
const PLAIN: Policy = { wrap: [], mesh: "", reshard: "auto", mp: "off", offload: false, prefetch: "0", ignore: "" };

/** What the form shows first: what `shard` does with the suggested classes; of a sharded model, how it is now. */
export function standard({ suggested, policy }: Model): Policy {
  if (policy === null) return { ...PLAIN, wrap: suggested };
  const { wrap, mesh, mp, offload } = policy;
  const reshard = String(policy.reshard_after_forward), prefetch = String(policy.prefetch);
  return { wrap, mesh, reshard, mp, offload, prefetch, ignore: "" };
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
    ...(policy.wrap.length === 0 || sameNames(policy.wrap, before.wrap) ? {} : { wrap: policy.wrap }),
    ...(mesh === "" || mesh === before.mesh ? {} : { mesh }),
    ...(policy.reshard === before.reshard ? {} : { reshard_after_forward: policy.reshard }),
    ...(policy.mp === before.mp ? {} : { mp: policy.mp }),
    ...(policy.offload === null || policy.offload === before.offload ? {} : { offload: policy.offload }),
    ...(prefetch === null || prefetch === unitsAhead(before.prefetch) ? {} : { prefetch }),
    ...(!isSharded && ignore.length > 0 ? { ignore } : {}),
  };
}

/** How many units are gathered ahead by what was typed; null: that is no such number. */
function unitsAhead(typed: string): number | null {
  const number = Math.round(Number(typed));
  return typed.trim() !== "" && number >= 0 ? number : null;
}

function sameNames(some: readonly string[], others: readonly string[]): boolean {
  return [...some].sort().join() === [...others].sort().join();
}
