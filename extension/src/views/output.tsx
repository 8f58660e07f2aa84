/** What ranks printed, and how cells and commands ended: also what was printed while no browser was open. */
import * as React from "react";

import type { PanelModel } from "../model";
import type { OutputLine } from "../protocol";
import { originOf } from "../words";
import { Choice, Field } from "./parts";

/** Pixels from its end within which the text counts as scrolled to its end. */
const NEAR = 8;

const ALL = "all ranks";

interface OutputProps {
  readonly model: PanelModel;
  readonly numRanks: number;
}

export function Output({ model, numRanks }: OutputProps): React.JSX.Element {
  const { output } = model, { rank, tail } = output;
  React.useEffect(() => output.watch(), [output]);
  return (
    <div className="fsdp-Form">
      <Field label="Lines of">
        <Choice
          value={rank === null ? ALL : `rank ${rank}`}
          among={[ALL, ...Array.from({ length: numRanks }, (_, number) => `rank ${number}`)]}
          choose={(chosen) => { output.rank = chosen === ALL ? null : Number(chosen.split(" ")[1]); }}
        />
      </Field>
      <Lines lines={tail?.lines ?? []} />
      {tail?.is_cut === true ? <p className="fsdp-note">Older lines: %fsdp output --lines 0</p> : null}
    </div>
  );
}

/** The lines in a box that stays at its end as they grow, unless the user has scrolled up. */
function Lines({ lines }: { readonly lines: readonly OutputLine[] }): React.JSX.Element {
  const box = React.useRef<HTMLDivElement>(null);
  const text = React.useRef<HTMLDivElement>(null);
  const follows = React.useRef(true);
  React.useLayoutEffect(() => {
    const [outer, inner] = [box.current, text.current];
    if (outer === null || inner === null) return;
    const sizes = new ResizeObserver(() => {
      if (follows.current) outer.scrollTop = outer.scrollHeight;
    });
    sizes.observe(outer);
    sizes.observe(inner);
    return () => { sizes.disconnect(); };
  }, []);
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
      <div ref={text}>
        {lines.map((line, place) => (
          <div key={place} className={`fsdp-mod-${line.kind}`} title={new Date(1000 * line.t_s).toLocaleString()}>
            {line.ranks.length === 0 ? null : <small>{originOf(line)} </small>}
            <span>{line.text}</span>
          </div>
        ))}
      </div>
    </div>
  );
}
