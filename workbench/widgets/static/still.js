// The last picture of a dashboard, for a notebook that is opened without the kernel: HTML without a script.

import { make } from "./dom.js";

const LIVE = ".fw-buttons, .fw-stops, .fw-unseen, .fw-hint, .fw-panel:has(.fw-timeline) .fw-note, [role=tooltip]";
const COLOURS = ["--fw-page", "--fw-ink", "--fw-soft", "--fw-edge"]; // the page's, which canvases were drawn for

/**
 * A dashboard as it is drawn now, without its buttons, and with its styles and pictures inside.
 * @param {HTMLElement} root
 */
export function stillOf(root) {
  const still = /** @type {HTMLElement} */ (root.cloneNode(true)), canvases = [...root.querySelectorAll("canvas")];
  still.querySelectorAll("canvas").forEach((canvas, place) => { canvas.replaceWith(imageOf(canvases[place])); });
  for (const part of still.querySelectorAll(LIVE)) part.remove();
  for (const button of still.querySelectorAll("button")) button.replaceWith(button.textContent);
  for (const { name } of [...still.attributes]) if (name !== "class") still.removeAttribute(name);
  const dressed = getComputedStyle(root);
  for (const name of COLOURS) still.style.setProperty(name, dressed.getPropertyValue(name));
  still.style.maxWidth = `${root.offsetWidth}px`; // text in a wider image would be blurred
  still.classList.add("fw-still");
  still.prepend(make("style", "", [...rules()].join("\n")));
  still.append(make("div", "fw-foot", "The dashboard when the notebook was saved."));
  return still.outerHTML;
}

/** @param {HTMLCanvasElement | undefined} canvas */
function imageOf(canvas) {
  const image = make("img");
  if (canvas === undefined) return image;
  image.alt = canvas.closest(".fw-panel, .fw-card")?.querySelector("h4")?.firstChild?.textContent ?? "";
  image.src = canvas.toDataURL();
  image.style.cssText = "display: block; width: 100%";
  return image;
}

/** The page's style rules of dashboards, each once. */
function rules() {
  const found = [...document.styleSheets].flatMap(({ cssRules }) => [...cssRules]);
  return new Set(found.map(({ cssText }) => cssText).filter((text) => text.includes(".fw-")));
}
