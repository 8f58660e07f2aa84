/** Pictures and tables of commands, each in a tab of its own beside the notebook. */
import type { JupyterFrontEnd } from "@jupyterlab/application";
import { MainAreaWidget } from "@jupyterlab/apputils";
import type { NotebookPanel } from "@jupyterlab/notebook";
import { type IRenderMimeRegistry, MimeModel } from "@jupyterlab/rendermime";
import type { PartialJSONObject } from "@lumino/coreutils";
import { Panel, Widget } from "@lumino/widgets";

import { FIGURE } from "./figures";
import { shardsIcon } from "./icon";
import type { PanelModel } from "./model";
import { asOf, type Typed, wordOf } from "./words";

const TEXT = "text/html";

/** Page width in pixels below which a notebook and a tab do not fit side by side. */
const WIDE = 1_000;

type Tab = MainAreaWidget<Panel>;

export class Pictures {
  readonly #app: JupyterFrontEnd;
  readonly #rendermime: IRenderMimeRegistry;
  readonly #tabs = new Map<string, Tab>();
  readonly #owners = new WeakMap<Widget, NotebookPanel>();
  #last: Widget | null = null; // the newest tab beside a notebook

  constructor(app: JupyterFrontEnd, rendermime: IRenderMimeRegistry) {
    this.#app = app;
    this.#rendermime = rendermime;
  }

  /** The notebook of a tab; undefined: it is not one of these tabs. */
  ownerOf(widget: Widget): NotebookPanel | undefined {
    return this.#owners.get(widget);
  }

  /** Run a command that draws, and show its picture, in the tab of the same command and notebook if there is one. */
  async draw(model: PanelModel, notebook: NotebookPanel | null, command: Typed): Promise<void> {
    const data = await model.show(command);
    const word = wordOf(command);
    if (data !== null) await this.show(notebook, word, data, asOf(model.state, word));
  }

  /** Show data, by MIME type: a text with a figure below it, or what is preferred among the types; `when` is above. */
  async show(notebook: NotebookPanel | null, name: string, data: Readonly<Record<string, unknown>>, when = ""): Promise<void> {
    const preferred = this.#rendermime.preferredMimeType(data as PartialJSONObject, "any");
    if (preferred === undefined) return;
    const types = preferred === FIGURE && TEXT in data ? [TEXT, FIGURE] : [preferred];
    const tab = this.#tabOf(notebook, name);
    for (const before of [...tab.content.widgets]) before.dispose();
    const made = types.map((type) => this.#rendermime.createRenderer(type));
    if (when !== "") tab.content.addWidget(note(when));
    for (const renderer of made) tab.content.addWidget(renderer);
    this.#app.shell.activateById(tab.id);
    const model = new MimeModel({ data: data as PartialJSONObject, trusted: true }); // the kernel escapes all names
    for (const renderer of made) await renderer.renderModel(model);
  }

  /** Open a page that a notebook's kernel wrote, in a browser tab. */
  async openPage(model: PanelModel, notebook: NotebookPanel | null, path: string): Promise<void> {
    const { contents } = this.#app.serviceManager;
    const folder = notebook?.context.path.split("/").slice(0, -1).join("/") ?? "";
    const file = contents.resolvePath(folder, path);
    try {
      await contents.get(file, { content: false });
      window.open(await contents.getDownloadUrl(file), "_blank", "noopener");
    } catch {
      model.reply = { line: "", text: `${path} is outside the folders that JupyterLab serves: open it as a file.`, isBad: false };
    }
  }

  /** Where to add a tab: beside the notebook, behind the tabs already there. */
  place(notebook: Widget | null): Parameters<JupyterFrontEnd.IShell["add"]>[2] {
    const ref = this.#last?.id ?? notebook?.id;
    const mode = this.#last !== null || window.innerWidth < WIDE ? "tab-after" : "split-right";
    return { mode, activate: true, ...(ref === undefined ? {} : { ref }) };
  }

  /** Add further tabs behind this one. */
  beside(tab: Widget): void {
    this.#last = tab;
    tab.disposed.connect(() => {
      if (this.#last === tab) this.#last = [...this.#tabs.values()].at(-1) ?? null;
    });
  }

  #tabOf(notebook: NotebookPanel | null, name: string): Tab {
    const id = `fsdp-${name}-${notebook?.id ?? ""}`;
    const there = this.#tabs.get(id);
    if (there !== undefined) return there;
    const content = new Panel(); // it scrolls if the picture is larger than the tab
    content.addClass("fsdp-Picture");
    const tab = new MainAreaWidget({ content });
    tab.id = id;
    tab.title.label = `${name} (FSDP)`; // a narrow tab shows its begin
    tab.title.caption = notebook === null ? "" : `${name} of ${notebook.context.path}`;
    tab.title.icon = shardsIcon;
    tab.title.closable = true;
    this.#app.shell.add(tab, "main", this.place(notebook));
    this.#tabs.set(id, tab);
    tab.disposed.connect(() => this.#tabs.delete(id));
    this.beside(tab);
    if (notebook !== null) this.#owners.set(tab, notebook);
    return tab;
  }
}

function note(text: string): Widget {
  const node = document.createElement("p");
  node.className = "fsdp-note";
  node.textContent = text;
  return new Widget({ node });
}
