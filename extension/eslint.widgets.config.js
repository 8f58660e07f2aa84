// The rules of eslint.config.js for the widgets' modules, which are outside this folder: run from the folder above.
// @ts-check

import { defineConfig } from "eslint/config";
import rules from "./eslint.config.js";

export default defineConfig(rules, {
  ignores: ["**/*.d.ts"],
}, {
  languageOptions: {
    parserOptions: {
      projectService: false,
      project: "tsconfig.widgets.json",
      tsconfigRootDir: import.meta.dirname,
    },
  },
});
