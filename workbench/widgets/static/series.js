// Growing columns: the data that the panels draw over time. Times are microseconds from the view's origin.

import { CATEGORIES } from "./events.js";
import { sure } from "./sure.js";

/** @import { MemoryTable, StatesTable, StepsTable } from "./messages.js" */

const MAX_MOMENTS = 20_000; // of memory, per group of ranks; beyond it the older half is dropped
const MAX_CHANGES = 200_000; // of units, per group, all units together
const MAX_STEPS = 50_000;
const LEAST = 64;

/** @typedef {Float64Array | Float32Array | Int32Array | Uint8Array} Column */

/**
 * Position of the last of the first `length` ascending values that is at most `value`; -1 if there is none.
 * @param {Column} values
 * @param {number} length
 * @param {number} value
 */
export function lastUpTo(values, length, value) {
  let low = 0, high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sure(values[middle]) <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** Base of classes with growing columns: the number of valid entries, and the room for them. */
class Growing {
  /** @param {number} most entries; beyond it the older half is dropped */
  constructor(most) {
    this.most = most;
    this.length = 0;
    this.room = LEAST;
  }

  /**
   * Make room for one more entry; returns the columns to use from now on.
   * @template {Record<string, Column>} T
   * @param {T} columns
   * @param {(room: number) => T} make makes new columns
   * @returns {T}
   */
  grown(columns, make) {
    if (this.length === this.most) {
      const half = this.length >> 1;
      for (const values of Object.values(columns)) values.copyWithin(0, (half * values.length) / this.room);
      this.length -= half;
    }
    if (this.length < this.room) return columns;
    this.room = Math.min(2 * this.room, this.most);
    const found = make(this.room);
    for (const [name, values] of Object.entries(columns)) sure(found[name]).set(values);
    return found;
  }
}

/** Live bytes by class of one group of ranks over time. */
export class Memory extends Growing {
  constructor() {
    super(MAX_MOMENTS);
    this.columns = Memory.make(LEAST);
  }

  /** @param {number} room */
  static make(room) {
    return { t: new Float64Array(room), bytes: new Float32Array(room * CATEGORIES.length) };
  }

  /**
   * @param {number} t
   * @param {Float32Array} bytes of each class
   */
  push(t, bytes) {
    this.columns = this.grown(this.columns, (room) => Memory.make(room));
    this.columns.t[this.length] = t;
    this.columns.bytes.set(bytes, this.length * CATEGORIES.length);
    this.length += 1;
  }

  get t() {
    return this.columns.t;
  }

  /**
   * Bytes of each class in entry `k`.
   * @param {number} k
   */
  bytes(k) {
    return this.columns.bytes.subarray(k * CATEGORIES.length, (k + 1) * CATEGORIES.length);
  }
}

/** The states of a unit over time. */
export class StateChanges extends Growing {
  /** @param {number} most */
  constructor(most) {
    super(most);
    this.columns = StateChanges.make(LEAST);
  }

  /** @param {number} room */
  static make(room) {
    return { t: new Float64Array(room), state: new Uint8Array(room) };
  }

  /**
   * @param {number} t
   * @param {number} state
   */
  push(t, state) {
    this.columns = this.grown(this.columns, (room) => StateChanges.make(room));
    this.columns.t[this.length] = t;
    this.columns.state[this.length] = state;
    this.length += 1;
  }

  get t() {
    return this.columns.t;
  }

  get state() {
    return this.columns.state;
  }
}

/** Finished training steps. */
export class Steps extends Growing {
  constructor() {
    super(MAX_STEPS);
    this.columns = Steps.make(LEAST);
  }

  /** @param {number} room */
  static make(room) {
    return { t: new Float64Array(room), step: new Int32Array(room), loss: new Float32Array(room), has_loss: new Uint8Array(room),
      ms: new Float32Array(room), exposed: new Float32Array(room), model: new Int32Array(room) };
  }

  /** @param {StepsTable} table */
  take(table) {
    table.t.forEach((t, k) => {
      this.columns = this.grown(this.columns, (room) => Steps.make(room));
      const { columns, length } = this;
      columns.t[length] = t;
      columns.step[length] = sure(table.step[k]);
      columns.loss[length] = sure(table.loss[k]);
      columns.has_loss[length] = sure(table.has_loss[k]);
      columns.ms[length] = sure(table.ms[k]);
      columns.exposed[length] = sure(table.exposed[k]);
      columns.model[length] = sure(table.model[k]);
      this.length += 1;
    });
  }

  /**
   * Position of the last step that had ended at a time; -1 if none had.
   * @param {number} us
   */
  endedAt(us) {
    return lastUpTo(this.columns.t, this.length, us);
  }

  /**
   * Position of the last step numbered at most `step`; -1 if there is none.
   * @param {number} step
   */
  numbered(step) {
    return lastUpTo(this.columns.step, this.length, step);
  }
}

/** Memory of each group of ranks, and states of each group and unit, as far as received. */
export class History {
  constructor() {
    /** @type {Memory[]} */
    this.memory = [];
    /** @type {StateChanges[][]} */
    this.states = [];
    /** @type {Set<number>} */
    this.classes = new Set(); // classes of memory that held bytes at any time
  }

  /** @param {MemoryTable} table */
  takeMemory({ t, bytes, group }) {
    bytes.forEach((held, k) => { if (held > 0) this.classes.add(k % CATEGORIES.length); });
    t.forEach((when, k) => {
      while (this.memory.length <= sure(group[k])) this.memory.push(new Memory());
      sure(this.memory[sure(group[k])]).push(when, bytes.subarray(k * CATEGORIES.length, (k + 1) * CATEGORIES.length));
    });
  }

  /**
   * @param {StatesTable} table
   * @param {number} numUnits
   */
  takeStates({ t, unit, group, state }, numUnits) {
    const most = Math.max(Math.floor(MAX_CHANGES / Math.max(numUnits, 1)), LEAST);
    t.forEach((when, k) => {
      while (this.states.length <= sure(group[k])) this.states.push([]);
      const units = sure(this.states[sure(group[k])]);
      while (units.length <= sure(unit[k])) units.push(new StateChanges(most));
      sure(units[sure(unit[k])]).push(when, sure(state[k]));
    });
  }
}
