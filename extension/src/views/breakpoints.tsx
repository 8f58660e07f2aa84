/** The breakpoints: switch or clear each, or add one. */
import { closeIcon } from "@jupyterlab/ui-components";
import * as React from "react";

import type { PanelModel } from "../model";
import { Action, stands, Text } from "./parts";

export function Breakpoints({ model }: { readonly model: PanelModel }): React.JSX.Element {
  const breakpoints = model.state?.breakpoints ?? [];
  const [event, setEvent] = React.useState("");
  const add = async (): Promise<void> => {
    if (event.trim() !== "" && (await model.do({ word: "break", action: "add", event: event.trim() }))) setEvent("");
  };
  return (
    <div className="fsdp-Breakpoints">
      <ul>
        {breakpoints.map(({ id, text, is_on: isOn }) => (
          <li key={id}>
            <label {...stands({ word: "break", action: isOn ? "off" : "on", event: String(id) })}>
              <input
                type="checkbox"
                checked={isOn}
                onChange={() => {
                  void model.do({ word: "break", action: isOn ? "off" : "on", event: String(id) });
                }}
              />
              <span className={isOn ? "" : "fsdp-mod-off"}>{text}</span>
            </label>
            <button
              type="button"
              className="fsdp-Tool"
              aria-label={`Clear breakpoint ${text}`}
              title="Clear"
              onClick={() => {
                void model.do({ word: "break", action: "clear", event: String(id) });
              }}
              {...stands({ word: "break", action: "clear", event: String(id) })}
            >
              <closeIcon.react tag="span" width="14px" />
            </button>
          </li>
        ))}
      </ul>
      <form
        className="fsdp-inline"
        onSubmit={(submit) => {
          submit.preventDefault();
          void add();
        }}
      >
        <label className="fsdp-grows">
          <span className="fsdp-unseen">Event to stop before</span>
          <Text value={event} change={setEvent} placeholder="all_gather:blocks.2" />
        </label>
        <Action className="jp-mod-styled jp-mod-minimal" isEnabled={event.trim() !== ""}>
          Add
        </Action>
      </form>
    </div>
  );
}
