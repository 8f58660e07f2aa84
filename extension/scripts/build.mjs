// @ts-check

// Builds the federated extension with @jupyter/builder from node_modules: no Python, no network.
import { spawnSync } from "node:child_process";
import { createRequire } from "node:module";

const require = createRequire(import.meta.url);
const { status } = spawnSync(
  process.execPath,
  [
    require.resolve("@jupyter/builder/lib/build-labextension.js"),
    "--core-package-file",
    require.resolve("@jupyterlab/core-meta/core.package.json"),
    ".",
  ],
  { stdio: "inherit" },
);
process.exit(status ?? 1);
