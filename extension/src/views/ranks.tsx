/** One row per rank, or per group of alike ranks: health, memory with the peak marked, and position. */
import { caretDownIcon, caretRightIcon } from "@jupyterlab/ui-components";
import * as React from "react";

import { CATEGORIES, CATEGORY, KIND, KINDS } from "../../../workbench/widgets/static/events.js";
import { formatBytes } from "../../../workbench/widgets/static/format.js";
import { clockOf, doing, type Host, hosts, type Row } from "../hosts";
import type { ClockState, RankState } from "../protocol";
import { count, ranges } from "../words";

/** A non-breaking hyphen. */
const NO_BREAK = "\u2011";

interface RanksProps {
  readonly ranks: readonly RankState[];
  /** Clocks other than rank 0's. */
  readonly clocks: readonly ClockState[];
}

export function Ranks({ ranks, clocks }: RanksProps): React.JSX.Element {
  const most = Math.max(1, ...ranks.map(({ peak_bytes, in_use }) => Math.max(peak_bytes, in_use)));
  const found = hosts(ranks);
  return (
    <>
      {found.map((host) => (
        <div key={host.name} role="group" aria-label={`ranks on ${host.name}`} className="fsdp-Host">
          {found.length > 1 ? <Heading host={host} clocks={clocks} /> : null}
          <ul className="fsdp-Ranks">
            {host.rows.map((row) =>
              row.ranks.length > 1 ? (
                <Alike key={row.key} row={row} most={most} />
              ) : (
                row.ranks.map((rank) => <Rank key={rank.rank} rank={rank} most={most} />)
              ),
            )}
          </ul>
        </div>
      ))}
    </>
  );
}

function Heading({ host, clocks }: { readonly host: Host; readonly clocks: readonly ClockState[] }): React.JSX.Element {
  const clock = clockOf(host, clocks);
  return (
    <h4>
      {host.name} <span className="fsdp-note">{count(host.ranks.length, "rank")}</span>
      {clock === null ? null : (
        <span className="fsdp-note" title={clock.text}>
          {" \u00b7 "}
          {clock.note}
        </span>
      )}
    </h4>
  );
}

interface RankProps {
  readonly rank: RankState;
  /** Bytes that the whole width of a bar represents. */
  readonly most: number;
}

function Rank({ rank, most }: RankProps): React.JSX.Element {
  const { health, where } = rank;
  return (
    <li className={`fsdp-Rank ${tone(rank)}`} title={`${rank.device} on ${rank.host}, process ${rank.pid}`}>
      <Dot rank={rank} />
      <span className="fsdp-Rank-name">rank {rank.rank}</span>
      <span className="fsdp-Rank-health">{health}</span>
      <Memory rank={rank} most={most} />
      <span className="fsdp-Rank-where" title={where}>
        {where || "\u00a0"}
      </span>
    </li>
  );
}

/** Several ranks in one row, with the memory of the fullest; a click shows each of them. */
function Alike({ row, most }: { readonly row: Row; readonly most: number }): React.JSX.Element {
  const [isOpen, setIsOpen] = React.useState(false);
  const places = new Set(row.ranks.map(({ where }) => where));
  const [where = ""] = places;
  const [first, ...others] = row.ranks;
  if (first === undefined) return <></>;
  const fullest = others.reduce((one, other) => (other.in_use > one.in_use ? other : one), first);
  const Caret = isOpen ? caretDownIcon : caretRightIcon;
  return (
    <>
      <li className={`fsdp-Rank ${tone(first)}`} title={`memory of rank ${fullest.rank}, the highest`}>
        <Dot rank={first} />
        <button
          type="button"
          className="fsdp-Rank-name"
          aria-expanded={isOpen}
          onClick={() => {
            setIsOpen(!isOpen);
          }}
        >
          <Caret.react tag="span" width="14px" />
          ranks {ranges(row.ranks.map(({ rank }) => rank)).replaceAll("-", NO_BREAK)}
        </button>
        <span className="fsdp-Rank-health">{doing(row.ranks)}</span>
        <Memory rank={fullest} most={most} />
        <span className="fsdp-Rank-where" title={where}>
          {(places.size === 1 && where) || "\u00a0"}
        </span>
      </li>
      {isOpen ? row.ranks.map((rank) => <Rank key={rank.rank} rank={rank} most={most} />) : null}
    </>
  );
}

/** The health of a rank as a colour; a waiting rank has the colour that waits have in all views. */
function Dot({ rank: { health } }: Pick<RankProps, "rank">): React.JSX.Element {
  const style = health === "waiting" ? { background: KINDS[KIND.WAIT].colour } : {};
  return <span className="fsdp-dot" aria-hidden="true" style={style} />;
}

function tone({ health }: RankState): string {
  return `fsdp-mod-${health.replace(" ", "-")}`;
}

/** The memory of a rank as numbers and as a bar. */
function Memory({ rank, most }: RankProps): React.JSX.Element {
  const { in_use: inUse, peak_bytes: peak } = rank;
  const memory = peak > 0 ? `${formatBytes(inUse)} of ${formatBytes(peak)} at the peak` : "nothing recorded";
  return (
    <>
      <span className="fsdp-Rank-bytes">{peak > 0 ? fraction(inUse, peak) : "\u2013"}</span>
      <span className="fsdp-Bar" role="img" aria-label={`memory of rank ${rank.rank}: ${memory}`} title={inClasses(rank)}>
        {rank.num_bytes.map((bytes, category) =>
          bytes > 0 && category !== CATEGORY.RESERVED ? (
            <i key={category} style={{ width: percent(bytes, most), background: CATEGORIES[category]?.colour }} />
          ) : null,
        )}
        {peak > 0 ? <b style={{ left: percent(peak, most) }} /> : null}
      </span>
    </>
  );
}

/** `5.25 / 7.82 MiB`: a shared unit is written once. */
function fraction(bytes: number, most: number): string {
  const [now, unit] = formatBytes(bytes).split(" ");
  const peak = formatBytes(most);
  return peak.endsWith(` ${unit}`) ? `${now} / ${peak}` : `${now} ${unit} / ${peak}`;
}

function percent(bytes: number, most: number): string {
  return `${((100 * bytes) / most).toFixed(2)}%`;
}

/** The bytes of each class, now and at the peak, one line each. */
function inClasses({ num_bytes, peak_bytes_by_class: atPeak, peak }: RankState): string {
  const lines = CATEGORIES.map(({ words }, category) => {
    const [now, then] = [num_bytes[category] ?? 0, atPeak[category] ?? 0];
    return now > 0 || then > 0 ? `${words}: ${formatBytes(now)}, at the peak ${formatBytes(then)}` : "";
  });
  return [...lines, peak && `peak: ${peak}`].filter(Boolean).join("\n");
}
