/** The form that shards a model found on the ranks; what that would come to is said before it is done. */
import * as React from "react";

import { formatBytes } from "../../../workbench/widgets/static/format.js";
import type { PanelModel } from "../model";
import { commandOf, type Policy, standard } from "../policy";
import type { Model, Preview, Reshard, Shard } from "../protocol";
import { count, ranges } from "../words";
import { Choice, Field, stands, Text } from "./parts";

/** Precisions that are offered; a line typed has more. */
const PRECISIONS = [
  ["off", "that of the parameters"],
  ["bf16", "bf16"],
  ["bf16,reduce=fp32", "bf16, fp32"],
  ["fp16", "fp16"],
] as const;

const AFTER_FORWARD = [["auto", "auto"], ["true", "reshard"], ["false", "keep"]] as const;

/** What is offered, and what there is now, whether that is among it or not. */
function offered(choices: readonly (readonly [string, string])[], now: string): readonly (readonly [string, string])[] {
  if (now === "") return [["", "as each unit is"], ...choices];
  return choices.some(([value]) => value === now) ? choices : [[now, now], ...choices];
}

export function ShardForm({ model }: { readonly model: PanelModel }): React.JSX.Element {
  const [name, setName] = React.useState("");
  const found = model.models.find((each) => each.name === name) ?? model.models[0];
  if (found === undefined) {
    return <p className="fsdp-note">{model.modelsText || "No model is found on the ranks yet: make one in a %%fsdp cell."}</p>;
  }
  return (
    <>
      <Field label="Model" hint="a variable on the ranks">
        <Choice
          value={found.name}
          among={model.models.map((each) => [each.name, `${each.name} (${each.class_name})`])}
          choose={setName}
        />
      </Field>
      <PolicyForm key={JSON.stringify([found.name, found.class_name, found.policy])} model={model} found={found} />
    </>
  );
}

function PolicyForm({ model, found }: { readonly model: PanelModel; readonly found: Model }): React.JSX.Element {
  const before = standard(found);
  const [policy, setPolicy] = React.useState<Policy>(before);
  const set = (more: Partial<Policy>): void => {
    setPolicy({ ...policy, ...more });
  };
  const command = commandOf(found, policy);
  const text = JSON.stringify(command);
  React.useEffect(() => {
    void model.try(JSON.parse(text) as Shard | Reshard);
    return () => {
      void model.try(null);
    };
  }, [model, text]);
  const isFree = model.state?.request === null;
  return (
    <form
      className="fsdp-Form"
      onSubmit={(event) => {
        event.preventDefault();
        void model.do(command);
      }}
    >
      <fieldset className="fsdp-Wrap">
        <legend>One unit for each module of class</legend>
        {found.classes.map((each) => (
          <label key={each.name}>
            <input
              type="checkbox"
              checked={policy.wrap.includes(each.name)}
              onChange={({ target }) => {
                set({ wrap: target.checked ? [...policy.wrap, each.name] : policy.wrap.filter((one) => one !== each.name) });
              }}
            />
            {each.name} <span className="fsdp-note">{"\u00d7"}{each.count}</span>
          </label>
        ))}
      </fieldset>
      <Field label="Mesh" hint="ranks that share a copy, or copies x ranks that share one; empty: all ranks share one">
        <Text value={policy.mesh} placeholder={found.is_sharded ? "as each unit is" : "all ranks"} change={(mesh) => { set({ mesh }); }} />
      </Field>
      <Field label="After forward" hint="whether full parameters are freed after forward; auto: all but the root's">
        <Choice
          value={policy.reshard}
          among={offered(AFTER_FORWARD, before.reshard)}
          choose={(reshard) => { set({ reshard }); }}
        />
      </Field>
      <Field label="Precision" hint="in which units compute, and in which gradients are reduced">
        <Choice value={policy.mp} among={offered(PRECISIONS, before.mp)} choose={(mp) => { set({ mp }); }} />
      </Field>
      <Field label="Prefetch" hint="units gathered ahead, in the order of the modules; 0: the engine's own order">
        <Text type="number" min={0} value={policy.prefetch} change={(prefetch) => { set({ prefetch }); }} />
      </Field>
      {found.is_sharded ? null : (
        <Field label="Leave whole" hint="parameters that are not sharded, such as *.bias">
          <Text value={policy.ignore} placeholder="*.bias" change={(ignore) => { set({ ignore }); }} />
        </Field>
      )}
      <Field label="Offload" hint="keep what is sharded in host memory">
        <input
          type="checkbox"
          checked={policy.offload ?? false}
          onChange={({ target }) => { set({ offload: target.checked }); }}
        />
      </Field>
      <Preliminary preview={model.preview} />
      <div className="fsdp-inline">
        <button
          type="submit"
          className="jp-mod-styled jp-mod-accept"
          disabled={!isFree || (model.preview?.problem ?? "") !== ""}
          {...stands(command)}
        >
          {found.is_sharded ? "Reshard" : "Shard"}
        </button>
        {found.is_sharded ? (
          <button
            type="button"
            className="jp-mod-styled"
            disabled={!isFree}
            onClick={() => {
              void model.do({ word: "unshard", model: found.name });
            }}
            {...stands({ word: "unshard", model: found.name })}
          >
            Unshard
          </button>
        ) : null}
      </div>
    </form>
  );
}

function Preliminary({ preview }: { readonly preview: Preview | null }): React.JSX.Element {
  if (preview === null) return <div className="fsdp-Preview" aria-busy="true" />;
  if (preview.problem) return <div className="fsdp-Preview fsdp-mod-bad" role="status">{preview.problem}</div>;
  const calls = preview.sent.reduce((sum, { calls: more }) => sum + more, 0);
  return (
    <div className="fsdp-Preview" role="status">
      <table>
        <tbody>
          <Known name="units" value={String(preview.units.length)} />
          <Known name="in full" value={formatBytes(preview.bytes_unsharded)} />
          {preview.at_rest.map(({ ranks, params, grads, adam }) => {
            const who = preview.at_rest.length > 1 ? `rank ${ranges(ranks)} holds` : "a rank holds";
            return (
              <React.Fragment key={ranks.join()}>
                <Known name={`${who} of it`} value={formatBytes(params)} />
                <Known name="with gradients and Adam" value={formatBytes(params + grads + adam)} />
              </React.Fragment>
            );
          })}
          <Known
            name={`a step sends, in ${count(calls, "collective")}`}
            value={formatBytes(preview.sent_bytes)}
            title={preview.sent.map((each) => `${each.kind}: ${each.calls} calls, ${formatBytes(each.num_bytes)}`).join("\n")}
          />
        </tbody>
      </table>
    </div>
  );
}

interface KnownProps {
  readonly name: string;
  readonly value: string;
  readonly title?: string;
}

function Known({ name, value, title }: KnownProps): React.JSX.Element {
  return (
    <tr title={title}>
      <th scope="row">{name}</th>
      <td>{value}</td>
    </tr>
  );
}
