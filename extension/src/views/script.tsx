/** Runs a training script on the ranks. */
import * as React from "react";

import type { PanelModel } from "../model";
import { Action, Field, Line, Text } from "./parts";

export function Script({ model }: { readonly model: PanelModel }): React.JSX.Element {
  const [script, setScript] = React.useState("");
  const run = `run ${script.trim()}`;
  const isGiven = script.trim() !== "";
  return (
    <Line run={() => { if (isGiven) void model.do(run); }}>
      <Field label="Path, arguments" isWide hint="A script for torchrun, relative to the notebook, or -m MODULE; then its arguments">
        <Text value={script} placeholder="train.py --lr 1e-3" change={setScript} />
      </Field>
      <Action className="jp-mod-styled" isEnabled={isGiven} title="Run it on the ranks, unchanged, as torchrun would" command={run}>
        Run
      </Action>
    </Line>
  );
}
