/** The newest lines that ranks printed, asked for only while something shows them. */
import type { Client } from "./client";
import type { OutputTail } from "./protocol";

/** Minimum milliseconds between two questions for output that grows. */
const REST_MS = 500;

export class PrintedOutput {
  readonly #client: Client;
  readonly #tell: () => void;
  #tail: OutputTail | null = null;
  #rank: number | null = null;
  #version = -1; // of the output; -1: unknown
  #seen = -1; // version last asked for
  #askedMs = 0; // when
  #views = 0; // that show it

  /** `tell` is called when something has changed. */
  constructor(client: Client, tell: () => void) {
    this.#client = client;
    this.#tell = tell;
  }

  /** The newest lines; null: not known yet. */
  get tail(): OutputTail | null {
    return this.#tail;
  }

  /** The rank whose lines are shown; null: all ranks. */
  get rank(): number | null {
    return this.#rank;
  }

  set rank(rank: number | null) {
    this.#rank = rank;
    this.#seen = -1;
    this.#tell();
    this.#find();
  }

  /** Ask for lines whenever there are others, until the returned function is called. */
  watch(): () => void {
    this.#views += 1;
    this.#find();
    return () => { this.#views -= 1; };
  }

  /** Take the version of the output that a state has. */
  follow(version: number): void {
    this.#version = version;
    this.#find();
  }

  forget(): void {
    this.#tail = this.#rank = null;
    this.#version = this.#seen = -1;
  }

  #find(): void {
    if (this.#views === 0 || this.#version < 0 || this.#version === this.#seen) return;
    if (this.#seen >= 0 && Date.now() - this.#askedMs < REST_MS) return; // another state follows
    this.#seen = this.#version;
    this.#askedMs = Date.now();
    const rank = this.#rank;
    this.#client.ask<"lines">({ word: "output", rank }).then(
      (tail) => {
        if (rank !== this.#rank) return;
        this.#tail = tail;
        this.#tell();
      },
      () => { this.#seen = -1; }, // ask again with the next state
    );
  }
}
