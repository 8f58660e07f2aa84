/** The form that shards a model found on the ranks; what that would come to is said before it is done. */
import * as React from "react";

import { formatBytes } from "../../../workbench/widgets/static/format.js";
import type { PanelModel } from "../model";
import { commandOf, hasMesh, type Policy, standard } from "../policy";
import { type Model, type Preview, type Reshard, type Shard, STRATEGIES } from "../protocol";
import { count, heldAtRest, ranges } from "../words";
import { Choice, Field, stands, Text } from "./parts";

/** Precisions that are offered; a line typed has more. */
const PRECISIONS = [
  ["off", "off"],
  ["bf16", "bf16"],
  ["bf16,reduce=fp32", "bf16, fp32"],
  ["fp16", "fp16"],
] as const;

const AFTER_FORWARD = [["auto", "auto"], ["true", "reshard"], ["false", "keep"]] as const;

const APIS = ["fully_shard", "classic"] as const satisfies readonly Policy["api"][];

type Choices = readonly (readonly [string, string])[];

/** What is offered, and what there is now, whether that is among it or not; `unset` says what nothing means. */
function offered(choices: Choices, now: string, unset: string): Choices {
  if (now === "") return [["", unset], ...choices];
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
  const isClassic = policy.api === "classic";
  // a model that is or becomes classic is sharded anew, all of its units alike
  const unset = isClassic || before.api === "classic" ? "to be chosen" : "as each unit is";
  return (
    <form
      className="fsdp-Form"
      onSubmit={(event) => {
        event.preventDefault();
        void model.do(command);
      }}
    >
      <Field label="API" hint="fully_shard: each parameter by its rows; classic: FullyShardedDataParallel, one flat parameter for each unit">
        <Choice value={policy.api} among={APIS} choose={(api) => { set({ api }); }} />
      </Field>
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
      <Split found={found} policy={policy} before={before} unset={unset} set={set} />
      <Field label="Precision" hint="in which units compute, and in which gradients are reduced">
        <Choice value={policy.mp} among={offered(PRECISIONS, before.mp, unset)} choose={(mp) => { set({ mp }); }} />
      </Field>
      <Field
        label="Prefetch"
        hint={isClassic ? "1: the next unit is gathered ahead in forward as well; 0: in backward alone" : "units gathered ahead, in the order of the modules; 0: the engine's own order"}
      >
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

interface SplitProps {
  readonly found: Model;
  readonly policy: Policy;
  readonly before: Policy;
  /** What it means that something is not set. */
  readonly unset: string;
  readonly set: (more: Partial<Policy>) => void;
}

/** How parameters are split, and when they are full: what each of the APIs has for that. */
function Split({ found, policy, before, unset, set }: SplitProps): React.JSX.Element {
  const isClassic = policy.api === "classic";
  return (
    <>
      {isClassic ? (
        <>
          <Field label="Strategy" isWide hint="what is split; SHARD_GRAD_OP keeps full parameters until backward, as _HYBRID_SHARD_ZERO2 does within a copy">
            <Choice
              value={policy.strategy}
              among={offered(Object.entries(STRATEGIES), before.strategy, unset)}
              choose={(strategy) => { set({ strategy: strategy as Policy["strategy"] }); }}
            />
          </Field>
          <Field label="Originals" hint="use_orig_params: optimizers have a piece of each parameter, not one flat parameter">
            <input
              type="checkbox"
              checked={policy.origParams}
              onChange={({ target }) => { set({ origParams: target.checked }); }}
            />
          </Field>
        </>
      ) : (
        <Field label="After forward" hint="whether full parameters are freed after forward; auto: all but the root's">
          <Choice
            value={policy.reshard}
            among={offered(AFTER_FORWARD, before.reshard, unset)}
            choose={(reshard) => { set({ reshard }); }}
          />
        </Field>
      )}
      {hasMesh(policy) ? (
        <Field
          label="Mesh"
          hint={isClassic ? "copies x ranks that share one" : "ranks that share a copy, or copies x ranks that share one; empty: all ranks share one"}
        >
          <Text
            value={policy.mesh}
            placeholder={isClassic ? "copies x ranks" : found.is_sharded ? unset : "all ranks"}
            change={(mesh) => { set({ mesh }); }}
          />
        </Field>
      ) : null}
    </>
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
          {heldAtRest(preview).map(({ ranks, params, total }, _place, all) => {
            const who = all.length > 1 ? `rank ${ranges(ranks)} holds` : "a rank holds";
            return (
              <React.Fragment key={ranks.join()}>
                <Known name={`${who} of it`} value={params} />
                <Known name="with gradients and Adam" value={total} />
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
