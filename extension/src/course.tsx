/** The tab with the notebooks of the course, and how many of their checks passed. */
import type { JupyterFrontEnd } from "@jupyterlab/application";
import { ReactWidget } from "@jupyterlab/apputils";
import * as React from "react";

import { shardsIcon } from "./icon";
import { COURSE_FOLDER } from "./protocol";
import { type Course, type CourseNotebook, findCourse } from "./progress";

export class CourseWidget extends ReactWidget {
  readonly #app: JupyterFrontEnd;
  readonly #folders: readonly string[];
  #course: Course | null = null;
  #isRead = false;

  /** @param cwd - folder in which the course is looked for first. */
  constructor(app: JupyterFrontEnd, cwd: string) {
    super();
    this.#app = app;
    this.#folders = [cwd, ""];
    this.id = "fsdp-course";
    this.addClass("fsdp-Panel");
    this.addClass("fsdp-Course");
    this.title.label = "FSDP Course";
    this.title.icon = shardsIcon;
    this.title.closable = true;
    app.serviceManager.contents.fileChanged.connect(this.#onFile, this);
    void this.#read();
  }

  override dispose(): void {
    this.#app.serviceManager.contents.fileChanged.disconnect(this.#onFile, this);
    super.dispose();
  }

  protected override onAfterShow(): void {
    void this.#read();
  }

  #onFile(): void {
    if (this.isVisible) void this.#read();
  }

  async #read(): Promise<void> {
    const found = await findCourse(this.#app.serviceManager.contents, this.#folders);
    if (this.isDisposed) return;
    this.#course = found;
    this.#isRead = true;
    this.update();
  }

  protected override render(): React.JSX.Element {
    if (!this.#isRead) return <p className="fsdp-Notice">Reading the notebooks…</p>;
    if (this.#course === null) return <None />;
    const { notebooks } = this.#course;
    const [checks, passed] = [total(notebooks, "checks"), total(notebooks, "passed")];
    return (
      <>
        <h2>FSDP Course</h2>
        <p className="fsdp-Notice">
          {passed} of {checks} checks pass, in {notebooks.length} notebooks. Their results are kept in the notebooks when they are saved.
        </p>
        <ul>
          {notebooks.map((each) => (
            <li key={each.path}>
              <button type="button" className="fsdp-Link" onClick={() => void this.#app.commands.execute("docmanager:open", { path: each.path })}>
                {each.title}
              </button>
              <span className="fsdp-note">{words(each)}</span>
              <progress max={each.checks} value={each.passed} aria-label={`${each.title}: ${words(each)}`} />
            </li>
          ))}
        </ul>
      </>
    );
  }
}

function None(): React.JSX.Element {
  return (
    <p className="fsdp-Notice">
      There is no course in this folder. In a terminal, <code>workbench course --copy-only</code> copies its notebooks into the folder {COURSE_FOLDER}.
    </p>
  );
}

function total(notebooks: readonly CourseNotebook[], what: "checks" | "passed"): number {
  return notebooks.reduce((sum, each) => sum + each[what], 0);
}

function words({ checks, passed, tried }: CourseNotebook): string {
  if (tried === 0) return checks === 1 ? "1 check" : `${checks} checks`;
  return `${passed} of ${checks} ${checks === 1 ? "check passes" : "checks pass"}`;
}
