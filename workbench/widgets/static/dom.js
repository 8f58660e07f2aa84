// Elements of the page. Text is inserted as text, never as HTML: names of units, ranks and metrics are arbitrary.

import { MEANINGS } from "./events.js";

/**
 * An element with classes and plain text.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {string} className
 * @param {string} text
 * @returns {HTMLElementTagNameMap[K]}
 */
export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

/**
 * Set an element's text, only if it changes: a screen reader announces each time that it is set.
 * @param {Element} element
 * @param {string} text
 */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Call `act` when a button is pressed while it is enabled.
 * @param {HTMLElement} button
 * @param {() => void} act
 */
export function onPress(button, act) {
  button.onclick = () => {
    if (isEnabled(button)) act();
  };
}

/**
 * Enable or disable a button, without `disabled`: that would lose the focus.
 * @param {HTMLElement} button
 * @param {boolean} can
 */
export function enable(button, can) {
  if (isEnabled(button) !== can) button.setAttribute("aria-disabled", String(!can));
}

/** @param {HTMLElement} button */
export function isEnabled(button) {
  return button.getAttribute("aria-disabled") !== "true";
}

/**
 * Replace the children of `element` only if `key` changes: otherwise a button would vanish while it is pressed.
 * @param {HTMLElement} element
 * @param {unknown} key the content of the children
 * @param {() => (Node | string)[]} children
 */
export function refill(element, key, children) {
  const now = JSON.stringify(key);
  if (element.dataset.shown === now) return;
  element.dataset.shown = now;
  element.replaceChildren(...children());
}

/**
 * A coloured square, a word, and a number.
 * @param {string} word
 * @param {string} colour empty: no square
 * @param {string} number
 */
export function swatch(word, colour, number = "") {
  const entry = make("span");
  if (colour) {
    const square = make("i");
    square.style.background = colour;
    entry.append(square);
  }
  entry.append(word);
  entry.title = MEANINGS[word] ?? "";
  if (number) entry.append(" ", make("b", "", number));
  return entry;
}

/**
 * Keep JupyterLab's shortcuts from keys without a modifier while the focus is in an element; those with one still work.
 * Lumino listens at the document, so the attribute is set earlier, at the window.
 * @param {HTMLElement} element
 * @param {{ signal: AbortSignal }} options
 */
export function keepBareKeys(element, options) {
  element.dataset.lmSuppressShortcuts = "true";
  window.addEventListener("keydown", ({ altKey, ctrlKey, metaKey }) => {
    element.toggleAttribute("data-lm-suppress-shortcuts", !(altKey || ctrlKey || metaKey));
  }, { ...options, capture: true });
}
