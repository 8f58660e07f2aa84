/** Components shared by several sections. */
import { caretDownIcon, caretRightIcon, HTMLSelect, type LabIcon } from "@jupyterlab/ui-components";
import * as React from "react";

import type { Command } from "../protocol";
import { isTable, piecesOf, type Typed } from "../words";

/** Attributes of an element that represents a command: its context menu copies the line to type. */
export function stands(command: Typed): { "data-fsdp-command": string } {
  return { "data-fsdp-command": JSON.stringify(command) };
}

/** Which sections are folded, and how to toggle one. */
export interface Folding {
  readonly folded: ReadonlySet<string>;
  readonly toggle: (name: string) => void;
}

interface SectionProps extends Folding {
  readonly name: string;
  /** Shown next to the name, folded or not. */
  readonly note?: string;
  readonly children: React.ReactNode;
}

/** A part of the panel under a heading that folds it. */
export function Section({ name, note, folded, toggle, children }: SectionProps): React.JSX.Element {
  const isOpen = !folded.has(name);
  const id = React.useId();
  const Caret = isOpen ? caretDownIcon : caretRightIcon;
  return (
    <section className="fsdp-Section" aria-label={name}>
      <h3>
        <button
          type="button"
          aria-expanded={isOpen}
          aria-controls={id}
          onClick={() => {
            toggle(name);
          }}
        >
          <Caret.react tag="span" width="16px" />
          <span className="fsdp-Section-name">{name}</span>
          <span className="fsdp-note">{note}</span>
        </button>
      </h3>
      <div id={id} hidden={!isOpen} className="fsdp-Section-body">
        {isOpen ? children : null}
      </div>
    </section>
  );
}

interface ToolProps {
  readonly icon: LabIcon;
  readonly label: string;
  readonly command: Command;
  /** Why it is disabled, a sentence; empty: it is enabled. */
  readonly obstacle: string;
  readonly run: (command: Command) => void;
  /** Show why it is disabled. */
  readonly explain: (obstacle: string) => void;
}

/** A button with an icon that runs a command; a disabled one says why. */
export function Tool({ icon: Icon, label, command, obstacle, run, explain }: ToolProps): React.JSX.Element {
  return (
    <button
      type="button"
      className="fsdp-Tool"
      title={obstacle === "" ? label : `${label}: ${obstacle}`}
      aria-label={label}
      aria-disabled={obstacle !== ""}
      onClick={() => {
        if (obstacle === "") run(command);
        else explain(obstacle);
      }}
      {...stands(command)}
    >
      <Icon.react tag="span" width="16px" />
    </button>
  );
}

interface ActionProps {
  /** Its command, for the line that is copied; undefined: it runs none. */
  readonly command?: Typed;
  readonly isEnabled: boolean;
  readonly className: string;
  readonly title?: string;
  /** Runs on a click; without it the form is submitted. */
  readonly run?: () => void;
  readonly children: React.ReactNode;
}

/** A button with text. It is marked as disabled by `aria-disabled`: with `disabled` it would lose the focus. */
export function Action({ command, isEnabled, className, title, run, children }: ActionProps): React.JSX.Element {
  return (
    <button
      type={run === undefined ? "submit" : "button"}
      className={className}
      title={title}
      aria-disabled={!isEnabled}
      onClick={(event) => {
        if (!isEnabled) event.preventDefault();
        else run?.();
      }}
      {...(command === undefined ? {} : stands(command))}
    >
      {children}
    </button>
  );
}

interface FieldProps {
  readonly label: string;
  readonly hint?: string;
  /** Whether its content is so long that it needs a line of its own. */
  readonly isWide?: boolean;
  readonly children: React.ReactNode;
}

/** A labelled control of a form. */
export function Field({ label, hint, isWide = false, children }: FieldProps): React.JSX.Element {
  return (
    <label className={`fsdp-Field${isWide ? " fsdp-mod-wide" : ""}`} title={hint}>
      <span>{label}</span>
      {children}
    </label>
  );
}

/** A field with its button: a form that runs on Enter as well. */
export function Line({ run, children }: { readonly run: () => void; readonly children: React.ReactNode }): React.JSX.Element {
  return (
    <form
      className="fsdp-Line"
      onSubmit={(event) => {
        event.preventDefault();
        run();
      }}
    >
      {children}
    </form>
  );
}

interface ReplyTextProps {
  readonly text: string;
  readonly label: string;
  readonly box?: React.Ref<HTMLDivElement>;
}

/**
 * The result of a command: sentences are wrapped, facts are shown as names and values, and a table with more columns
 * keeps its lines. Content larger than the box scrolls, by keyboard as well.
 */
export function ReplyText({ text, label, box }: ReplyTextProps): React.JSX.Element {
  const pieces = isTable(text) ? [text] : piecesOf(text);
  return (
    <div ref={box} className={`fsdp-ReplyText${isTable(text) ? " fsdp-mod-table" : ""}`} tabIndex={0} role="region" aria-label={label}>
      {pieces.map((piece, place) => typeof piece === "string" ? <p key={place}>{piece}</p> : (
        <dl key={place}>
          {piece.map(([name, value], number) => (
            <React.Fragment key={number}>
              <dt>{name}</dt>
              <dd>{value}</dd>
            </React.Fragment>
          ))}
        </dl>
      ))}
    </div>
  );
}

interface ChoiceProps<T extends string> {
  readonly value: T;
  readonly among: readonly (T | readonly [value: T, words: string])[];
  readonly choose: (value: T) => void;
}

/** A choice between texts. */
export function Choice<T extends string>({ value, among, choose }: ChoiceProps<T>): React.JSX.Element {
  return (
    <HTMLSelect
      value={value}
      options={among.map((each) => {
        const [word, label] = typeof each === "string" ? [each, each] : each;
        return { value: word, label };
      })}
      onChange={({ target }) => {
        choose(target.value as T);
      }}
    />
  );
}

interface TextProps {
  readonly value: string;
  readonly placeholder?: string;
  readonly type?: "text" | "number";
  readonly min?: number;
  readonly label?: string;
  readonly change: (value: string) => void;
}

/** A line of text or a number. */
export function Text({ change, type = "text", label, ...rest }: TextProps): React.JSX.Element {
  return (
    <input
      {...rest}
      aria-label={label}
      type={type}
      className="jp-mod-styled"
      spellCheck={false}
      onChange={(event) => {
        change(event.target.value);
      }}
    />
  );
}
