/** The form that shards a model found on the ranks, with a preview of the result. */
import * as React from "react";

import { formatBytes } from "../../../workbench/widgets/static/format.js";
import type { PanelModel } from "../model";
import { commandOf, hasMesh, type Policy, standard } from "../policy";
import { type Model, type Preview, type Reshard, type Shard, STRATEGIES, type UnitInfo, type Unshard } from "../protocol";
import { count, heldAtRest, LOOKING, pathOf, ranksInWords, ROOT } from "../words";
import { Action, Choice, Field, Text } from "./parts";

/** Precisions on offer; a typed line has more. */
const PRECISIONS = [
  ["off", "off"],
  ["bf16", "bf16"],
  ["bf16,reduce=fp32", "bf16, fp32"],
  ["fp16", "fp16"],
] as const;

/** Likewise for a unit, with every field named: an unnamed one keeps its value, which is not known here. */
const UNIT_PRECISIONS = [
  ["off", "that of the parameters"],
  ["bf16,reduce=off,output=fp32", "computes in bf16, returns fp32"],
  ["bf16,reduce=fp32,output=fp32", "computes in bf16, reduces in fp32, returns fp32"],
  ["bf16,reduce=off,output=off", "computes in bf16, returns bf16"],
  ["fp16,reduce=off,output=fp32", "computes in fp16, returns fp32"],
] as const;

const AFTER_FORWARD = [["auto", "auto"], ["true", "reshard"], ["false", "keep"]] as const;

const ENGINES = [["workbench", "the workbench's"], ["torch", "torch's own"]] as const;

const APIS = ["fully_shard", "classic"] as const satisfies readonly Policy["api"][];

type Choices = readonly (readonly [string, string])[];

/** The choices, with the current value added if it is not among them; `unset` labels the empty value. */
function offered(choices: Choices, now: string, unset: string): Choices {
  if (now === "") return [["", unset], ...choices];
  return choices.some(([value]) => value === now) ? choices : [[now, now], ...choices];
}

export function ShardForm({ model }: { readonly model: PanelModel }): React.JSX.Element {
  const section = React.useRef<HTMLDivElement>(null);
  const { models, units, subject } = model;
  React.useEffect(() => {
    if (section.current !== null && model.takeAskedFor()) section.current.querySelector("select")?.focus();
  });
  const unit = units.find((each) => each.name !== ROOT && pathOf(each, models) === subject);
  const found = models.find((each) => each.name === subject || (unit && each.units.includes(unit.index))) ?? models[0];
  if (found === undefined) {
    return <p className="fsdp-note">{model.modelsText || LOOKING}</p>;
  }
  const chosen = unit === undefined ? found.name : subject;
  return (
    <div ref={section} className="fsdp-Subject">
      <Field label="Model" hint="a variable on the ranks, or one of its units (chosen in the unit's context menu)">
        <Choice
          value={chosen}
          among={models.flatMap((each) => [
            [each.name, `${each.name} (${each.class_name})`] as const,
            ...(unit && each === found ? [[subject, `unit ${unit.name}`] as const] : []),
          ])}
          choose={(name) => { model.subject = name; }}
        />
      </Field>
      {unit === undefined ? (
        <PolicyForm key={JSON.stringify([found.name, found.class_name, found.policy])} model={model} found={found} />
      ) : (
        <UnitForm key={JSON.stringify(unit)} model={model} unit={unit} name={subject} whole={found} />
      )}
    </div>
  );
}

function PolicyForm({ model, found }: { readonly model: PanelModel; readonly found: Model }): React.JSX.Element {
  const before = standard(found);
  const [policy, setPolicy] = React.useState<Policy>(before);
  const set = (more: Partial<Policy>): void => {
    setPolicy({ ...policy, ...more });
  };
  const command = commandOf(found, policy);
  const unshard: Unshard = { word: "unshard", model: found.name };
  const isFree = model.state?.request === null;
  const isClassic = policy.api === "classic";
  // a model that is or becomes classic is sharded again, with all units alike
  const unset = isClassic || before.api === "classic" ? "choose one" : "keep (differs by unit)";
  return (
    <CommandForm model={model} command={command}>
      {found.is_sharded ? null : (
        <Field label="Engine" hint="what runs the model; with torch's own FSDP there is no reshard, unshard and verify">
          <Choice value={policy.engine} among={ENGINES} choose={(engine) => { set({ engine }); }} />
        </Field>
      )}
      <Field label="API" hint="fully_shard: shards each parameter by rows; classic: FullyShardedDataParallel, one flat parameter per unit">
        <Choice value={policy.api} among={APIS} choose={(api) => { set({ api }); }} />
      </Field>
      <fieldset className="fsdp-Wrap">
        <legend>One unit per module of class</legend>
        {found.classes.map((each) => (
          <label key={each.name} title={each.name}>
            <input
              type="checkbox"
              checked={policy.wrap.includes(each.name)}
              onChange={({ target }) => {
                set({ wrap: target.checked ? [...policy.wrap, each.name] : policy.wrap.filter((one) => one !== each.name) });
              }}
            />
            <span className="fsdp-ClassName">{each.name}</span> <span className="fsdp-note">{"\u00d7"}{each.count}</span>
          </label>
        ))}
      </fieldset>
      <Split found={found} policy={policy} before={before} unset={unset} set={set} />
      <Field label="Precision" hint="dtype of compute, and dtype of gradient reduction">
        <Choice value={policy.mp} among={offered(PRECISIONS, before.mp, unset)} choose={(mp) => { set({ mp }); }} />
      </Field>
      <Field
        label="Prefetch"
        hint={isClassic ? "1: prefetch the next unit in forward and backward; 0: only in backward" : "units to prefetch, in module order; 0: the engine's order"}
      >
        <Text type="number" min={0} value={policy.prefetch} change={(prefetch) => { set({ prefetch }); }} />
      </Field>
      {found.is_sharded ? null : (
        <Field label="Ignore" hint="parameters that are not sharded, such as *.bias">
          <Text value={policy.ignore} placeholder="*.bias" change={(ignore) => { set({ ignore }); }} />
        </Field>
      )}
      <Field label="Offload" hint="keep shards in host memory">
        <input
          type="checkbox"
          checked={policy.offload ?? false}
          onChange={({ target }) => { set({ offload: target.checked }); }}
        />
      </Field>
      <Preliminary preview={model.preview} />
      <div className="fsdp-inline">
        <Action
          className="jp-mod-styled jp-mod-accept"
          isEnabled={isFree && (model.preview?.problem ?? "") === "" && !isUnchanged(command)}
          title={why(isFree, command)}
          command={command}
        >
          {found.is_sharded ? "Reshard" : "Shard"}
        </Action>
        {found.is_sharded ? (
          <Action className="jp-mod-styled" isEnabled={isFree} run={() => void model.do(unshard)} command={unshard}>
            Unshard
          </Action>
        ) : null}
      </div>
    </CommandForm>
  );
}

interface SplitProps {
  readonly found: Model;
  readonly policy: Policy;
  readonly before: Policy;
  /** Label of an unset value. */
  readonly unset: string;
  readonly set: (more: Partial<Policy>) => void;
}

/** How parameters are split, and when they are full: the fields of either API. */
function Split({ found, policy, before, unset, set }: SplitProps): React.JSX.Element {
  const isClassic = policy.api === "classic";
  return (
    <>
      {isClassic ? (
        <>
          <Field label="Strategy" isWide hint="what is sharded; SHARD_GRAD_OP keeps full parameters until backward, as _HYBRID_SHARD_ZERO2 does within a copy">
            <Choice
              value={policy.strategy}
              among={offered(Object.entries(STRATEGIES), before.strategy, unset)}
              choose={(strategy) => { set({ strategy: strategy as Policy["strategy"] }); }}
            />
          </Field>
          <Field label="Originals" hint="use_orig_params: optimizers get a shard of each parameter instead of one flat parameter">
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
          hint={isClassic ? "replicas x shard ranks" : "shard ranks, or replicas x shard ranks; empty: one replica over all ranks"}
        >
          <Text
            value={policy.mesh}
            placeholder={isClassic ? "replicas x shard ranks" : found.is_sharded ? unset : "all ranks"}
            change={(mesh) => { set({ mesh }); }}
          />
        </Field>
      ) : null}
    </>
  );
}

interface UnitFormProps {
  readonly model: PanelModel;
  readonly unit: UnitInfo;
  /** Its name on a line. */
  readonly name: string;
  /** The model that it belongs to. */
  readonly whole: Model;
}

/** The settings of one unit. */
function UnitForm({ model, unit, name, whole }: UnitFormProps): React.JSX.Element {
  const before = { reshard: unit.reshard_after_forward, mp: "", offload: unit.offload };
  const [policy, setPolicy] = React.useState(before);
  const command: Reshard = {
    word: "reshard",
    model: name,
    ...(policy.reshard === before.reshard ? {} : { reshard_after_forward: policy.reshard }),
    ...(policy.mp === before.mp ? {} : { mp: policy.mp }),
    ...(policy.offload === before.offload ? {} : { offload: policy.offload }),
  };
  return (
    <CommandForm model={model} command={command}>
      <Field label="After forward" hint="whether this unit's full parameters are freed after its forward">
        <Choice
          value={policy.reshard}
          among={offered(AFTER_FORWARD.filter(([value]) => value !== "auto"), before.reshard, "")}
          choose={(reshard) => { setPolicy({ ...policy, reshard }); }}
        />
      </Field>
      <Field label="Precision" hint="dtype this unit computes in, and dtype of its outputs">
        <Choice
          value={policy.mp}
          among={[["", `${unit.compute_dtype}, as now`], ...UNIT_PRECISIONS]}
          choose={(mp) => { setPolicy({ ...policy, mp }); }}
        />
      </Field>
      <Field label="Offload" hint="keep this unit's shards in host memory">
        <input
          type="checkbox"
          checked={policy.offload}
          onChange={({ target }) => { setPolicy({ ...policy, offload: target.checked }); }}
        />
      </Field>
      <p className="fsdp-note">
        Changes {unit.name} only. The numbers below are for the whole {whole.name}.
      </p>
      <Preliminary preview={model.preview} />
      <div className="fsdp-inline">
        <Action
          className="jp-mod-styled jp-mod-accept"
          isEnabled={model.state?.request === null && (model.preview?.problem ?? "") === "" && !isUnchanged(command)}
          title={why(model.state?.request === null, command)}
          command={command}
        >
          Reshard
        </Action>
      </div>
    </CommandForm>
  );
}

/** Whether a command would leave a sharded model unchanged. */
function isUnchanged(command: Shard | Reshard): boolean {
  return command.word === "reshard" && Object.keys(command).length === 2; // its word and the model
}

/** Why a model cannot be sharded now; undefined: no message. */
function why(isFree: boolean, command: Shard | Reshard): string | undefined {
  if (!isFree) return "The ranks are busy.";
  return isUnchanged(command) ? "No setting has changed." : undefined;
}

/** A form that runs a command, and requests its preview while mounted. */
function CommandForm({ model, command, children }: {
  readonly model: PanelModel;
  readonly command: Shard | Reshard;
  readonly children: React.ReactNode;
}): React.JSX.Element {
  const text = JSON.stringify(command);
  React.useEffect(() => {
    void model.try(JSON.parse(text) as Shard | Reshard);
    return () => {
      void model.try(null);
    };
  }, [model, text]);
  return (
    <form
      className="fsdp-Form"
      onSubmit={(event) => {
        event.preventDefault();
        void model.do(command);
      }}
    >
      {children}
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
          {preview.bytes_ignored > 0 && <Known name="of that in no unit, kept in full" value={formatBytes(preview.bytes_ignored)} />}
          {heldAtRest(preview).map(({ ranks, params, total }, _place, all) => {
            const some = `${ranksInWords(ranks)} ${ranks.length > 1 ? "keep" : "keeps"}`;
            return (
              <React.Fragment key={ranks.join()}>
                <Known name={all.length > 1 ? some : "each rank keeps"} value={params} />
                <Known name={`with gradients and Adam${all.length > 1 ? `, ${ranksInWords(ranks)}` : ""}`} value={total} />
              </React.Fragment>
            );
          })}
          <Known
            name={`each rank sends per step, in ${count(calls, "collective")}`}
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
