/** What the form that shards holds, and the command that it stands for. */
import type { Model, Reshard, Shard } from "./protocol";

/** The fields of the form, as they are typed. */
export interface Policy {
  readonly wrap: readonly string[];
  readonly mesh: string;
  readonly reshard: string;
  readonly mp: string;
  readonly offload: boolean;
  readonly prefetch: string;
  readonly ignore: string;
}

/** What the form shows first: what `shard` does if it is told nothing; of a sharded model, that all stays as it is. */
export function standard(model: Model): Policy {
  return { wrap: model.is_sharded ? [] : model.suggested, mesh: "", reshard: "auto", mp: "off", offload: false, prefetch: "0", ignore: "" };
}

/** The command that a form stands for; what is as by default is left out. */
export function commandOf({ name, is_sharded: isSharded }: Model, policy: Policy): Shard | Reshard {
  const prefetch = Math.max(0, Math.round(Number(policy.prefetch)) || 0);
  const ignore = policy.ignore.split(/[\s,]+/).filter(Boolean);
  return {
    word: isSharded ? "reshard" : "shard",
    model: name,
    ...(policy.wrap.length > 0 ? { wrap: policy.wrap } : {}),
    ...(policy.mesh.trim() === "" ? {} : { mesh: policy.mesh.trim() }),
    ...(policy.reshard === "auto" ? {} : { reshard_after_forward: policy.reshard }),
    ...(policy.mp === "off" ? {} : { mp: policy.mp }),
    ...(policy.offload ? { offload: true } : {}),
    ...(prefetch > 0 ? { prefetch } : {}),
    ...(!isSharded && ignore.length > 0 ? { ignore } : {}),
  };
}
