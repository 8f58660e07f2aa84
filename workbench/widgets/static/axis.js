// The time axis of a picture: where a time is drawn, and which times get a label. Times are microseconds.

import { timeUnit } from "./format.js";

const BETWEEN_TICKS = 110; // pixels, at least

/** The extent of a plot in pixels, and the time that it shows. */
export class Axis {
  /**
   * @param {{ left: number, width: number }} plot
   * @param {readonly [number, number]} view
   */
  constructor({ left, width }, [t0, t1]) {
    this.left = left;
    this.width = width;
    this.t0 = t0;
    this.t1 = t1;
  }

  /** The time in view. */
  get span() {
    return this.t1 - this.t0;
  }

  /** The right end of the plot, in pixels. */
  get right() {
    return this.left + this.width;
  }

  /** @param {number} t */
  x(t) {
    return this.left + ((t - this.t0) / (this.t1 - this.t0)) * this.width;
  }

  /** @param {number} x */
  t(x) {
    return this.t0 + ((x - this.left) / this.width) * (this.t1 - this.t0);
  }

  /** @param {number} t */
  shows(t) {
    return t >= this.t0 && t <= this.t1;
  }

  /** The times that get a label, all in one unit: multiples of 1, 2 or 5 times a power of ten. */
  ticks() {
    const step = niceStep((this.span / this.width) * BETWEEN_TICKS);
    const [divisor, unit] = timeUnit(Math.max(Math.abs(this.t1), step));
    const digits = Math.min(Math.max(0, -Math.floor(Math.log10(step / divisor) + 1e-9)), 9);
    const found = [];
    for (let t = Math.ceil(this.t0 / step) * step; t <= this.t1; t += step) {
      found.push({ t, text: `${(t / divisor).toFixed(digits)} ${unit}`.replace(/^-(0(\.0*)?) /, "$1 ") });
    }
    return found;
  }
}

/**
 * 1, 2 or 5 times a power of ten, at least `us`.
 * @param {number} us
 */
export function niceStep(us) {
  const power = 10 ** Math.floor(Math.log10(us));
  return power * (us / power > 5 ? 10 : us / power > 2 ? 5 : us / power > 1 ? 2 : 1);
}

/**
 * A time with as many digits as a pixel of the view resolves.
 * @param {number} us
 * @param {number} span of the view
 */
export function cursorTime(us, span) {
  const [divisor, unit] = timeUnit(us);
  const digits = Math.min(Math.max(Math.ceil(Math.log10((divisor * 1000) / span)), 0), 7);
  return `${(us / divisor).toFixed(digits)} ${unit}`;
}
