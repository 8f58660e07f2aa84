// The mean colours of the pixels of a track with many items.
//
// Let A(t) be the area of a track's colours before t: the sum over its items of colour x time. A pixel from t to u has
// the colour (A(u) - A(t)) / (u - t), exactly, at any zoom. A is precomputed for every BLOCK-th item (the coarse
// level), so a pixel takes one search and at most BLOCK additions.

import { sure } from "../sure.js";
import { MAX_STRADDLING, gallop, share } from "./items.js";

/** @import { Look } from "../look.js" */
/** @import { Track } from "./track.js" */

const BLOCK = 8;
const FAINTEST = 0.4; // opacity of an almost empty pixel

/** A before every BLOCK-th item of a track. */
export class ColourSums {
  constructor() {
    this.numBlocks = 0; // that are up to date
    this.coarse = new Float64Array(0); // per block red, green, blue and time before it
  }

  /**
   * The sums after this item are out of date.
   * @param {number} k
   */
  dropFrom(k) {
    this.numBlocks = Math.min(this.numBlocks, Math.floor(k / BLOCK));
  }

  /**
   * Bring `coarse` up to date.
   * @param {Track} track
   * @param {Look} look
   */
  update({ start, end, kind, exposed, length }, look) {
    const blocks = Math.floor(length / BLOCK) + 1;
    if (this.numBlocks >= blocks) return;
    if (this.coarse.length < 4 * blocks) {
      const grown = new Float64Array(8 * blocks);
      grown.set(this.coarse);
      this.coarse = grown;
    }
    const { coarse } = this, { red, green, blue } = look;
    const [redE, greenE, blueE] = look.exposed;
    const begin = Math.max(this.numBlocks - 1, 0);
    const [r0 = 0, g0 = 0, b0 = 0, sum0 = 0] = this.numBlocks ? coarse.subarray(4 * begin, 4 * begin + 4) : [];
    let r = r0, g = g0, b = b0, sum = sum0;
    for (let n = begin * BLOCK; n <= length; n++) {
      if (n % BLOCK === 0) coarse.set([r, g, b, sum], (4 * n) / BLOCK);
      if (n === length) break;
      const time = Math.max(sure(end[n]) - sure(start[n]), 0), k = sure(kind[n]);
      const bare = time * share(sure(exposed[n])), hidden = time - bare;
      r += hidden * sure(red[k]) + bare * redE;
      g += hidden * sure(green[k]) + bare * greenE;
      b += hidden * sure(blue[k]) + bare * blueE;
      sum += time;
    }
    this.numBlocks = blocks;
  }
}

/**
 * Fill `pixels[offset ...]`, one per `step` microseconds from t0 on, with the mean colours of a track.
 *
 * r, g, b and time are A at a pixel's right end: the sum over all items that begin before it (`before`), minus the
 * parts after it of items that overlap it. Plain numbers and no calls, so no `sure`: this runs for every pixel of every
 * frame. All positions are within their columns; `?? 0` only satisfies the compiler, and costs nothing.
 * @param {Track} track
 * @param {Uint32Array} pixels
 * @param {number} offset
 * @param {number} width
 * @param {number} t0
 * @param {number} step
 * @param {Look} look
 */
export function paintPixels(track, pixels, offset, width, t0, step, look) {
  track.sums.update(track, look);
  const { start, end, kind, exposed, reach, length, sums: { coarse } } = track;
  const { red, green, blue } = look, [redE, greenE, blueE] = look.exposed;
  let next = gallop(start, length, 0, t0);
  let beforeR = 0, beforeG = 0, beforeB = 0, beforeTime = 0;
  let lastR = 0, lastG = 0, lastB = 0, lastTime = 0;
  let isFirst = true;
  for (let x = -1; x < width; x++) { // the first round computes A at t0
    const t = t0 + (x + 1) * step;
    if (!isFirst && (!next || (reach[next - 1] ?? 0) < t - step) && (next >= length || (start[next] ?? 0) >= t)) {
      // nothing here: skip to the next item; A does not change
      x = (next >= length ? width : Math.max(Math.floor(((start[next] ?? 0) - t0) / step), x + 1)) - 1;
      continue;
    }
    const until = gallop(start, length, next, t);
    if (isFirst || until - next > BLOCK) {
      const block = Math.floor(until / BLOCK), at = 4 * block;
      next = block * BLOCK;
      beforeR = (coarse[at] ?? 0);
      beforeG = (coarse[at + 1] ?? 0);
      beforeB = (coarse[at + 2] ?? 0);
      beforeTime = (coarse[at + 3] ?? 0);
    }
    for (; next < until; next++) {
      const lasts = (end[next] ?? 0) - (start[next] ?? 0), time = lasts > 0 ? lasts : 0;
      const k = (kind[next] ?? 0), e = (exposed[next] ?? 0);
      const bare = e > 1 ? (time * e) / 255 : 0, hidden = time - bare;
      beforeR += hidden * (red[k] ?? 0) + bare * redE;
      beforeG += hidden * (green[k] ?? 0) + bare * greenE;
      beforeB += hidden * (blue[k] ?? 0) + bare * blueE;
      beforeTime += time;
    }
    let r = beforeR, g = beforeG, b = beforeB, time = beforeTime;
    for (let over = next - 1; over >= 0 && (reach[over] ?? 0) > t && over >= next - MAX_STRADDLING; over--) {
      const rest = (end[over] ?? 0) - t;
      if (rest <= 0) continue;
      const k = (kind[over] ?? 0), e = (exposed[over] ?? 0);
      const tail = e > 1 ? (((end[over] ?? 0) - (start[over] ?? 0)) * e) / 255 : 0;
      const bare = tail < rest ? tail : rest, hidden = rest - bare; // the exposed part is at the end
      r -= hidden * (red[k] ?? 0) + bare * redE;
      g -= hidden * (green[k] ?? 0) + bare * greenE;
      b -= hidden * (blue[k] ?? 0) + bare * blueE;
      time -= rest;
    }
    const filled = time - lastTime;
    if (!isFirst && filled > step * 1e-6) {
      const alpha = Math.min(Math.max(filled / step, FAINTEST), 1);
      pixels[offset + x] = ((alpha * 255) << 24) | (clampByte((b - lastB) / filled) << 16) |
        (clampByte((g - lastG) / filled) << 8) | clampByte((r - lastR) / filled);
    }
    lastR = r;
    lastG = g;
    lastB = b;
    lastTime = time;
    isFirst = false;
  }
}

/** @param {number} value */
function clampByte(value) {
  return value < 0 ? 0 : value > 255 ? 255 : Math.round(value);
}
