/** A state in words and trees: pure functions of the kernel's answers. */
import { formatBytes, formatLoss } from "../../workbench/widgets/static/format.js";
import type { Standing } from "./client";
import type { Model, OutputLine, ParamInfo, Preview, RankState, RunCommand, State, UnitInfo } from "./protocol";

/** A command, or the text of its line behind `%fsdp`, which the kernel parses as it does that of a cell. */
export type Typed = RunCommand["command"];

/** The word of a command. */
export function wordOf(command: Typed): string {
  return typeof command === "string" ? (command.split(" ", 1)[0] ?? "") : command.word;
}

/** Which controls are enabled. */
export interface Can {
  readonly start: boolean;
  readonly stop: boolean;
  /** Leave ranks whose processes continue. */
  readonly detach: boolean;
  readonly step: boolean;
  /** Check models without running them. */
  readonly lint: boolean;
  readonly pause: boolean;
  readonly goOn: boolean;
  readonly abort: boolean;
  /** Replace ranks that are gone. */
  readonly heal: boolean;
}

/** The state in one line. */
export interface Headline {
  readonly tone: "plain" | "busy" | "held" | "bad";
  readonly text: string;
  /** Text for little room, if different: without the step, which is shown next to it. */
  readonly short?: string;
  /** What can be done about it, if anything. */
  readonly todo?: string;
}

/** What the ranks have of what a step needs. */
export interface Prepared {
  /** Whether the models and functions of the ranks are known. */
  readonly isKnown: boolean;
  readonly hasModel: boolean;
  readonly isSharded: boolean;
  /** Whether all ranks have a `train_step`. */
  readonly hasStep: boolean;
}

const READY: Prepared = { isKnown: true, hasModel: true, isSharded: true, hasStep: true };

export function can(state: State | null, prepared: Prepared = READY): Can {
  const reasons = obstacles(state, prepared);
  const isPossible = (able: keyof Can): boolean => reasons[able] === "";
  return {
    start: isPossible("start"),
    stop: isPossible("stop"),
    detach: isPossible("detach"),
    step: isPossible("step"),
    lint: isPossible("lint"),
    pause: isPossible("pause"),
    goOn: isPossible("goOn"),
    abort: isPossible("abort"),
    heal: isPossible("heal"),
  };
}

/** Why each control is disabled, a sentence; empty: it is enabled. */
export function obstacles(state: State | null, prepared: Prepared = READY): Readonly<Record<keyof Can, string>> {
  const request = state?.request ?? null;
  const { is_running: isRunning = false, outlives = false, held_by: holder = "" } = state?.cluster ?? {};
  const gone = goneOf(state);
  const none = isRunning ? "" : "No ranks are running: start some first.";
  const change = exchanging(state);
  const held = holder === "" ? "" : `${holder} controls these ranks.`;
  const lost = gone.length === 0 ? "" : `${ranksInWords(gone)} ${gone.length === 1 ? "is" : "are"} gone: ${lower(whatIsLeft(state))}`;
  const busy = request === null ? "" : `${request.line} ${request.is_stopped ? "is stopped: continue or abort it first." : "is still running."}`;
  const idle = request === null ? "Nothing is running." : "";
  return {
    start: isRunning ? "Ranks are running already: stop them first." : change,
    stop: none || change || held,
    detach: none || change || (outlives ? "" : "These ranks were started here: stop them instead.") || busy,
    step: none || held || lost || busy || todo(prepared),
    lint: none || held || lost || busy || todo({ ...prepared, hasStep: true }),
    pause: none || held || idle || (request?.is_stopped === true ? "The ranks are stopped already." : ""),
    goOn: none || held || lost || idle || (request?.is_stopped === true ? "" : "The ranks are not stopped: pause them first."),
    abort: held || idle,
    heal: none || change || held || (gone.length === 0 ? "All ranks run." : "") || busy || (isReplaceable(state) ? "" : whatIsLeft(state)),
  };
}

/** The ranks whose processes have ended. */
export function goneOf(state: State | null): readonly number[] {
  return (state?.ranks ?? []).filter(({ health }) => health === "gone").map(({ rank }) => rank);
}

/** Whether processes can take the place of the ranks that are gone. */
export function isReplaceable(state: State | null): boolean {
  const gone = goneOf(state);
  return gone.length > 0 && gone.length < (state?.ranks.length ?? 0) && state?.cluster.one_job === "";
}

/** What to do about ranks that are gone, a sentence. */
function whatIsLeft(state: State | null): string {
  if (isReplaceable(state)) return "Replace what is gone, or stop the ranks.";
  const launcher = state?.cluster.one_job ?? "";
  const why = launcher === "" || goneOf(state).length === state?.ranks.length ? "" : `, as ${launcher} starts all of them as one job`;
  return `Stop the ranks, then start them again${why}.`;
}

function lower(text: string): string {
  return `${text.slice(0, 1).toLowerCase()}${text.slice(1)}`;
}

/** Shown until the models of the ranks are known. */
export const LOOKING = "Looking for models\u2026";

/** What to do before a step is possible, a sentence; empty: nothing. */
export function todo({ isKnown, hasModel, isSharded, hasStep }: Prepared): string {
  if (!isKnown) return LOOKING;
  if (!hasModel && !isSharded) return "Define a model in a %%fsdp cell, and run the cell.";
  if (!isSharded) return "Choose below how to shard the model.";
  return hasStep ? "" : "Define train_step() in a %%fsdp cell, with an optimizer, and run the cell.";
}

/** At which step a picture or a table shows the ranks: it stays as it is while they train. Empty: none is recorded. */
export function asOf(state: State | null, word: string): string {
  const step = state?.training.step ?? -1;
  if (step < 0) return "";
  return `as of step ${step}${state?.request?.is_stopped === true ? ", stopped inside it" : ""}; press ${word.slice(0, 1).toUpperCase()}${word.slice(1)} again to refresh`;
}

/** Why ranks can be neither started nor stopped now, a sentence; empty: they can. */
export function exchanging(state: State | null): string {
  switch (state?.cluster.exchange) {
    case "start":
      return sentence(state.cluster.waits_for || "starting or attaching ranks");
    case "stop":
      return "The ranks are stopping. Wait until they have stopped to start others.";
    case "open":
      return "A file is being opened. Wait until it is shown.";
    default:
      return "";
  }
}

/** The steps that have ended, such as `3 of 40 steps`; empty if unknown. */
export function progress(state: State): string {
  const request = state.request;
  return request !== null && request.steps_total > 0 ? `${request.steps_done} of ${request.steps_total} steps` : "";
}

/** Ranks per core above which a start is likely to fail. */
const CROWDED = 4;

/** Whether so many ranks are likely too many for this machine. */
export function isCrowd(ranks: number, cores: number): boolean {
  return ranks > CROWDED * cores;
}

/** A warning before so many ranks are started on this machine; empty: none. */
export function crowding(ranks: number, cores: number | undefined): string {
  if (cores === undefined || !(ranks > cores)) return "";
  const shared = `${count(cores, "core")} here: ${count(ranks, "rank")} share ${cores === 1 ? "it" : "them"}`;
  return isCrowd(ranks, cores) ? `${shared}, and the start may take minutes or fail.` : `${shared}.`;
}

/** The path, relative to the notebook, of the page that an export wrote, from its reply; null: another reply. */
export function pageWritten(text: string): string | null {
  return /^wrote (.+\.html) \(/.exec(text)?.[1] ?? null;
}

/** Whether a text has more columns than names and values. */
export function isTable(text: string): boolean {
  return /\S {2,}\S.* {2,}\S/.test(text);
}

/** A name and its value, from a line below the first of a reply. */
export type Fact = readonly [name: string, value: string];

const FACT = /^ {2}(\S(?:.*?\S)?) {2,}(\S.*)$/;

/**
 * A reply in pieces: sentences, and lists of facts.
 *
 * `4 units\n  units             (root), 0-2\n  each rank keeps   1.58 MiB` becomes
 * `["4 units", [["units", "(root), 0-2"], ["each rank keeps", "1.58 MiB"]]]`.
 */
export function piecesOf(text: string): readonly (string | readonly Fact[])[] {
  const found: (string | Fact[])[] = [];
  for (const line of text.split("\n")) {
    const before = found.at(-1), [, name, value] = FACT.exec(line) ?? [];
    if (name !== undefined && value !== undefined) {
      if (Array.isArray(before)) before.push([name, value]);
      else found.push([[name, value]]);
    } else if (typeof before === "string") found[found.length - 1] = `${before}\n${line}`;
    else found.push(line);
  }
  return found;
}

/** A text as a sentence: with a capital letter and a full stop. */
export function sentence(text: string): string {
  return text === "" ? "" : `${text.slice(0, 1).toUpperCase()}${text.slice(1)}${/[.!?\u2026]$/.test(text) ? "" : "."}`;
}

/** `rank 3`, `ranks 0-2, 5`. */
export function ranksInWords(ranks: readonly number[]): string {
  return `${ranks.length === 1 ? "rank" : "ranks"} ${ranges(ranks)}`;
}

/** Which ranks printed a line and in which step: `0-2, 5 · step 3`; empty for a notice of the notebook. */
export function originOf({ ranks, step }: OutputLine): string {
  if (ranks.length === 0) return "";
  return [ranges(ranks), step === null ? "" : `step ${step}`].filter(Boolean).join(" \u00b7 ");
}

/** That a fault is injected, and which one unless it is hidden; empty: none is. */
function faultOn({ fault }: State): string {
  return fault === "" ? "" : fault === "random" ? "fault on" : `fault on: ${fault}`;
}

/** The state in one line. `isGivingUp`: an abort was requested and has not ended. */
export function headline(state: State, isGivingUp = false): Headline {
  const gone = state.ranks.filter(({ health }) => health === "gone");
  if (gone.length > 0) {
    const alike = new Map<string, number[]>();
    for (const { rank, where } of gone) alike.set(where, [...(alike.get(where) ?? []), rank]);
    const text = [...alike].map(([how, which]) => `${ranksInWords(which)} ${how}`).join("; ");
    const todo = state.request === null ? whatIsLeft(state) : "Abort what still runs first.";
    return { tone: "bad", text, todo };
  }
  const { request, cluster } = state;
  if (cluster.is_free) return { tone: "plain", text: "These ranks are free now.", todo: "Take them, or stop watching." };
  if (cluster.held_by) {
    return {
      tone: "plain",
      text: `View only: ${cluster.held_by} controls these ranks.`,
      todo: "To take control, detach there, then attach here.",
    };
  }
  if (isGivingUp && request !== null) return { tone: "busy", text: `Aborting ${request.line}\u2026` };
  if (request?.is_stopped === true) {
    const because = request.reasons.length > 0 ? ` (${request.reasons.join(", ")})` : "";
    const names = request.reasons.map((reason) => /^(breakpoint \d+|--until)\b/.exec(reason)?.[1] ?? "");
    const [first = "", ...others] = names.filter(Boolean);
    const value = request.reasons.find((_, number) => names[number] === ""); // that a breakpoint's condition met
    const held = [first, others.length > 0 ? `${others.length} more` : ""].filter(Boolean).join(" and ");
    const short = [held, value].filter(Boolean).join(": ");
    const place = request.stop.replace(/, step \d+$/, "");
    return { tone: "held", text: `${request.stop}${because}`, short: `${place}${short && ` (${short})`}` };
  }
  if (request !== null) return { tone: "busy", text: [request.line, progress(state), faultOn(state)].filter(Boolean).join(": ") };
  if (!cluster.is_running) return { tone: "plain", text: "No ranks" };
  const ranks = count(state.ranks.length, "rank");
  if (cluster.exchange === "start") return { tone: "busy", text: `${ranks}: one that died is being replaced` };
  return { tone: "plain", text: [`${ranks}, idle`, faultOn(state)].filter(Boolean).join(", ") };
}

/** The host of the ranks, or the number of hosts. */
export function hostsInWords(ranks: readonly RankState[]): string {
  const [first = "", ...others] = new Set(ranks.map(({ host }) => host));
  return others.length === 0 ? first : `${1 + others.length} hosts`;
}

/** Text for screen readers: it changes with the kind of state, not with every step. */
export function announcement(state: State, isGivingUp = false): string {
  const { tone, text, todo } = headline(state, isGivingUp);
  switch (tone) {
    case "busy":
      return isGivingUp ? text : (state.request?.line ?? text);
    case "bad":
      return [text, todo].filter(Boolean).join(". ");
    default:
      return text;
  }
}

/** `1 rank`, `4 ranks`. */
export function count(number: number, noun: string): string {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

const SILENCES = {
  cut: "cannot be reached: the connection is lost, and JupyterLab tries to reopen it",
  unreachable: "cannot be reached: the Jupyter server does not answer, as without a network. The panel tries again until it does",
  busy: "is busy",
  slow: "is slow to answer",
  lost: "does not answer",
} as const;

/** Whether the reason of a silence is a connection that is lost. */
function isLost(why: string): boolean {
  return why === "cut" || why === "unreachable";
}

/** The text of the status bar: number of ranks, loss, steps per second, or where they are stopped. */
export function statusLine(standing: Standing, state: State | null): Headline | null {
  if ("why" in standing && isLost(standing.why)) return { tone: "bad", text: "FSDP: connection lost" };
  if (standing.kind === "silent") {
    return { tone: standing.why === "lost" ? "bad" : "plain", text: `FSDP: the kernel ${SILENCES[standing.why]}` };
  }
  if (state === null || (!state.cluster.is_running && state.ranks.length === 0)) return null;
  const head = headline(state);
  if (head.tone === "bad" || head.tone === "held") return { tone: head.tone, text: `FSDP: ${head.text}` };
  const { loss, steps_per_s: rate } = state.training;
  const parts = [
    `FSDP: ${count(state.ranks.length, "rank")}`,
    loss === null ? "" : `loss ${formatLoss(loss)}`,
    rate === null ? "" : `${rate < 100 ? rate.toPrecision(3) : Math.round(rate).toLocaleString("en")} steps/s`,
    progress(state),
    faultOn(state),
  ];
  return { tone: head.tone, text: parts.filter(Boolean).join(" \u00b7 ") };
}

/** What ranks would hold at rest, as text. */
export interface Held {
  readonly ranks: readonly number[];
  readonly params: string;
  /** Including gradients and Adam's state. */
  readonly total: string;
}

/** What ranks would hold at rest; ranks with equal texts share an entry, though a few bytes may differ. */
export function heldAtRest({ at_rest: atRest }: Preview): readonly Held[] {
  const found = new Map<string, Held>();
  for (const { ranks, params, grads, adam } of atRest) {
    const held = { params: formatBytes(params), total: formatBytes(params + grads + adam) };
    const key = JSON.stringify(held);
    found.set(key, { ...held, ranks: [...(found.get(key)?.ranks ?? []), ...ranks].sort((a, b) => a - b) });
  }
  return [...found.values()];
}

/** What a rank keeps of a parameter, in words; for one in a flat parameter, the shards that contain it. */
export function lies({ flat, bytes_at_rest: kept, bytes_unsharded: full, rows_per_rank: elements }: ParamInfo): string {
  if (flat === "") return `${formatBytes(kept)} of ${formatBytes(full)}`;
  const shards = elements.flatMap((held, shard) => (held > 0 ? [shard] : []));
  if (shards.length === 0) return "empty";
  return shards.length === 1 ? `in shard ${shards[0]}` : `split over shards ${ranges(shards)}`;
}

/** Text for a closed notebook, of whose ranks `numRanks` keep running. */
export function closedWords(path: string, numRanks: number): string {
  if (numRanks === 0) return `${path} is not open. Open it to see its ranks here.`;
  const ranks = numRanks === 1 ? "rank keeps" : `${numRanks} ranks keep`;
  return `${path} is not open. Its ${ranks} running while its kernel runs. Open it to see ${numRanks === 1 ? "it" : "them"} here.`;
}

/** Text shown instead of a state, and the action that helps. */
export function explained(standing: Standing, loadError: string): { text: string; action: "load" | "reconnect" | null } {
  if (standing.kind === "refused") return { text: standing.text, action: null };
  if (standing.kind === "opening") return { text: "Waiting for the kernel\u2026", action: null };
  if (standing.kind === "silent") {
    const action = isLost(standing.why) ? "reconnect" : null; // JupyterLab may wait two minutes until it tries
    return { text: `The kernel ${SILENCES[standing.why]}. The panel shows its last state.`, action };
  }
  if (standing.kind === "live") return { text: "", action: null };
  switch (standing.why) {
    case "no notebook":
      return { text: "Open a notebook to see its ranks here.", action: null };
    case "no kernel":
      return { text: "This notebook has no running kernel.", action: null };
    case "restarting":
      return { text: "The kernel is restarting\u2026", action: null };
    case "dead":
      return { text: "The kernel has died, and its ranks too unless they were attached. Restart the kernel to begin again.", action: null };
    case "cut":
      return {
        text: "The connection to the kernel is closed, and JupyterLab does not reopen it. The kernel and its ranks may still be running.",
        action: "reconnect",
      };
    case "connecting":
      return { text: "Connecting to the kernel\u2026", action: null };
    case "not loaded":
      return { text: loadError || "The workbench is not loaded in this notebook yet.", action: "load" };
  }
}

/** A module of a model, with the modules inside it. */
export interface Node {
  /** Its name within the parent. */
  readonly label: string;
  /** Unique among all nodes. */
  readonly key: string;
  /** Its unit; null: it only contains units. */
  readonly unit: UnitInfo | null;
  /** Its index in `units` and in their states; -1: it is no unit. */
  readonly place: number;
  readonly children: readonly Node[];
}

interface Growing {
  label: string;
  key: string;
  unit: UnitInfo | null;
  place: number;
  children: Growing[];
}

/** Name of the unit of a whole model. */
export const ROOT = "(root)";

/**
 * The units as a tree of modules, one for each root.
 *
 * `(root)`, `blocks.0`, `blocks.1`, `head` become `(root)` with `blocks` (no unit, with `0` and `1`) and `head`. A module
 * with a single child is joined with it: `encoder.layers.0` stays one node if `encoder` contains nothing else.
 */
export function tree(units: readonly UnitInfo[]): readonly Node[] {
  const roots = new Map<number, Growing>();
  units.forEach((unit, place) => {
    const top = roots.get(unit.root) ?? leaf(ROOT, String(unit.root));
    roots.set(unit.root, top);
    const path = unit.name === ROOT ? [] : unit.name.split(".");
    const node = path.reduce((at, label) => {
      const there = at.children.find((child) => child.label === label);
      if (there !== undefined) return there;
      const made = leaf(label, `${at.key}.${label}`);
      at.children.push(made);
      return made;
    }, top);
    node.unit = unit;
    node.place = place;
  });
  return [...roots.values()].map(joined);
}

function leaf(label: string, key: string): Growing {
  return { label, key, unit: null, place: -1, children: [] };
}

function joined(node: Growing): Node {
  const [only] = node.children;
  if (node.unit === null && node.children.length === 1 && only !== undefined && node.label !== ROOT) {
    return joined({ ...only, label: `${node.label}.${only.label}` });
  }
  return { ...node, children: node.children.map(joined) };
}

/**
 * The name of a unit on a line, such as `model.blocks.2`; null: no variable holds it. The root is named by its model,
 * and so are units of a classic model, which has one strategy for all.
 */
export function pathOf(unit: UnitInfo, models: readonly Model[]): string | null {
  const model = models.find(({ units }) => units.includes(unit.index));
  if (model === undefined) return null;
  const [first] = unit.name.split(", "); // a unit may have several modules
  return unit.name === ROOT || unit.is_flat ? model.name : `${model.name}.${first}`;
}

/** A parameter's name without that of its unit. */
export function nameInUnit(fqn: string, { name }: UnitInfo): string {
  return fqn.startsWith(`${name}.`) ? fqn.slice(name.length + 1) : fqn;
}

/** Units inside a node, itself included. */
export function unitsIn(node: Node): readonly Node[] {
  return [...(node.unit === null ? [] : [node]), ...node.children.flatMap(unitsIn)];
}

/** The number of a unit's state on each group of ranks, in the order received; -1: unknown. */
export function statesOf(state: State | null, place: number): readonly number[] {
  return (state?.unit_states ?? []).map(({ states }) => {
    const digit = states[place];
    return digit === undefined ? -1 : Number(digit);
  });
}

/** The state of a unit on most ranks; undefined: unknown. */
export function commonState(state: State | null, place: number): number | undefined {
  const groups = state?.unit_states ?? [];
  const votes = new Map<number, number>();
  statesOf(state, place).forEach((number, group) => {
    if (number >= 0) votes.set(number, (votes.get(number) ?? 0) + (groups[group]?.ranks.length ?? 0));
  });
  return [...votes].sort(([, one], [, other]) => other - one)[0]?.[0];
}

/** `[0, 1, 2, 5]` as `0-2, 5`. */
export function ranges(numbers: readonly number[]): string {
  const runs: [number, number][] = [];
  for (const number of numbers) {
    const last = runs.at(-1);
    if (last?.[1] === number - 1) last[1] = number;
    else runs.push([number, number]);
  }
  return runs.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join(", ");
}
