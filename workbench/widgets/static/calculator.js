// The script of the calculator: what a model needs on a number of devices, from the terms of plans that are in the page.
// workbench/cli/calculator_page.py writes the page, and workbench/cli/size_terms.py says what a term is. It needs
// neither a kernel nor a network.

import { make, swatch, write } from "./dom.js";
import { formatBytes, formatShare } from "./format.js";
import { sure } from "./sure.js";

/** @typedef {[category: number, quantity: string, ends: number, middle: number]} Term */

/** @typedef {{ moments: Term[][], host: Term[] }} Policy */

/** @typedef {Record<string, number>} Sizes */

/**
 * @typedef {{
 *   params: Record<string, [string, string][]>, ends: number, perHost: number, maxRanks: number,
 *   classes: { words: string, colour: string }[], sizes: Record<string, Sizes>, devices: Record<string, number>,
 *   policies: Record<string, Policy>,
 * }} Plans
 */

/** @typedef {{ ranks: number, hosts: number, shards: number }} Cluster */

/**
 * The number of elements of each quantity: `quantities` of size_terms.py.
 * @param {Plans} plans
 * @param {Sizes} sizes
 * @param {number} shards ranks that share a copy of the model
 */
export function quantities(plans, sizes, shards) {
  const kv = (sure(sizes.width) / sure(sizes.heads)) * sure(sizes.kv_heads), batch = sure(sizes.sequences) * sure(sizes.tokens);
  /** @type {Record<string, number>} */
  const basic = { ...sizes, one: 1, kv, batch };
  /** @type {Record<string, number>} */
  const found = { one: 1, indices: batch + sure(sizes.sequences) };
  for (const name of ["one", "width", "kv", "hidden", "heads", "vocab"]) found[`batch*${name}`] = batch * sure(basic[name]);
  for (const [unit, params] of Object.entries(plans.params)) {
    let full = 0, shard = 0, vectors = 0;
    for (const [first, second] of params) {
      const rows = sure(basic[first]), columns = sure(basic[second]);
      full += rows * columns;
      shard += Math.ceil(rows / shards) * columns;
      vectors += second === "one" ? rows : 0;
    }
    Object.assign(found, {
      [`${unit}.full`]: full, [`${unit}.shard`]: shard, [`${unit}.padded`]: shard * shards, [`${unit}.vectors`]: vectors,
    });
  }
  return found;
}

/**
 * The bytes of each class at a moment.
 * @param {Plans} plans
 * @param {Term[]} terms
 * @param {Sizes} sizes
 * @param {Record<string, number>} known
 */
function bytesAt(plans, terms, sizes, known) {
  const found = plans.classes.map(() => 0), middles = sure(sizes.blocks) - 2 * plans.ends;
  for (const [category, quantity, ends, middle] of terms) {
    found[category] = sure(found[category]) + (ends + middle * middles) * sure(known[quantity]);
  }
  return found;
}

/** @param {number[]} sizes */
const sum = (sizes) => sizes.reduce((total, size) => total + size, 0);

/**
 * The bytes of each class at the peak of a step, of one rank, and what it has in the host's memory.
 * @param {Plans} plans
 * @param {Policy} policy
 * @param {Sizes} sizes
 * @param {number} shards
 */
export function need(plans, policy, sizes, shards) {
  const known = quantities(plans, sizes, shards);
  let peak = plans.classes.map(() => 0);
  for (const terms of policy.moments) {
    const found = bytesAt(plans, terms, sizes, known);
    if (sum(found) > sum(peak)) peak = found;
  }
  return { peak, total: sum(peak), host: sum(bytesAt(plans, policy.host, sizes, known)) };
}

/**
 * Some ranks on as few hosts as hold them; null if they do not divide into equal hosts, or are too few for the mesh.
 * @param {Plans} plans
 * @param {number} ranks
 * @param {boolean} isHybrid whether each host has a copy of the model
 * @returns {Cluster | null}
 */
export function cluster(plans, ranks, isHybrid) {
  const hosts = Math.ceil(ranks / plans.perHost);
  if (ranks < 2 || ranks % hosts || (isHybrid && (hosts < 2 || ranks === hosts))) return null;
  return { ranks, hosts, shards: isHybrid ? ranks / hosts : ranks };
}

/**
 * The fewest ranks on which the need is within the limit; null if there are none.
 * @param {Plans} plans
 * @param {Policy} policy
 * @param {Sizes} sizes
 * @param {boolean} isHybrid
 * @param {number} limit
 */
function fewest(plans, policy, sizes, isHybrid, limit) {
  for (let ranks = 2; ranks <= plans.maxRanks; ranks += 1) {
    const found = cluster(plans, ranks, isHybrid);
    if (found && need(plans, policy, sizes, found.shards).total <= limit) return found;
  }
  return null;
}

/** @param {string} id */
function element(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page lacks ${id}`);
  return found;
}

/** @param {string} id */
const field = (id) => /** @type {HTMLInputElement | HTMLSelectElement} */ (element(id));

/** What each size is called; its field has this id. */
const SIZES = /** @type {const} */ (["blocks", "width", "heads", "kv_heads", "hidden", "vocab", "sequences", "tokens"]);

/**
 * What is wrong with the numbers; empty if nothing is.
 * @param {Plans} plans
 * @param {Sizes} sizes
 * @param {number} ranks
 * @param {boolean} isHybrid
 */
function problem(plans, sizes, ranks, isHybrid) {
  const bad = [...SIZES.map((name) => [name, sure(sizes[name])]), ["GPUs", ranks]].find(
    ([, number]) => !Number.isSafeInteger(number) || Number(number) < 1,
  );
  const { blocks = 0, width = 0, heads = 1, kv_heads: kvHeads = 1 } = sizes, least = 2 * plans.ends + 2;
  if (bad) return `${String(bad[0]).replace("_", " ")}: a whole number from 1 on.`;
  if (blocks < least) return `Not planned: fewer than ${least} blocks.`;
  if (width % heads || heads % kvHeads) return "The heads must divide the width, and the heads of keys and values the heads.";
  if (width / heads > 256) return "Not planned: more than 256 elements in a head, for which kernels of attention differ.";
  if (ranks < 2) return "Not planned: one GPU shards nothing.";
  if (ranks > plans.maxRanks) return `Not planned: more than ${plans.maxRanks.toLocaleString("en")} GPUs.`;
  if (cluster(plans, ranks, isHybrid)) return "";
  return ranks % Math.ceil(ranks / plans.perHost)
    ? `${ranks} GPUs do not divide into hosts of at most ${plans.perHost} with equally many each.`
    : "A copy on each host needs two hosts or more, with two GPUs or more each.";
}

/** @param {Plans} plans */
function show(plans) {
  const sizes = Object.fromEntries(SIZES.map((name) => [name, Number(field(name).value)]));
  const ranks = Number(field("ranks").value), device = field("device").value, limit = sure(plans.devices[device]);
  const isHybrid = field("mesh").value !== "";
  const chosen = ["mp", "reshard", "checkpoint", "offload"].map((name) => field(name).value);
  const policy = sure(plans.policies[chosen.filter(Boolean).join(" ")]);
  const wrong = problem(plans, sizes, ranks, isHybrid), result = element("result");
  const place = cluster(plans, ranks, isHybrid);
  const isShown = !wrong && place !== null;
  for (const each of result.querySelectorAll("[data-result]")) each.toggleAttribute("hidden", !isShown);
  const verdict = element("verdict");
  verdict.className = !isShown ? "" : "fits";
  if (!isShown) {
    write(verdict, wrong);
    return;
  }
  const { peak, total, host } = need(plans, policy, sizes, place.shards), fits = total <= limit;
  const most = peak.indexOf(Math.max(...peak)), name = sure(plans.classes[most]).words;
  verdict.className = fits ? "fits" : "breaks";
  const share = `${formatBytes(total)} of ${formatBytes(limit)}`;
  write(verdict, fits ? `It fits: ${share}` : `It does not fit: ${share}. The largest class is ${name}, ${formatBytes(sure(peak[most]))}.`);

  const bar = element("bar"), scale = Math.max(total, limit);
  bar.replaceChildren(...peak.flatMap((size, category) => {
    if (!size) return [];
    const part = make("i"), { words, colour } = sure(plans.classes[category]);
    part.style.width = `${(100 * size) / scale}%`;
    part.style.background = colour;
    part.title = `${words}: ${formatBytes(size)}`;
    return [part];
  }));
  const edge = make("b");
  edge.style.left = `${(100 * limit) / scale}%`;
  edge.title = `memory of ${device}: ${formatBytes(limit)}`;
  bar.append(edge);
  const order = peak.map((size, category) => ({ size, ...sure(plans.classes[category]) })).filter(({ size }) => size);
  order.sort((one, other) => other.size - one.size);
  bar.setAttribute("aria-label", order.map(({ words, size }) => `${words} ${formatBytes(size)}`).join(", "));
  element("classes").replaceChildren(...order.map(({ words, colour, size }) => {
    const row = make("tr"), first = make("th");
    first.scope = "row";
    first.append(swatch(words, colour));
    row.append(first, make("td", "", formatBytes(size)), make("td", "", formatShare(size / total)));
    return row;
  }));

  const least = fewest(plans, policy, sizes, isHybrid, limit);
  const where = (/** @type {Cluster} */ { ranks: number, hosts }) => `${number} GPUs${hosts > 1 ? ` in ${hosts} hosts` : ""}`;
  write(element("fewest"), least ? where(least) : `no number up to ${plans.maxRanks.toLocaleString("en")}`);
  write(element("params"), `${(parameters(plans, sizes) / 1e9).toPrecision(3)} billion`);
  write(element("host"), formatBytes(host));
  element("host-row").hidden = !host;

  const [mp = "", reshard = "", checkpoint = "", offload = ""] = chosen;
  const changed = SIZES.filter((each) => sizes[each] !== plans.sizes[field("model").value]?.[each]);
  const model = [field("model").value || Object.keys(plans.sizes)[0], ...changed.map((each) => `--${each.replace("_", "-")} ${sure(sizes[each])}`)];
  const to = [`--ranks ${place.ranks}`, `--device ${device}`], mesh = isHybrid ? "--mesh hosts" : "";
  const half = mp ? "" : "--mp bf16,reduce=fp32";
  const lines = {
    script: ["workbench plan", ...to, ...chosen, mesh, "-m workbench.zoo.llama", ...model],
    plan: ["%fsdp plan model", ...to, "--wrap Block", half, reshard, checkpoint.replace("Llama", ""), offload, mesh],
    shard: ["%fsdp shard model --wrap Block", half, reshard, offload, mesh],
  };
  for (const [id, words] of Object.entries(lines)) write(element(id), words.filter(Boolean).join(" "));
}

/**
 * @param {Plans} plans
 * @param {Sizes} sizes
 */
function parameters(plans, sizes) {
  const { "block.full": block, "outside.full": outside } = quantities(plans, sizes, 1);
  return sure(sizes.blocks) * sure(block) + sure(outside);
}

/** @param {Plans} plans */
function begin(plans) {
  const fill = () => {
    for (const [name, size] of Object.entries(plans.sizes[field("model").value] ?? {})) field(name).value = String(size);
  };
  field("model").addEventListener("change", fill);
  element("form").addEventListener("input", ({ target }) => {
    const id = target instanceof HTMLElement ? target.id : "", batch = ["sequences", "tokens"];
    if (SIZES.some((name) => name === id) && !batch.includes(id)) field("model").value = "";
    if (id !== "model") show(plans);
  });
  element("form").addEventListener("change", () => { show(plans); });
  element("form").addEventListener("submit", (event) => { event.preventDefault(); });
  for (const button of document.querySelectorAll("button[data-copy]")) {
    button.addEventListener("click", () => {
      const line = element(/** @type {HTMLElement} */ (button).dataset.copy ?? "");
      getSelection()?.selectAllChildren(line);
      void navigator.clipboard.writeText(line.textContent).then(() => { write(button, "copied"); }, () => { write(button, "selected"); });
    });
  }
  fill();
  show(plans);
  Object.assign(window, { plans, need }); // for inspection in the page
}

/** @type {unknown} */
const given = JSON.parse(element("plans").textContent);
begin(/** @type {Plans} */ (given));
