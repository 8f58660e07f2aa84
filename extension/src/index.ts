/** The plugin that JupyterLab and Notebook load: commands, and where they appear. */
import { ILabShell, ILayoutRestorer, type JupyterFrontEnd, type JupyterFrontEndPlugin } from "@jupyterlab/application";
import { Clipboard, ICommandPalette, MainAreaWidget, WidgetTracker } from "@jupyterlab/apputils";
import { ILauncher } from "@jupyterlab/launcher";
import { INotebookTracker } from "@jupyterlab/notebook";
import { IRenderMimeRegistry } from "@jupyterlab/rendermime";
import { ISettingRegistry } from "@jupyterlab/settingregistry";
import { IStateDB } from "@jupyterlab/statedb";
import { IStatusBar } from "@jupyterlab/statusbar";

import about from "../package.json";
import { addActions } from "./actions";
import { CourseWidget } from "./course";
import { insertExample } from "./example";
import { DashboardWidget } from "./dashboard";
import { followWidths } from "./figures";
import { returnFocus } from "./focus";
import { shardsIcon } from "./icon";
import { insertLoad, LOAD } from "./load";
import { Notebooks } from "./notebooks";
import { DEFAULTS, settingsOf } from "./settings";
import { keepStills } from "./stills";
import { Pictures } from "./pictures";
import { Sidebar, StatusItem } from "./sidebar";

const ID = "fsdp-workbench:plugin";
const CATEGORY = "FSDP";

const plugin: JupyterFrontEndPlugin<void> = {
  id: ID,
  description: "A panel beside the notebook: start ranks, shard models, train, stop and inspect.",
  autoStart: true,
  requires: [INotebookTracker, IRenderMimeRegistry],
  optional: [ICommandPalette, ILabShell, ILauncher, ILayoutRestorer, ISettingRegistry, IStateDB, IStatusBar],
  activate: (
    app: JupyterFrontEnd,
    tracker: INotebookTracker,
    rendermime: IRenderMimeRegistry,
    palette: ICommandPalette | null,
    lab: ILabShell | null,
    launcher: ILauncher | null,
    restorer: ILayoutRestorer | null,
    registry: ISettingRegistry | null,
    stored: IStateDB | null,
    statusBar: IStatusBar | null,
  ) => {
    followWidths(rendermime);
    keepStills(tracker);
    const notebooks = new Notebooks(tracker, about.version);
    const pictures = new Pictures(app, rendermime);
    const sidebar = new Sidebar(notebooks, pictures, app.commands, DEFAULTS, stored);
    app.shell.add(sidebar, "left", { rank: 600, type: "FSDP" });
    restorer?.add(sidebar, sidebar.id);
    returnFocus(app, sidebar.node);
    followVisibility(notebooks);

    notebooks.restMs = DEFAULTS.restMs;
    const openPanel = (): void => {
      app.shell.activateById(sidebar.id);
    };
    let settings = DEFAULTS;
    void registry?.load(ID).then((found) => {
      const take = (): void => {
        settings = settingsOf(found);
        sidebar.settings = settings;
        notebooks.restMs = settings.restMs;
      };
      found.changed.connect(take);
      take();
    });

    app.commands.addCommand("fsdp:load", {
      label: `FSDP: Insert ${LOAD}`,
      caption: `Insert a cell with ${LOAD} into this notebook`,
      isEnabled: () => notebooks.panel !== null,
      execute: () => {
        if (notebooks.panel !== null) insertLoad(notebooks.panel.content);
      },
    });
    app.commands.addCommand("fsdp:example", {
      label: "FSDP: Insert an Example",
      caption: "Insert a cell with a model, an optimizer and train_step() into this notebook",
      isEnabled: () => notebooks.panel !== null,
      execute: () => {
        if (notebooks.panel === null) return;
        app.shell.activateById(notebooks.panel.id);
        insertExample(notebooks.panel.content);
      },
    });
    app.commands.addCommand("fsdp:open-panel", {
      label: "FSDP: Show the Panel",
      caption: "Open the FSDP panel",
      icon: shardsIcon,
      execute: openPanel,
    });
    addCourse(app);
    const dashboards = addDashboards(app, notebooks, tracker, lab, pictures, openPanel);
    followTabs(app, notebooks, tracker, pictures, dashboards);
    void restorer?.restore(dashboards, {
      command: "fsdp:open-dashboard",
      args: ({ content }) => ({ path: content.path }),
      name: ({ content }) => content.path,
    });
    const openForm = (section: string): void => {
      openPanel();
      sidebar.reveal(section);
    };
    const stop = (): void => {
      sidebar.stop();
    };
    const actions = addActions(app, notebooks, pictures, { openPanel, openForm, stop, settings: () => settings });

    for (const command of ["fsdp:load", "fsdp:example", "fsdp:open-panel", "fsdp:open-dashboard", "fsdp:open-course", ...actions]) {
      palette?.addItem({ command, category: CATEGORY });
    }
    launcher?.add({ command: "fsdp:open-dashboard", category: "Other", rank: 50 });
    launcher?.add({ command: "fsdp:open-course", category: "Other", rank: 51 });
    statusBar?.registerStatusItem("fsdp-workbench:status", {
      item: new StatusItem(notebooks, openPanel),
      align: "left",
      rank: 90,
    });
    app.commands.addCommand("fsdp:copy-line", {
      label: "Copy as %fsdp Line",
      icon: undefined,
      execute: async () => {
        const node = app.contextMenuHitTest(({ dataset }) => dataset.fsdpCommand !== undefined);
        const command = node?.dataset.fsdpCommand;
        const line = command === undefined ? null : await notebooks.model.line(JSON.parse(command) as never);
        if (line !== null) Clipboard.copyToSystem(line);
      },
    });
  },
};

/** Add the command that opens the list of the course's notebooks. */
function addCourse(app: JupyterFrontEnd): void {
  let open: MainAreaWidget<CourseWidget> | null = null;
  app.commands.addCommand("fsdp:open-course", {
    label: "FSDP Course",
    caption: "Show the notebooks of the course, and how many of their checks passed",
    icon: shardsIcon,
    execute: ({ cwd }) => {
      if (open === null || open.isDisposed) {
        open = new MainAreaWidget({ content: new CourseWidget(app, typeof cwd === "string" ? cwd : "") });
        app.shell.add(open, "main");
      }
      app.shell.activateById(open.id);
    },
  });
}

/** Add the command that opens the dashboard of a notebook; returns the tracker of open dashboards. */
function addDashboards(
  app: JupyterFrontEnd,
  notebooks: Notebooks,
  tracker: INotebookTracker,
  lab: ILabShell | null,
  pictures: Pictures,
  openPanel: () => void,
): WidgetTracker<MainAreaWidget<DashboardWidget>> {
  const open = new WidgetTracker<MainAreaWidget<DashboardWidget>>({ namespace: "fsdp-dashboards" });
  const load = async (): Promise<string> => {
    const followed = notebooks.current; // its dashboard is in front
    await followed?.load();
    return followed?.model.loadError ?? "";
  };
  app.commands.addCommand("fsdp:open-dashboard", {
    label: "FSDP Dashboard",
    caption: "Show the live dashboard of a notebook's ranks",
    icon: shardsIcon,
    execute: async ({ path: given }) => {
      const path = typeof given === "string" ? given : notebooks.panel?.context.path;
      if (path === undefined) {
        openPanel(); // which says what to do first
        return;
      }
      const there = open.find(({ content }) => content.path === path);
      if (there !== undefined) {
        app.shell.activateById(there.id);
        return;
      }
      const widget = new MainAreaWidget({ content: new DashboardWidget(tracker, path, load, about.version) });
      widget.id = `fsdp-dashboard-${path}`;
      widget.title.label = `${path.split("/").at(-1)?.replace(/\.ipynb$/, "")} (FSDP)`;
      widget.title.caption = `Ranks of ${path}`;
      widget.title.icon = shardsIcon;
      widget.title.closable = true;
      await open.add(widget);
      // Notebook's main area holds a single widget, so the dashboard goes below. Nothing there gives it a height: the
      // content has none of its own, and the layout overwrites that of the widget around it
      if (lab === null) widget.content.addClass("fsdp-mod-below");
      app.shell.add(widget, lab === null ? "down" : "main", pictures.place(tracker.find(({ context }) => context.path === path) ?? null));
      pictures.beside(widget);
      app.shell.activateById(widget.id);
    },
  });
  return open;
}

/** Follow a notebook also while its dashboard or picture is in front. */
function followTabs(
  app: JupyterFrontEnd,
  notebooks: Notebooks,
  tracker: INotebookTracker,
  pictures: Pictures,
  dashboards: WidgetTracker<MainAreaWidget<DashboardWidget>>,
): void {
  app.shell.currentChanged?.connect((_shell, { newValue: widget }) => {
    if (widget === null) return;
    const path = dashboards.find((dashboard) => dashboard === widget)?.content.path;
    const owner = tracker.find((panel) => panel === widget || panel.context.path === path) ?? pictures.ownerOf(widget);
    if (owner !== undefined && !owner.isDisposed) notebooks.follow(owner);
  });
}

/** Ask the kernels nothing while the page is hidden. */
function followVisibility(notebooks: Notebooks): void {
  const follow = (): void => {
    notebooks.isLookedAt = !document.hidden;
  };
  document.addEventListener("visibilitychange", follow);
  follow();
}

export default plugin;
