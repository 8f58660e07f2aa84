/** The commands that were asked for here, as lines that one could have typed, and what came of them. */
import { copyIcon } from "@jupyterlab/ui-components";
import * as React from "react";

import type { Spoken as One } from "../model";

interface SpokenProps {
  readonly spoken: readonly One[];
  readonly copy: (line: string) => void;
}

export function Spoken({ spoken, copy }: SpokenProps): React.JSX.Element {
  return (
    <ol className="fsdp-Spoken" aria-live="polite">
      {spoken.map(({ key, line, text, outcome }) => (
        <li key={key} className={`fsdp-mod-${outcome}`}>
          <div className="fsdp-inline">
            <code className="fsdp-grows">{line}</code>
            <button
              type="button"
              className="fsdp-Tool"
              title="Copy as magic"
              aria-label={`Copy ${line}`}
              onClick={() => {
                copy(line);
              }}
            >
              <copyIcon.react tag="span" width="14px" />
            </button>
          </div>
          {outcome === "runs" ? null : <pre>{text}</pre>}
        </li>
      ))}
    </ol>
  );
}
