/** What a kernel tells, with what a test does not care about filled in. */
import type { RankState, State, UnitInfo } from "../src/protocol";

export function unit(index: number, name: string, more: Partial<UnitInfo> = {}): UnitInfo {
  return {
    index,
    name,
    root: 0,
    num_params: 2,
    bytes_unsharded: 4096,
    bytes_at_rest: 1024,
    bytes_padding: 0,
    shard_size: 4,
    replicate_size: 1,
    reshard_after_forward: "true",
    compute_dtype: "float32",
    reduce_dtype: "float32",
    offload: false,
    ...more,
  };
}

export function rank(number: number, more: Partial<RankState> = {}): RankState {
  return {
    rank: number,
    health: "idle",
    where: "",
    host: "here",
    device: "cpu",
    pid: 100 + number,
    num_bytes: [1024],
    in_use: 1024,
    peak_bytes: 2048,
    peak_bytes_by_class: [2048],
    peak: "",
    ...more,
  };
}

export function state(more: Partial<State> = {}): State {
  return {
    word: "state",
    number: -1,
    cluster: { is_running: true, num_ranks: 2, device: "cpu", profile: "", host: "here", kernel_pid: 1 },
    ranks: [rank(0), rank(1)],
    units: [],
    unit_states: [],
    breakpoints: [],
    request: null,
    training: { step: -1, loss: null, steps_per_s: null, tokens_per_s: null },
    ended: null,
    said: "",
    ...more,
  };
}

export const STEP: NonNullable<State["request"]> = {
  line: "%fsdp step 40",
  is_stopped: false,
  stop: "",
  reasons: [],
  in_background: true,
  steps_done: 11,
  steps_total: 40,
};
