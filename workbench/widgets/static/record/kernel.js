// Answers a dashboard's questions in place of a kernel, from a record: the other end of the messages of ../client.js.

import { pack } from "../unpack.js";
import { windowOf } from "./window_changes.js";

/** @import { Channel, OnMessage } from "../client.js" */
/** @import { Answer, FeedUpdate, Question } from "../messages.js" */
/** @import { RecordedRun } from "./recorded_run.js" */

const IDLE_MS = 1500; // until the answer that there is nothing new

/**
 * The answer to a question, with its buffers; null: none.
 * @param {RecordedRun} run
 * @param {Question} question
 * @returns {[Answer, DataView[]] | null}
 */
export function answerOf(run, question) {
  const { view } = question;
  switch (question.word) {
    case "feed":
      return question.wait ? [nothingNew(run, view), [pack({})[1]]] : [{ ...run.told.feed, view }, [run.data]];
    case "at":
      return [{ word: "moment", view, number: question.number, moment: run.at(question.t_us) }, []];
    case "beside": {
      const moment = run.beside(question.rank, question.seq, question.by);
      return [{ word: "moment", view, number: question.number, moment }, []];
    }
    case "window": {
      const { number, from_us, to_us } = question, { exact, tables } = windowOf(run, from_us, to_us);
      const [counts, data] = pack(tables);
      return [{ word: "window", view, number, from_us, to_us, exact, counts }, [data]];
    }
    default:
      return null;
  }
}

/**
 * @param {RecordedRun} run
 * @param {string} view
 * @returns {FeedUpdate}
 */
function nothingNew({ told: { feed } }, view) {
  const known = { units: null, order: null, holds: null, now: null, peaks: null, cursor: null, has_moved: false };
  return { ...feed, ...known, view, restart: false, another: false, exact: true, counts: pack({})[0] };
}

/**
 * A channel for a dashboard, to a record instead of a kernel.
 * @param {RecordedRun} run
 * @returns {Channel}
 */
export function channelTo(run) {
  /** @type {Set<OnMessage>} */
  const calls = new Set();
  return {
    isRecord: true,
    get: () => run.told.about,
    send: (question) => {
      const isIdle = question.word === "feed" && question.wait;
      setTimeout(() => {
        const answer = answerOf(run, question);
        if (answer) for (const call of calls) call(...answer);
      }, isIdle ? IDLE_MS : 0);
    },
    on: (_name, call) => { calls.add(call); },
    off: (_name, call) => { calls.delete(call); },
  };
}
