/** The commands run from this panel, as lines to type, with their results. */
import { copyIcon } from "@jupyterlab/ui-components";
import * as React from "react";

import { HEARD, type Spoken as One } from "../model";
import { ReplyText } from "./parts";

interface SpokenProps {
  readonly spoken: readonly One[];
  readonly copy: (line: string) => void;
}

export function Spoken({ spoken, copy }: SpokenProps): React.JSX.Element {
  return (
    <>
      <p className="fsdp-unseen" role="status" aria-label="result of the last command">
        {newest(spoken)}
      </p>
      <ol className="fsdp-Spoken">
        {spoken.map(({ key, line, text, outcome }) => (
          <li key={key} className={`fsdp-mod-${outcome}`}>
            <div className="fsdp-inline">
              <code className="fsdp-grows" title={line}>{line}</code>
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
            {outcome === "runs" || text === "" ? null : <ReplyText label={`Result of ${line}`} text={text} />}
          </li>
        ))}
      </ol>
    </>
  );
}

/** The newest command that has ended, and its result, in one line. */
function newest(spoken: readonly One[]): string {
  const isHeard = (line: string): boolean => HEARD.has(line.split(" ")[1] ?? "");
  const found = spoken.find(({ outcome, line }) => outcome === "failed" || (outcome === "done" && !isHeard(line)));
  if (found === undefined) return "";
  const [first = ""] = found.text.split("\n");
  return `${found.line}: ${first === "" ? "done" : first}`;
}
