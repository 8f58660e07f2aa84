/** What ranks printed, and how cells and commands ended: also what was printed while no browser was open. */
import * as React from "react";

import type { PanelModel } from "../model";
import type { OutputLine } from "../protocol";
import { originOf } from "../words";
import { Choice } from "./parts";

/** Pixels from its end within which the text counts as scrolled to its end. */
const NEAR = 8;

const ALL = "all ranks";

interface OutputProps {
  readonly model: PanelModel;
  readonly numRanks: number;
}

export function Output({ model, numRanks }: OutputProps): React.JSX.Element {
  const { outputRank: rank, output } = model;
  React.useEffect(() => model.watchOutput(), [model]);
  return (
    <>
      <label className="fsdp-inline">
        <span className="fsdp-note">lines of</span>
        <Choice
          value={rank === null ? ALL : `rank ${rank}`}
          among={[ALL, ...Array.from({ length: numRanks }, (_, number) => `rank ${number}`)]}
          choose={(chosen) => { model.outputRank = chosen === ALL ? null : Number(chosen.split(" ")[1]); }}
        />
      </label>
      <Lines lines={output?.lines ?? []} />
      {output?.is_cut === true ? <p className="fsdp-note">Older lines: %fsdp output --lines 0</p> : null}
    </>
  );
}

/** The lines in a box that stays at its end as they grow, unless the user has scrolled up. */
function Lines({ lines }: { readonly lines: readonly OutputLine[] }): React.JSX.Element {
  const box = React.useRef<HTMLDivElement>(null);
  const follows = React.useRef(true);
  React.useLayoutEffect(() => {
    if (follows.current && box.current !== null) box.current.scrollTop = box.current.scrollHeight;
  }, [lines]);
  if (lines.length === 0) return <p className="fsdp-note">Nothing was printed yet.</p>;
  return (
    <div
      ref={box}
      className="fsdp-Output"
      tabIndex={0}
      role="log"
      aria-live="off"
      aria-label="output of the ranks"
      onScroll={({ currentTarget: { scrollHeight, scrollTop, clientHeight } }) => {
        follows.current = scrollHeight - scrollTop - clientHeight <= NEAR;
      }}
    >
      {lines.map((line, place) => (
        <div key={place} className={`fsdp-mod-${line.kind}`} title={new Date(1000 * line.t_s).toLocaleString()}>
          <small>{originOf(line)}</small> <span>{line.text}</span>
        </div>
      ))}
    </div>
  );
}
