// The widget around the timeline: it asks the kernel for what it does not have, keeps it for all its views, and tells
// each of them what arrives. Put behind timeline.js by workbench/widgets/timeline.py.

const WIDTHS = { start: 8, end: 8, bytes: 8, arrowFrom: 8, unit: 2, kind: 1, exposed: 1 }; // bytes on the wire

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

export default () => {
  const page = Math.random().toString(36).slice(2);
  const known = { header: null, chunks: [], counts: [], open: [] };
  const views = new Set();

  function describe(view) {
    const { tracks, units, palette } = known.header;
    view.setTracks(tracks);
    view.setPalette(palette);
    view.setUnits(units);
  }

  /** Take what comes next; false if something before it is missing. */
  function take({ header, chunks, open }, buffers) {
    if (header) {
      known.header = header;
      views.forEach(describe);
    }
    for (const [place, { track, first, count }] of chunks.entries()) {
      const have = known.counts[track] ?? 0;
      if (first > have || !known.header) return false;
      if (first + count <= have) continue; // asked for by another page
      const items = unpack(buffers[place], count);
      if (first < have) Object.keys(items).forEach((name) => (items[name] = items[name].slice(have - first)));
      known.counts[track] = first + count;
      known.chunks.push([track, items]);
      views.forEach((view) => view.append(track, items));
    }
    known.open = open.map(({ track, count }, k) => [track, count ? unpack(buffers[chunks.length + k], count) : null]);
    views.forEach((view) => known.open.forEach(([track, items]) => view.setOpen(track, items)));
    return true;
  }

  const ask = (model) => model.send({ type: "want", page, counts: known.counts });

  return {
    initialize({ model }) {
      model.on("msg:custom", (message, buffers) => {
        if (message.type !== "more" || (message.page && message.page !== page)) return;
        if (!take(message, buffers)) ask(model);
      });
      ask(model);
    },
    render({ model, el }) {
      const canvas = document.createElement("canvas");
      el.append(canvas);
      const view = createTimeline(canvas, model.get("_options"));
      if (known.header) describe(view);
      known.chunks.forEach(([track, items]) => view.append(track, items));
      known.open.forEach(([track, items]) => view.setOpen(track, items));
      view.onCursor((us) => {
        model.set("cursor_us", us);
        model.save_changes();
      });
      const follow = () => view.setCursor(model.get("cursor_us"));
      model.on("change:cursor_us", follow);
      follow();
      views.add(view);
      return () => {
        model.off("change:cursor_us", follow);
        views.delete(view);
        view.destroy();
      };
    },
  };
};
