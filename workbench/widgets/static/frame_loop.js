// Draws in the next frame of the screen, at most once per frame, and measures how long that takes.

export class FrameLoop {
  /** @param {() => boolean} draw returns whether there was something to draw */
  constructor(draw) {
    this.draw = draw;
    this.pending = 0; // number of the requested frame; 0: none
    this.isEnded = false;
    this.count = 0;
    this.drawMs = 0; // of the last frame
    this.born = performance.now();
    /** @type {number | null} */
    this.firstPaintMs = null;
  }

  request() {
    if (this.pending || this.isEnded) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      const begin = performance.now(), isDrawn = this.draw(), end = performance.now();
      this.drawMs = end - begin;
      this.count += 1;
      if (isDrawn) this.firstPaintMs ??= end - this.born;
    });
  }

  end() {
    this.isEnded = true;
    cancelAnimationFrame(this.pending);
    this.pending = 0;
  }
}
