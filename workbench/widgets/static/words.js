// What the dashboard says, as texts, without any drawing.

import { CATEGORIES, UNIT_STATE } from "./events.js";
import { formatBytes, formatDuration, formatLoss, formatShare, ranksInWords } from "./format.js";
import { sure } from "./sure.js";

/** @import { Costs, KnobEffect, Moment, PeakInfo, RankHealth, RunStatus } from "./messages.js" */
/** @import { RunModel } from "./model.js" */

export const NONE = "\u2013";

const BADGES = {
  training: ["\u25b6", "training"], stuck: ["\u26a0", "stuck"], stopped: ["\u275a\u275a", "stopped"], idle: ["\u25cf", "idle"],
  recorded: ["\u25b6", "recorded run continues"], over: ["\u25cb", "end of recording"], dead: ["\u2715", "ranks died"], empty: ["\u25cb", "nothing yet"],
};

/** @typedef {"loss" | "ms" | "exposed"} StepValue a column of steps */

/** @typedef {{ state: RankHealth["state"] | "", label: string, text: string }} RankLine `state`: empty if of the past */

/**
 * The given parts that are not empty, with a dot between them.
 * @param {readonly string[]} parts
 */
export function dotted(parts) {
  return parts.filter(Boolean).join(" \u00b7 ");
}

/**
 * The run's status in a word, with a sign.
 * @param {RunStatus | null} status
 */
export function badge(status) {
  return status === null ? "" : BADGES[status.word].join(" ");
}

/**
 * A status for screen readers. They hear of a new `key`, not of every number that changes; another place is news.
 * @param {RunStatus} status
 */
export function announcement({ word, why }) {
  const isPlace = word === "stopped" || word === "dead";
  return { key: isPlace ? `${word} ${why}` : word, text: [BADGES[word][1], why].filter(Boolean).join(": ") };
}

/**
 * The time that is shown, and its event. A live view has nothing to show before the first step while a sentence says so.
 * @param {Moment | null} at
 * @param {boolean} isLive
 * @param {string} sentence
 * @param {string} why of the run's status, which may name the step
 */
export function headline(at, isLive, sentence, why = "") {
  if (!at || (isLive && at.step === -1 && sentence !== "")) return { when: "", event: "" };
  const step = at.step < 0 || (isLive && why.startsWith(`step ${at.step} `)) ? "" : `step ${at.step}`;
  return { when: dotted([step, formatDuration(at.t_us)]), event: at.event };
}

/**
 * The ranks, alike ones together: how they are, and what they did at the time that is shown. Dead ones come first, as
 * there may be no room for all.
 * @param {readonly RankHealth[]} health
 * @param {Moment | null} at
 * @param {boolean} isLive
 * @returns {RankLine[]}
 */
export function rankLines(health, at, isLive) {
  const isGone = (/** @type {RankHealth} */ { state }) => Number(state === "gone");
  const now = [...health].sort((a, b) => isGone(b) - isGone(a))
    .map(({ state, label, where }) => ({ state, label, text: where ? `held ${where}` : state }));
  /** @type {RankLine[]} */
  const then = (at?.ranks ?? []).map(({ label, doing: text }) => ({ state: "", label, text }));
  const [first] = health;
  if (!isLive || !first) return [...now, ...then];
  if (health.length > 1 || first.where || first.state === "idle" || !then.length) return now;
  return then.map(({ label, text }) => ({ state: first.state, label, text: `${first.state} \u00b7 ${text}` }));
}

/**
 * Which units are unsharded on which ranks at a moment, and which ranks have died.
 * @param {RunModel} model
 * @param {Moment | null} at
 */
export function unshardedWords({ health, order, units }, at) {
  const gone = health.filter(({ state }) => state === "gone").flatMap(({ ranks }) => ranks);
  /** @type {Map<string, number[]>} */
  const unsharded = new Map(); // by the names of units: the ranks that have them
  for (const { ranks, units: states } of at?.ranks ?? []) {
    const living = ranks.filter((rank) => !gone.includes(rank));
    const full = order.filter((unit) => states[unit] === UNIT_STATE.UNSHARDED).map((unit) => sure(units[unit]));
    const names = full.join(", ") || "none";
    if (living.length) unsharded.set(names, [...unsharded.get(names) ?? [], ...living].sort((a, b) => a - b));
  }
  const found = [...unsharded].map(([names, ranks]) => `unsharded on ${ranksInWords(ranks)}: ${names}`);
  return dotted([...found, gone.length ? `${ranksInWords(gone)} gone` : ""]);
}

/**
 * The highest of some peaks; null if there are none.
 * @param {readonly PeakInfo[]} peaks
 */
export function highestPeak(peaks) {
  const [first, ...others] = peaks;
  return first ? others.reduce((best, peak) => (peak.num_bytes > best.num_bytes ? peak : best), first) : null;
}

/** @param {PeakInfo} peak */
export function peakWords({ num_bytes: bytes, step }) {
  return `peak ${formatBytes(bytes)}${step >= 0 ? `, step ${step}` : ""}`;
}

/**
 * The bytes of each class on the first rank of a moment. A class that ever held bytes stays, so that nothing below moves.
 * @param {Moment | null} at
 * @param {ReadonlySet<number>} classes that ever held bytes
 */
export function memoryEntries(at, classes) {
  const rank = at?.ranks[0];
  if (!rank) return [];
  const held = rank.bytes.map((bytes, k) => ({ ...sure(CATEGORIES[k]), bytes })).filter((_, k) => classes.has(k));
  const total = { words: `${rank.label}: in use`, colour: "", bytes: rank.in_use };
  return [total, ...held].map(({ words, colour, bytes }) => ({ words, colour, size: formatBytes(bytes) }));
}

/**
 * A number of the step at a position in the columns; -1: no step.
 * @param {RunModel["steps"]} steps
 * @param {StepValue} value
 * @param {number} k
 */
export function stepNumber({ columns }, value, k) {
  if (k < 0 || (value === "loss" && !columns.has_loss[k])) return NONE;
  const number = sure(columns[value][k]);
  return { ms: () => formatDuration(1000 * number), exposed: () => formatShare(number), loss: () => formatLoss(number) }[value]();
}

/**
 * The effect of a changed setting: a heading, and a table of what steps cost before and after.
 * @param {KnobEffect} change
 */
export function changeTable({ what, at_step: step, before, after }) {
  const row = (/** @type {string} */ name, /** @type {Costs} */ { num_steps: count, ms, exposed, peak_bytes: bytes }) =>
    [name, `${count}`, formatDuration(1000 * ms), formatShare(exposed), formatBytes(bytes)];
  return {
    heading: `changed at step ${step}: ${what}`,
    columns: ["", "steps", "step time", "exposed", "peak"],
    rows: [row("before", before), row("after", after)],
  };
}
