/** The units as a tree, each with the colour of its state. A click shows its parameters, the context menu actions. */
import { caretDownIcon, caretRightIcon } from "@jupyterlab/ui-components";
import * as React from "react";

import { MEANINGS, UNIT_STATES } from "../../../workbench/widgets/static/events.js";
import { formatBytes } from "../../../workbench/widgets/static/format.js";
import type { PanelModel } from "../model";
import type { Command, ParamInfo, State, UnitInfo } from "../protocol";
import { commonState, count, lies, type Node, nameInUnit, ranksInWords, statesOf, tree, unitsIn } from "../words";
import { stands } from "./parts";

interface UnitsProps {
  readonly model: PanelModel;
  readonly colours: readonly string[];
  /** Run a command, and show its table in a tab. */
  readonly draw: (command: Command) => void;
}

interface Row {
  readonly node: Node;
  readonly depth: number;
}

export function Units({ model, colours, draw }: UnitsProps): React.JSX.Element {
  const { units, state } = model;
  const nodes = React.useMemo(() => tree(units), [units]);
  const [folded, setFolded] = React.useState<ReadonlySet<string>>(new Set());
  const [focus, setFocus] = React.useState("");
  const list = React.useRef<HTMLUListElement>(null);
  const rows = visible(nodes, folded);
  const focused = rows.some(({ node }) => node.key === focus) ? focus : rows[0]?.node.key;

  const fold = (node: Node, isFolded: boolean): void => {
    const now = new Set(folded);
    if (isFolded) now.add(node.key);
    else now.delete(node.key);
    setFolded(now);
  };
  const open = (node: Node): void => {
    setFocus(node.key);
    if (node.unit !== null) void model.toggle(node.unit.index);
    else fold(node, !folded.has(node.key));
  };
  const go = (key: string | undefined): void => {
    if (key === undefined) return;
    setFocus(key);
    list.current?.querySelector<HTMLElement>(`[data-key="${CSS.escape(key)}"]`)?.focus();
  };
  const press = (event: React.KeyboardEvent, at: number): void => {
    const node = rows[at]?.node;
    if (node === undefined) return;
    if (event.target !== event.currentTarget) { // inside the details of a unit
      if (event.key === "Escape") {
        go(node.key);
        open(node);
      }
      return;
    }
    const moves: Partial<Record<string, () => void>> = {
      ArrowDown: () => { go(rows[at + 1]?.node.key); },
      ArrowUp: () => { go(rows[at - 1]?.node.key); },
      Home: () => { go(rows[0]?.node.key); },
      End: () => { go(rows.at(-1)?.node.key); },
      ArrowRight: () => {
        if (folded.has(node.key)) fold(node, false);
        else go(node.children[0]?.key);
      },
      ArrowLeft: () => {
        if (node.children.length > 0 && !folded.has(node.key)) fold(node, true);
        else go(rows.find((row) => row.node.children.includes(node))?.node.key);
      },
      Enter: () => { open(node); },
      " ": () => { open(node); },
    };
    const move = moves[event.key];
    if (move === undefined) return;
    event.preventDefault();
    move();
  };
  return (
    <>
      <ul className="fsdp-Units" role="tree" aria-label="units" ref={list}>
        {rows.map(({ node, depth }, at) => (
          <UnitRow
            key={node.key}
            node={node}
            depth={depth}
            state={state}
            colours={colours}
            isFolded={folded.has(node.key)}
            isFocused={node.key === focused}
            params={node.unit === null ? undefined : model.opened.get(node.unit.index)}
            fold={fold}
            open={() => { open(node); }}
            press={(event) => {
              press(event, at);
            }}
            inspect={(fqn) => { draw({ word: "inspect", fqn }); }}
            explain={(text) => { model.reply = { line: "", text, isBad: false }; }}
            canInspect={state?.request?.is_stopped === true || (state?.cluster.is_running === true && state.request === null)}
          />
        ))}
      </ul>
      <p className="fsdp-legend">
        {UNIT_STATES.map(({ words }, number) => (
          <span key={words} title={MEANINGS[words]}>
            <i style={{ background: colours[number] }} />
            {words}
          </span>
        ))}
      </p>
    </>
  );
}

function visible(nodes: readonly Node[], folded: ReadonlySet<string>, depth = 0): readonly Row[] {
  return nodes.flatMap((node) => [
    { node, depth },
    ...(folded.has(node.key) ? [] : visible(node.children, folded, depth + 1)),
  ]);
}

interface UnitRowProps {
  readonly node: Node;
  readonly depth: number;
  readonly state: State | null;
  readonly colours: readonly string[];
  readonly isFolded: boolean;
  readonly isFocused: boolean;
  /** Of an open unit; null: they are loading; undefined: it is not open. */
  readonly params: readonly ParamInfo[] | null | undefined;
  readonly fold: (node: Node, isFolded: boolean) => void;
  readonly open: () => void;
  readonly press: (event: React.KeyboardEvent) => void;
  readonly inspect: (fqn: string) => void;
  readonly explain: (obstacle: string) => void;
  readonly canInspect: boolean;
}

function UnitRow(props: UnitRowProps): React.JSX.Element {
  const { node, depth, state, colours, isFolded, isFocused, params, fold, open, press } = props;
  const { unit, label, children } = node;
  const now = unit === null ? undefined : commonState(state, node.place);
  const Caret = isFolded ? caretRightIcon : caretDownIcon;
  return (
    <li
      role="treeitem"
      aria-level={depth + 1}
      aria-label={unit?.name ?? label}
      aria-description={unit === null ? undefined : told(unit, state, node.place)} // may change while it has the focus
      aria-expanded={children.length > 0 ? !isFolded : undefined}
      aria-selected={params !== undefined}
      tabIndex={isFocused ? 0 : -1}
      data-key={node.key}
      data-fsdp-unit={unit?.name}
      data-fsdp-index={unit?.index}
      className="fsdp-Unit"
      onKeyDown={press}
    >
      <div className="fsdp-Unit-row" style={{ paddingLeft: `${depth * 12}px` }} onClick={open} title={unit === null ? "" : told(unit, state, node.place)}>
        <span
          className="fsdp-Unit-caret"
          onClick={(event) => {
            event.stopPropagation();
            if (children.length > 0) fold(node, !isFolded);
          }}
        >
          {children.length > 0 ? <Caret.react tag="span" width="14px" /> : null}
        </span>
        {unit === null ? null : <i className="fsdp-Unit-state" style={{ background: now === undefined ? undefined : colours[now] }} />}
        <span className="fsdp-Unit-name">{label}</span>
        {unit === null ? (
          <span className="fsdp-note">{unitsIn(node).length} units</span>
        ) : (
          <span className="fsdp-Unit-bytes">
            {formatBytes(unit.bytes_at_rest)} <small>of {formatBytes(unit.bytes_unsharded)}</small>
          </span>
        )}
      </div>
      {unit === null || params === undefined ? null : <Detail {...props} unit={unit} />}
    </li>
  );
}

function Detail({ unit, params, depth, inspect, explain, canInspect, state, node }: UnitRowProps & { readonly unit: UnitInfo }): React.JSX.Element {
  return (
    <div className="fsdp-Detail" style={{ marginLeft: `${depth * 12 + 18}px` }}>
      <p>{told(unit, state, node.place)}</p>
      <ul>
        {(params ?? []).map((param) => (
          <li key={param.fqn} title={rows(param)} className={param.flat === "" ? undefined : "fsdp-mod-inFlat"}>
            <button
              type="button"
              aria-disabled={!canInspect}
              title={`${param.fqn}: ${canInspect ? "show it on every rank" : CANNOT_INSPECT}`}
              aria-label={param.fqn}
              onClick={() => {
                if (canInspect) inspect(param.fqn);
                else explain(`To inspect ${param.fqn}, ${CANNOT_INSPECT}.`);
              }}
              {...stands({ word: "inspect", fqn: param.fqn })}
            >
              {breakable(nameInUnit(param.fqn, unit))}
            </button>
            <span className="fsdp-note">
              {param.shape.join(" \u00d7 ") || "scalar"} {param.dtype}, {lies(param)}
            </span>
          </li>
        ))}
      </ul>
      {params === null ? <p>{"\u2026"}</p> : null}
    </div>
  );
}

const CANNOT_INSPECT = "wait until the step has ended, or pause the ranks inside it";

/** A name with optional line breaks after its dots. */
function breakable(name: string): React.ReactNode {
  return name.split(/(?<=\.)/).map((part, place) => (
    <React.Fragment key={place}>
      {place > 0 ? <wbr /> : null}
      {part}
    </React.Fragment>
  ));
}

function rows({ rows_per_rank, is_trainable, flat }: ParamInfo): string {
  const kept = `${flat === "" ? "rows" : `elements in ${flat},`} per rank: ${rows_per_rank.join(", ")}`;
  return is_trainable ? kept : `${kept}; not trained`;
}

/** A unit in words: its state on the ranks, its bytes, and its policy. */
function told(unit: UnitInfo, state: State | null, place: number): string {
  const groups = new Map<string, number[]>();
  statesOf(state, place).forEach((number, group) => {
    const words = UNIT_STATES[number]?.words ?? "?";
    groups.set(words, [...(groups.get(words) ?? []), ...(state?.unit_states[group]?.ranks ?? [])].sort((a, b) => a - b));
  });
  const parts = [
    [...groups].map(([words, ranks]) => (groups.size === 1 ? words : `${ranksInWords(ranks)} ${words}`)).join(", "),
    `${formatBytes(unit.bytes_at_rest)} per rank of ${formatBytes(unit.bytes_unsharded)}`,
    unit.bytes_padding > 0 ? `${formatBytes(unit.bytes_padding)} of padding in total` : "",
    unit.is_flat ? `${count(unit.num_params, "parameter")} in one flat parameter` : "",
    unit.replicate_size > 1 ? `${unit.replicate_size} copies on ${count(unit.shard_size, "rank")} each` : `over ${count(unit.shard_size, "rank")}`,
    unit.compute_dtype === unit.reduce_dtype ? unit.compute_dtype : `${unit.compute_dtype}, reduced in ${unit.reduce_dtype}`,
    `reshard after forward: ${unit.reshard_after_forward}`,
    unit.offload ? "offloaded" : "",
  ];
  return parts.filter(Boolean).join(" \u00b7 ");
}
