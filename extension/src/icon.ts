/** The icon of the workbench: one parameter, cut into the shards of four ranks. */
import { LabIcon } from "@jupyterlab/ui-components";

const BARS = [3, 7.5, 12, 16.5].map((y) => `<rect x="3" y="${y}" width="18" height="3.2" rx="0.6" opacity="0.35"/>`);
const SHARDS = [3, 7.5, 12, 16.5].map(
  (y, rank) => `<rect x="${3 + rank * 4.6}" y="${y}" width="4.2" height="3.2" rx="0.6"/>`,
);

export const shardsIcon = new LabIcon({
  name: "fsdp-workbench:shards",
  svgstr: `<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 24 24">
    <g class="jp-icon3" fill="#616161">${BARS.join("")}${SHARDS.join("")}</g>
  </svg>`,
});
