// The widget around the timeline: it asks the kernel for what it does not have, keeps it for all its views, and tells
// each of them what arrives. A live one asks again and again while somebody looks; the kernel answers when there is
// something new.

import { FONT, createTimeline } from "./timeline.js";
import { COLUMNS } from "./track.js";

const WIDTHS = { start: 8, end: 8, bytes: 8, arrowFrom: 8, unit: 2, kind: 1, exposed: 1 }; // bytes on the wire
const LOST_MS = 6000; // a question without an answer for so long is put again
const LOOK_MS = 1000;
const MOST_KEPT = 2e6; // items kept for views that open later; of more the older half is forgotten

/** The columns of `count` items, one after the other. */
function unpack(view, count) {
  const items = {};
  let at = view.byteOffset;
  for (const [column, width] of Object.entries(WIDTHS)) {
    items[column] = new COLUMNS[column](view.buffer.slice(at, at + width * count));
    at += width * count;
  }
  return items;
}

/** One view: its timeline, begun anew for each run, and a sentence where there is something to say. */
class Sight {
  constructor(model, el, onSeen) {
    Object.assign(this, { model, el, isSeen: true });
    this.sentence = document.createElement("div");
    Object.assign(this.sentence.style, { font: `13px/1.5 ${FONT}`, opacity: 0.75, padding: "2px 0 4px", display: "none" });
    this.sentence.setAttribute("role", "status");
    this.place = document.createElement("div");
    el.append(this.sentence, this.place);
    el.classList.add("fw-canvas");
    el.sight = this; // for whoever looks into the page
    this.observer = new IntersectionObserver((entries) => {
      this.isSeen = entries.at(-1).isIntersecting;
      onSeen();
    });
    this.observer.observe(el);
    this.begin();
  }

  begin() {
    this.timeline?.destroy();
    const canvas = document.createElement("canvas");
    this.place.replaceChildren(canvas);
    this.timeline = createTimeline(canvas);
    this.timeline.onCursor((us) => {
      this.model.set("cursor_us", us);
      this.model.save_changes();
    });
    this.showCursor();
  }

  showCursor() {
    this.timeline.setCursor(this.model.get("cursor_us"));
  }

  describe({ tracks, units, holds }) {
    this.timeline.setTracks(tracks);
    this.timeline.setUnits(units);
    this.timeline.setHolds(holds);
  }

  say(said, isEmpty, clock) {
    const text = [said, isEmpty ? "" : clock].filter(Boolean).join(" \u00b7 ");
    Object.assign(this.sentence, { textContent: text }).style.display = text ? "block" : "none";
    this.place.style.display = said && isEmpty ? "none" : "block";
  }

  close() {
    this.observer.disconnect();
    this.timeline.destroy();
  }
}

export default () => {
  const page = Math.random().toString(36).slice(2);
  const known = { run: 0, header: null, chunks: [], counts: [], skipped: [], kept: 0, open: [], said: "" };
  const sights = new Set();
  let askedAt = -Infinity, timer = 0;

  /** Forget all: another job is shown. */
  function begin(run) {
    Object.assign(known, { run, header: null, chunks: [], counts: [], skipped: [], kept: 0, open: [] });
    sights.forEach((sight) => sight.begin());
  }

  function say() {
    sights.forEach((sight) => sight.say(known.said, !known.header?.tracks.length, known.header?.clock));
  }

  /** Count what no view will ever have. */
  function skip(track, count) {
    known.counts[track] = (known.counts[track] ?? 0) + count;
    known.skipped[track] = (known.skipped[track] ?? 0) + count;
    sights.forEach(({ timeline }) => timeline.skip(track, count));
  }

  /** Keep items for views that open later; the oldest are left out where they are too many. */
  function keep(track, items) {
    known.chunks.push([track, items]);
    known.kept += items.start.length;
    if (known.kept <= MOST_KEPT) return;
    let count = 0;
    while (known.kept > MOST_KEPT / 2) {
      const [old, { start }] = known.chunks[count++];
      known.skipped[old] = (known.skipped[old] ?? 0) + start.length;
      known.kept -= start.length;
    }
    known.chunks.splice(0, count);
  }

  /** Take what comes next; false if something before it is missing. */
  function take({ run, header, chunks, forgotten, open, said }, buffers) {
    if ((run ?? 0) !== known.run) begin(run ?? 0);
    if (header) {
      known.header = header;
      sights.forEach((sight) => sight.describe(header));
    }
    for (const [track, count] of forgotten.entries()) { // the kernel has these no more
      const missing = count - (known.counts[track] ?? 0);
      if (missing > 0) skip(track, missing);
    }
    for (const [place, { track, first, count }] of chunks.entries()) {
      const have = known.counts[track] ?? 0;
      if (first > have || !known.header) return false;
      if (first + count <= have) continue; // asked for by another page
      const items = unpack(buffers[place], count);
      if (first < have) Object.keys(items).forEach((name) => (items[name] = items[name].slice(have - first)));
      known.counts[track] = first + count;
      keep(track, items);
      sights.forEach(({ timeline }) => timeline.append(track, items));
    }
    known.open = open.map(({ track, count }, k) => [track, count ? unpack(buffers[chunks.length + k], count) : null]);
    sights.forEach(({ timeline }) => known.open.forEach(([track, items]) => timeline.setOpen(track, items)));
    known.said = said ?? "";
    say();
    return true;
  }

  function ask(model, more = {}) {
    askedAt = performance.now();
    model.send({ type: "want", page, run: known.run, counts: known.counts, ...more });
  }

  /** Ask for what comes next, if somebody looks and no question is open. */
  function wait(model) {
    if (!model.get("_is_live") || performance.now() - askedAt < LOST_MS || document.hidden) return;
    if ([...sights].some(({ isSeen }) => isSeen)) ask(model, { wait: true });
  }

  return {
    initialize({ model }) {
      model.on("msg:custom", (message, buffers) => {
        if (message.type !== "more" || (message.page && message.page !== page)) return;
        const isWhole = take(message, buffers);
        if (model.get("_is_live")) askedAt = -Infinity;
        if (isWhole) wait(model);
        else ask(model);
      });
      ask(model);
    },
    render({ model, el }) {
      const sight = new Sight(model, el, () => wait(model));
      sights.add(sight);
      if (known.header) sight.describe(known.header);
      known.skipped.forEach((count, track) => sight.timeline.skip(track, count));
      known.chunks.forEach(([track, items]) => sight.timeline.append(track, items));
      known.open.forEach(([track, items]) => sight.timeline.setOpen(track, items));
      say();
      const follow = () => sight.showCursor();
      model.on("change:cursor_us", follow);
      if (sights.size === 1) timer = setInterval(() => wait(model), LOOK_MS);
      return () => {
        model.off("change:cursor_us", follow);
        sights.delete(sight);
        sight.close();
        if (!sights.size) clearInterval(timer);
      };
    },
  };
};
