/** What a kernel tells, after its own examples: a test says of it what it cares about. */
import type { RankState, State, UnitInfo } from "../src/protocol";
import { ANSWERS } from "./answers";

const {
  ranks: [RANK],
  units: [UNIT],
} = ANSWERS.state;

export const STEP: NonNullable<State["request"]> = ANSWERS.state.request;

export function unit(index: number, name: string, more: Partial<UnitInfo> = {}): UnitInfo {
  return { ...UNIT, index, name, ...more };
}

export function rank(number: number, more: Partial<RankState> = {}): RankState {
  return { ...RANK, rank: number, pid: 100 + number, health: "idle", where: "", ...more };
}

/** Two idle ranks that have not been asked anything. */
export function state(more: Partial<State> = {}): State {
  return {
    ...ANSWERS.state,
    number: -1,
    ranks: [rank(0), rank(1)],
    units: [],
    unit_states: [],
    breakpoints: [],
    request: null,
    ended: null,
    ...more,
  };
}

/** Without ranks, or with ranks that come or go: what of the cluster is another than of two that run. */
export function cluster(more: Partial<State["cluster"]>): State["cluster"] {
  return { ...ANSWERS.state.cluster, ...more };
}
