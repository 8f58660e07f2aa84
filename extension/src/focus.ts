/** Keeps the focus of keyboard and screen reader users: when the focused element is removed, and when a menu closes. */
import type { JupyterFrontEnd } from "@jupyterlab/application";
import type { IDisposable } from "@lumino/disposable";

const TABBABLE = "a[href], button, input, select, summary, textarea, [tabindex]";

/** The tab stops inside an element, in order, without hidden ones, which cannot have the focus. */
function tabbable(node: HTMLElement): readonly HTMLElement[] {
  const found = node.querySelectorAll<HTMLElement>(TABBABLE);
  return [...found].filter((each) => each.tabIndex >= 0 && each.checkVisibility());
}

function isNowhere(): boolean {
  return document.activeElement === null || document.activeElement === document.body;
}

/** When the focused element is removed from a node, moves the focus to the element in its place, or to the node. */
export class FocusKeeper implements IDisposable {
  readonly #node: HTMLElement;
  readonly #ender = new AbortController();
  readonly #observer: MutationObserver;
  #last: HTMLElement | null = null;
  #before: readonly HTMLElement[] = []; // tab stops before it

  constructor(node: HTMLElement) {
    this.#node = node;
    const { signal } = this.#ender;
    node.addEventListener("focusin", ({ target }) => { this.#take(target as HTMLElement); }, { signal });
    node.addEventListener("focusout", () => { queueMicrotask(() => { this.#left(); }); }, { signal });
    this.#observer = new MutationObserver(() => { this.#look(); });
    this.#observer.observe(node, { childList: true, subtree: true });
  }

  get isDisposed(): boolean {
    return this.#ender.signal.aborted;
  }

  dispose(): void {
    this.#ender.abort();
    this.#observer.disconnect();
    this.#last = null;
  }

  #take(target: HTMLElement): void {
    this.#last = target;
    const all = tabbable(this.#node);
    this.#before = all.slice(0, Math.max(all.indexOf(target), 0));
  }

  /** The focus went elsewhere if the element that had it is still there. */
  #left(): void {
    if (this.#last?.isConnected === true && document.activeElement !== this.#last) this.#last = null;
  }

  #look(): void {
    if (this.#last === null) return;
    if (this.#last.isConnected) {
      this.#take(this.#last); // the elements before it may have changed
      return;
    }
    this.#last = null;
    const left = tabbable(this.#node);
    // counted from a neighbour, not from the top: a reply above may appear or vanish at the same time
    const neighbour = this.#before.findLast((each) => left.includes(each));
    const inItsPlace = left[neighbour === undefined ? 0 : left.indexOf(neighbour) + 1];
    if (isNowhere()) (inItsPlace ?? neighbour ?? this.#node).focus();
  }
}

/** When an element's context menu closes and its command has not moved the focus, return it to where it was. */
export function returnFocus(app: JupyterFrontEnd, node: HTMLElement): void {
  let from: HTMLElement | null = null;
  node.addEventListener("contextmenu", ({ target }) => {
    from = target instanceof HTMLElement ? target.closest<HTMLElement>(TABBABLE) : null;
  }, { capture: true });
  app.contextMenu.menu.aboutToClose.connect(() => {
    const back = from;
    from = null;
    requestAnimationFrame(() => {
      if (isNowhere()) back?.focus();
    });
  });
}
