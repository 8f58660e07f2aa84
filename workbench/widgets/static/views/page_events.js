// What happens around a dashboard on its page.

import { sure } from "../sure.js";

/**
 * Follow the size and the theme of the page, and whether `root` can be seen.
 * @param {HTMLElement} root
 * @param {{ draw: () => void, see: (isSeen: boolean) => void, signal: AbortSignal }} calls
 */
export function followPage(root, { draw, see, signal }) {
  let isInView = true;
  const tell = () => { see(isInView && !document.hidden); };
  const view = new IntersectionObserver((entries) => {
    isInView = sure(entries.at(-1)).isIntersecting;
    tell();
  });
  const size = new ResizeObserver(draw), theme = new MutationObserver(draw);
  view.observe(root);
  size.observe(root);
  theme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "class"] });
  document.addEventListener("visibilitychange", tell, { signal });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw, { signal });
  signal.addEventListener("abort", () => {
    for (const observer of [view, size, theme]) observer.disconnect();
  });
  tell();
}

/**
 * Call `put` with the horizontal position, in pixels, at which the pointer is pressed or dragged on a canvas.
 * @param {HTMLCanvasElement} canvas
 * @param {(x: number) => void} put
 * @param {AbortSignal} signal
 */
export function onScrub(canvas, put, signal) {
  const tell = (/** @type {PointerEvent} */ event) => { put(event.clientX - canvas.getBoundingClientRect().left); };
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    tell(event);
  }, { signal });
  canvas.addEventListener("pointermove", (event) => {
    if (canvas.hasPointerCapture(event.pointerId)) tell(event);
  }, { signal });
}
