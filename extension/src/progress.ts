/** How far the course is: its notebooks in a folder, and which of their checks passed, by the records in their outputs. */
import type { Contents } from "@jupyterlab/services";

import { CHECK_MIME, COURSE_FOLDER } from "./protocol";

/** What is read of a notebook. */
interface Content {
  readonly cells: readonly Cell[];
}

interface Cell {
  readonly cell_type: string;
  readonly metadata: { readonly nbgrader?: { readonly grade?: unknown } };
  readonly source: string | readonly string[];
  readonly outputs?: readonly { readonly data?: Readonly<Record<string, unknown>> }[];
}

/** A notebook of the course. */
export interface CourseNotebook {
  readonly path: string;
  readonly title: string;
  /** Number of checks. */
  readonly checks: number;
  /** How many of them passed when they ran last. */
  readonly passed: number;
  /** How many ran. */
  readonly tried: number;
}

/** A folder with notebooks of the course. */
export interface Course {
  readonly folder: string;
  readonly notebooks: readonly CourseNotebook[];
}

const NAME = /^\d\d_\w+\.ipynb$/;

/** Return the course in the first of some folders that has one, or a folder {@link COURSE_FOLDER} with it; null: none has. */
export async function findCourse(contents: Contents.IManager, folders: readonly string[]): Promise<Course | null> {
  for (const folder of new Set(folders)) {
    const files = await listed(contents, folder);
    const here = await readAll(contents, files);
    if (here.length > 0) return { folder, notebooks: here };
    const below = files.find(({ type, name }) => type === "directory" && name === COURSE_FOLDER);
    const notebooks = below === undefined ? [] : await readAll(contents, await listed(contents, below.path));
    if (below !== undefined && notebooks.length > 0) return { folder: below.path, notebooks };
  }
  return null;
}

async function readAll(contents: Contents.IManager, files: readonly Contents.IModel[]): Promise<CourseNotebook[]> {
  const named = files.filter(({ type, name }) => type === "notebook" && NAME.test(name)).sort((one, other) => one.name.localeCompare(other.name));
  const found = await Promise.all(named.map(async ({ path }) => read(contents, path)));
  return found.filter((each) => each !== null);
}

async function listed(contents: Contents.IManager, folder: string): Promise<Contents.IModel[]> {
  try {
    const model = await contents.get(folder, { type: "directory", content: true });
    return model.content as Contents.IModel[];
  } catch {
    return []; // there is no such folder
  }
}

async function read(contents: Contents.IManager, path: string): Promise<CourseNotebook | null> {
  try {
    const model = await contents.get(path, { type: "notebook", content: true });
    return progressOf(path, model.content as Content);
  } catch {
    return null; // no notebook, or gone meanwhile
  }
}

/** Return the progress of a notebook; null: it has no check, so it is not of the course. */
export function progressOf(path: string, { cells }: Content): CourseNotebook | null {
  const checks = cells.filter((cell) => cell.cell_type === "code" && cell.metadata.nbgrader?.grade === true);
  if (checks.length === 0) return null;
  const records = checks.map(({ outputs }) => recordsOf(outputs)).filter((each) => each.length > 0);
  const first = cells.find((cell) => cell.cell_type === "markdown");
  return {
    path,
    title: /^# (.+)$/m.exec([first?.source ?? ""].flat().join(""))?.[1] ?? path,
    checks: checks.length,
    passed: records.filter((each) => each.every(({ passed }) => passed === true)).length,
    tried: records.length,
  };
}

function recordsOf(outputs: Cell["outputs"] = []): { passed?: unknown }[] {
  return outputs.map(({ data }) => data?.[CHECK_MIME]).filter((each) => typeof each === "object" && each !== null);
}
