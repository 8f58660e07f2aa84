/** One row a rank: its health, its memory with the peak marked, and where it stands. */
import * as React from "react";

import { CATEGORIES, CATEGORY } from "../../../workbench/widgets/static/events.js";
import { formatBytes } from "../../../workbench/widgets/static/format.js";
import type { RankState } from "../protocol";

interface RanksProps {
  readonly ranks: readonly RankState[];
}

export function Ranks({ ranks }: RanksProps): React.JSX.Element {
  const most = Math.max(1, ...ranks.map(({ peak_bytes, in_use }) => Math.max(peak_bytes, in_use)));
  return (
    <ul className="fsdp-Ranks">
      {ranks.map((rank) => (
        <Rank key={rank.rank} rank={rank} most={most} />
      ))}
    </ul>
  );
}

function Rank({ rank, most }: { readonly rank: RankState; readonly most: number }): React.JSX.Element {
  const { health, where, in_use: inUse, peak_bytes: peak } = rank;
  const memory = peak > 0 ? `${formatBytes(inUse)} of ${formatBytes(peak)} at the peak` : "nothing recorded";
  return (
    <li className={`fsdp-Rank fsdp-mod-${health.replace(" ", "-")}`} title={`${rank.device} on ${rank.host}, process ${rank.pid}`}>
      <span className="fsdp-dot" aria-hidden="true" />
      <span className="fsdp-Rank-name">rank {rank.rank}</span>
      <span className="fsdp-Rank-health">{health}</span>
      <span className="fsdp-Rank-bytes">{peak > 0 ? fraction(inUse, peak) : "\u2013"}</span>
      <span className="fsdp-Bar" role="img" aria-label={`memory of rank ${rank.rank}: ${memory}`} title={inClasses(rank)}>
        {rank.num_bytes.map((bytes, category) =>
          bytes > 0 && category !== CATEGORY.RESERVED ? (
            <i key={category} style={{ width: percent(bytes, most), background: CATEGORIES[category]?.colour }} />
          ) : null,
        )}
        {peak > 0 ? <b style={{ left: percent(peak, most) }} /> : null}
      </span>
      <span className="fsdp-Rank-where" title={where}>
        {where || "\u00a0"}
      </span>
    </li>
  );
}

/** `5.25 / 7.82 MiB`: a unit that is the same is said once. */
function fraction(bytes: number, most: number): string {
  const [now, unit] = formatBytes(bytes).split(" ");
  const peak = formatBytes(most);
  return peak.endsWith(` ${unit}`) ? `${now} / ${peak}` : `${now} ${unit} / ${peak}`;
}

function percent(bytes: number, most: number): string {
  return `${((100 * bytes) / most).toFixed(2)}%`;
}

/** The bytes of each class, now and at the peak, a line each. */
function inClasses({ num_bytes, peak_bytes_by_class: atPeak, peak }: RankState): string {
  const lines = CATEGORIES.map(({ words }, category) => {
    const [now, then] = [num_bytes[category] ?? 0, atPeak[category] ?? 0];
    return now > 0 || then > 0 ? `${words}: ${formatBytes(now)}, at the peak ${formatBytes(then)}` : "";
  });
  return [...lines, peak && `peak: ${peak}`].filter(Boolean).join("\n");
}
