import type { Contents } from "@jupyterlab/services";
import { expect, it } from "vitest";

import { findCourse, progressOf } from "../src/progress";
import { CHECK_MIME, COURSE_FOLDER as FOLDER } from "../src/protocol";

const heading = { cell_type: "markdown", metadata: {}, source: ["# Who holds what\n", "\n", "Text."] };

/** A cell that checks, with the records that it left. */
function check(...passed: unknown[]): object {
  const outputs = passed.map((each) => ({ data: { "text/plain": "x", ...(each === null ? {} : { [CHECK_MIME]: { passed: each } }) } }));
  return { cell_type: "code", metadata: { nbgrader: { grade: true } }, source: "check()", outputs };
}

/** The folders and notebooks of a server. */
function contentsOf(files: Record<string, object[]>): Contents.IManager {
  const get = (path: string, { type, content }: { type: string; content?: boolean }): Promise<object> => {
    if (content !== true) return Promise.resolve({ content: null });
    if (type === "notebook") return path in files ? Promise.resolve({ content: { cells: files[path] } }) : Promise.reject(new Error("gone"));
    const inside = Object.keys(files).filter((each) => each.split("/").slice(0, -1).join("/") === path);
    if (inside.length === 0 && path !== "") return Promise.reject(new Error("no such folder"));
    const folders = path === "" ? new Set(Object.keys(files).map((each) => each.split("/").slice(0, -1).join("/"))) : [];
    const listed = [...folders].map((each) => ({ type: "directory", path: each, name: each }));
    return Promise.resolve({ content: [...listed, ...inside.map((each) => ({ type: "notebook", path: each, name: each.split("/").at(-1) }))] });
  };
  return { get } as unknown as Contents.IManager;
}

it.each<[string, object[], object]>([
  ["nothing ran", [check(), check()], { checks: 2, passed: 0, tried: 0 }],
  ["one passed, one failed", [check(true), check(false)], { checks: 2, passed: 1, tried: 2 }],
  ["a cell with two checks passes with both", [check(true, false), check(true, true)], { checks: 2, passed: 1, tried: 2 }],
  ["an error, or a record of something else, is no pass", [check(null), check("yes")], { checks: 2, passed: 0, tried: 1 }],
])("progress: %s", (_, cells, expected) => {
  const found = progressOf("05.ipynb", { cells: [heading, ...cells] } as never);
  expect(found).toEqual({ path: "05.ipynb", title: "Who holds what", ...expected });
});

it("a notebook without a check is not of the course", () => {
  expect(progressOf("x.ipynb", { cells: [heading] })).toBeNull();
});

it("the first folder with notebooks of the course counts, in the order of their numbers", async () => {
  const files = {
    "work/mine.ipynb": [heading, check(true)],
    [`${FOLDER}/01_tour.ipynb`]: [heading, check(true)],
    [`${FOLDER}/00_replay.ipynb`]: [heading, check()],
    [`${FOLDER}/02_empty.ipynb`]: [heading],
  };
  const found = await findCourse(contentsOf(files), ["work", ""]);
  expect(found?.folder).toBe(FOLDER);
  expect(found?.notebooks.map(({ path }) => path)).toEqual([`${FOLDER}/00_replay.ipynb`, `${FOLDER}/01_tour.ipynb`]);
  expect(await findCourse(contentsOf({}), ["", "gone"])).toBeNull();
});
