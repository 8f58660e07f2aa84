// Unpacks the tables of an answer from its buffer, and the items of tracks from such a table.

import { sure } from "./sure.js";
import { TABLES } from "./tables.js";

/** @import { Counts, SpansTable, Tables } from "./messages.js" */
/** @import { Items } from "./timeline/items.js" */

/** @typedef {keyof typeof TYPES} Code */

const TYPES = { f8: Float64Array, f4: Float32Array, i4: Int32Array, i2: Int16Array, u1: Uint8Array };

/** @param {number} length in bytes; rounded up to where the next column may begin */
export function aligned(length) {
  return Math.ceil(length / 8) * 8;
}

/**
 * @param {Counts} counts
 * @param {DataView} data
 */
export function unpack(counts, data) {
  const { buffer } = new Uint8Array(data.buffer, data.byteOffset, data.byteLength).slice(); // aligned
  /** @type {Record<string, Record<string, unknown>>} */
  const tables = {};
  let at = 0;
  for (const [table, columns] of Object.entries(TABLES)) {
    tables[table] = {};
    for (const [name, [code, width]] of Object.entries(columns)) {
      const Type = TYPES[/** @type {Code} */ (code)];
      const values = new Type(buffer, at, counts[/** @type {keyof Tables} */ (table)] * Number(width));
      tables[table][name] = values;
      at += aligned(values.byteLength);
    }
  }
  return /** @type {Tables} */ (/** @type {unknown} */ (tables));
}

/**
 * Pack tables into a buffer, and count their entries: the inverse of `unpack`. A missing table is empty.
 * @param {Partial<Record<keyof Tables, Record<string, ArrayLike<number>>>>} tables
 * @returns {[Counts, DataView]}
 */
export function pack(tables) {
  const columns = Object.entries(TABLES).flatMap(([table, wanted]) => {
    const given = tables[/** @type {keyof Tables} */ (table)];
    return Object.entries(wanted).map(([name, [code]]) => ({ Type: TYPES[/** @type {Code} */ (code)], values: given?.[name] ?? [] }));
  });
  let size = 0;
  const placed = columns.map(({ Type, values }) => {
    const at = size;
    size += aligned(Type.BYTES_PER_ELEMENT * values.length);
    return { Type, values, at };
  });
  const buffer = new ArrayBuffer(size);
  for (const { Type, values, at } of placed) new Type(buffer, at, values.length).set(values);
  /** @param {keyof Tables} table */
  const count = (table) => Object.values(tables[table] ?? {}).at(0)?.length ?? 0;
  const counts = { spans: count("spans"), memory: count("memory"), states: count("states"), steps: count("steps") };
  return [counts, new DataView(buffer)];
}

/**
 * The items of each track.
 * @param {SpansTable} spans
 * @param {number} numTracks
 * @returns {Items[]}
 */
export function itemsOf(spans, numTracks) {
  /** @type {number[][]} */
  const places = Array.from({ length: numTracks }, () => []);
  spans.track.forEach((track, k) => { sure(places[track]).push(k); });
  return places.map((mine) => ({
    start: Float64Array.from(mine, (k) => sure(spans.start[k])),
    end: Float64Array.from(mine, (k) => sure(spans.start[k]) + sure(spans.duration[k])),
    bytes: Float64Array.from(mine, (k) => sure(spans.bytes[k])),
    arrowFrom: Float64Array.from(mine, (k) => sure(spans.start[k]) - sure(spans.before[k])),
    unit: Int16Array.from(mine, (k) => sure(spans.unit[k])),
    kind: Uint8Array.from(mine, (k) => sure(spans.kind[k])),
    exposed: Uint8Array.from(mine, (k) => sure(spans.exposed[k])),
  }));
}
