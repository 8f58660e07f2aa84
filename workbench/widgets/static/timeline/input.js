// What the mouse and the keyboard do to the timeline.

import { keepBareKeys } from "../dom.js";
import { AXIS_HEIGHT, rowAt } from "./row_layout.js";

/** @import { Timeline } from "./timeline.js" */

const DRAG = 4; // pixels from which a click is a drag
const NEAR_CURSOR = 4; // pixels around the cursor in which a drag moves it
const LINE = 24; // pixels that a wheel moves with a line

/** @typedef {{ x: number, y: number, t0: number, t1: number, isMoved: boolean, isScrub: boolean }} Drag */

export class TimelineInput {
  /**
   * @param {Timeline} timeline
   * @param {HTMLCanvasElement} canvas
   */
  constructor(timeline, canvas) {
    this.timeline = timeline;
    this.canvas = canvas;
    /** @type {Drag | null} */
    this.drag = null;
  }

  /** @param {AbortSignal} signal */
  listen(signal) {
    const { canvas, timeline } = this, options = { signal };
    keepBareKeys(canvas, options);
    canvas.addEventListener("pointerdown", (event) => { this.pointerDown(event); }, options);
    canvas.addEventListener("pointermove", (event) => { this.pointerMove(event); }, options);
    canvas.addEventListener("pointerup", (event) => { this.pointerUp(event); }, options);
    canvas.addEventListener("pointercancel", () => (this.drag = null), options);
    canvas.addEventListener("pointerleave", () => { timeline.leave(); }, options);
    canvas.addEventListener("wheel", (event) => { this.wheel(event); }, { ...options, passive: false });
    canvas.addEventListener("dblclick", () => { timeline.fit(); }, options);
    canvas.addEventListener("keydown", (event) => { this.key(event); }, options);
    canvas.addEventListener("focus", () => { this.ring(); }, options);
    canvas.addEventListener("blur", () => { this.ring(); }, options);
  }

  ring() {
    const isSeen = document.activeElement === this.canvas && this.canvas.matches(":focus-visible");
    this.canvas.style.outline = isSeen ? `2px solid ${this.timeline.painter.skin.accent}` : "none";
    this.canvas.style.outlineOffset = "-2px";
  }

  /**
   * @param {MouseEvent} event
   * @returns {[number, number]}
   */
  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  /** @param {PointerEvent} event */
  pointerDown(event) {
    if (event.button !== 0) return;
    const [x, y] = this.place(event), { axis, cursor } = this.timeline;
    const isAxis = y < AXIS_HEIGHT, isNearCursor = cursor !== null && Math.abs(axis.x(cursor) - x) < NEAR_CURSOR;
    this.drag = { x, y, t0: axis.t0, t1: axis.t1, isMoved: false, isScrub: isAxis || isNearCursor };
    this.canvas.setPointerCapture(event.pointerId);
    if (isAxis && x >= axis.left) this.timeline.putCursor(axis.t(x));
  }

  /** @param {PointerEvent} event */
  pointerMove(event) {
    const [x, y] = this.place(event), { drag, timeline } = this;
    const isScrub = drag?.isMoved ? drag.isScrub : y < AXIS_HEIGHT;
    this.canvas.style.cursor = isScrub ? "ew-resize" : drag?.isMoved ? "grabbing" : "default";
    if (!drag) {
      timeline.hover(x, y);
      return;
    }
    drag.isMoved ||= Math.abs(x - drag.x) > DRAG;
    if (!drag.isMoved) return;
    timeline.leave();
    const { axis, range } = timeline;
    if (drag.isScrub) timeline.putCursor(range.clamp(axis.t(x)));
    else timeline.pan(drag.t0 + ((drag.x - x) / axis.width) * (drag.t1 - drag.t0) - range.t0);
  }

  /** @param {PointerEvent} event */
  pointerUp(event) {
    const { drag, timeline } = this;
    this.drag = null;
    this.canvas.style.cursor = "default";
    if (!drag || drag.isMoved) return;
    const [x, y] = this.place(event), { axis } = timeline, row = rowAt(timeline.layout.rows, y);
    if (row >= 0) timeline.selected = row;
    if (x >= axis.left && y >= AXIS_HEIGHT) timeline.putCursor(axis.t(x));
    else timeline.draw();
  }

  /** @param {WheelEvent} event */
  wheel(event) {
    const { timeline } = this, { axis } = timeline, [x] = this.place(event);
    const isPan = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const pixels = (isPan ? event.deltaX || event.deltaY : event.deltaY) * (event.deltaMode === 1 ? LINE : 1);
    if (isPan) {
      event.preventDefault();
      timeline.pan((pixels / axis.width) * axis.span);
      return;
    }
    const isWithKey = event.ctrlKey || event.metaKey; // a pinch is a wheel with Ctrl
    if (!isWithKey && document.activeElement !== this.canvas) return; // the page scrolls
    const factor = Math.exp(Math.max(Math.min(pixels, 240), -240) * (isWithKey ? 0.01 : 0.0025));
    timeline.stopFollowing();
    const isZoomed = timeline.zoom(factor, axis.t(Math.max(x, axis.left)));
    if (isZoomed || isWithKey) event.preventDefault(); // else the page scrolls
    timeline.leave();
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const { timeline } = this, { cursor, axis, range } = timeline;
    const zoom = (/** @type {number} */ factor) =>
      timeline.zoom(factor, cursor !== null && axis.shows(cursor) ? cursor : (axis.t0 + axis.t1) / 2);
    const go = (/** @type {number} */ t) => {
      if (!range.isEmpty) timeline.putCursor(t, { isVisible: true });
    };
    const shift = (/** @type {1 | -1} */ way) => {
      if (event.shiftKey) timeline.pan((way * axis.span) / 8);
      else timeline.step(way);
    };
    /** @type {Map<string, () => unknown>} */
    const actions = new Map([
      ["ArrowRight", () => { shift(1); }],
      ["ArrowLeft", () => { shift(-1); }],
      ["ArrowDown", () => { timeline.select(1); }],
      ["ArrowUp", () => { timeline.select(-1); }],
      ...["+", "="].map((key) => /** @type {const} */ ([key, () => zoom(0.6)])),
      ...["-", "_"].map((key) => /** @type {const} */ ([key, () => zoom(1 / 0.6)])),
      ["Home", () => { go(range.low); }],
      ["End", () => { go(range.high); }],
      ["PageUp", () => { timeline.pan(-0.9 * axis.span); }],
      ["PageDown", () => { timeline.pan(0.9 * axis.span); }],
      ["0", () => { timeline.fit(); }],
      ["Escape", () => {
        timeline.leave();
        if (cursor !== null) timeline.putCursor(null);
      }],
    ]);
    const action = actions.get(event.key);
    if (!action) return;
    event.preventDefault();
    event.stopPropagation();
    action();
    this.ring();
  }
}
