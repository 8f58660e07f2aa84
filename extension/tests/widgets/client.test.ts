import { beforeEach, describe, expect, it, vi } from "vitest";

import { ASK_AGAIN_MS, type Channel, Client, type OnMessage } from "../../../workbench/widgets/static/client.js";
import { Closeup } from "../../../workbench/widgets/static/closeup.js";
import type { Answer, Question } from "../../../workbench/widgets/static/messages";
import { History } from "../../../workbench/widgets/static/series.js";
import { moment, news, tables } from "./made";

beforeEach(() => {
  vi.useFakeTimers();
});

/** A fake kernel; the test sends its answers. */
class Kernel implements Channel {
  readonly asked: Question[] = [];
  readonly log: unknown[] = [];
  readonly calls = new Set<OnMessage>();
  readonly client: Client;

  constructor(readonly isRecord = false) {
    this.client = new Client(this, {
      onNews: (_, { memory }) => { this.log.push(["news", memory.t.length]); },
      onMoment: ({ seq }, isLast) => { this.log.push(["moment", seq, isLast]); },
      onWindow: (answer, { memory }) => { this.log.push(["window", answer, memory.t.length]); },
      onReply: (text) => { this.log.push(["reply", text]); },
      onAnswer: () => { this.log.push("answer"); },
      onBeat: () => { this.log.push("beat"); },
    });
  }

  get(): ReturnType<Channel["get"]> {
    return { buttons: [], panels: [], sizes: [], faults: [] };
  }

  send(question: Question): void {
    this.asked.push(question);
  }

  on(_name: "msg:custom", call: OnMessage): void {
    this.calls.add(call);
  }

  off(_name: "msg:custom", call: OnMessage): void {
    this.calls.delete(call);
  }

  tell(answer: Answer, buffers: DataView[] = []): void {
    for (const call of this.calls) call({ ...answer, view: this.client.id }, buffers);
  }

  tellNews(): void {
    const { counts, data } = tables({ memory: { t: [1], bytes: new Array<number>(10).fill(1), group: [0] } });
    this.tell(news({ counts }), [data]);
  }

  tellMoment(number: number, seq: number): void {
    this.tell({ word: "moment", view: "", number, moment: moment(1, { seq }) });
  }

  get feeds(): boolean[] {
    return this.asked.flatMap((question) => (question.word === "feed" ? [question.wait] : []));
  }
}

describe("a client asks for news", () => {
  it("while it is awake, one question at a time", () => {
    const kernel = new Kernel();
    vi.advanceTimersByTime(5000);
    expect(kernel.asked).toEqual([]);
    kernel.client.wake(true);
    expect(kernel.feeds).toEqual([false]);
    vi.advanceTimersByTime(ASK_AGAIN_MS);
    expect(kernel.feeds).toEqual([false]);
    kernel.client.wake(false);
    vi.advanceTimersByTime(60_000);
    expect(kernel.feeds).toHaveLength(1);
  });

  it("again as soon as some has come, and before it is worked on; from then on the kernel may wait", () => {
    const kernel = new Kernel();
    kernel.client.wake(true);
    kernel.log.length = 0;
    kernel.tellNews();
    expect(kernel.feeds).toEqual([false, true]);
    expect(kernel.log).toEqual(["beat", ["news", 1], "answer"]);
    expect(kernel.client.hasBegun).toBe(true);
  });

  it("again after a while without an answer", () => {
    const kernel = new Kernel();
    kernel.client.wake(true);
    vi.advanceTimersByTime(ASK_AGAIN_MS + 500);
    expect(kernel.feeds).toEqual([false, false]);
  });

  it("only once after it has slept with a question pending", () => {
    const kernel = new Kernel();
    kernel.client.wake(true);
    kernel.client.wake(false);
    kernel.client.wake(true);
    expect(kernel.feeds).toHaveLength(1);
    kernel.client.wake(false);
    kernel.tellNews();
    expect(kernel.feeds).toHaveLength(1);
    kernel.client.wake(true);
    expect(kernel.feeds).toEqual([false, true]);
  });

  it("and notices a silent kernel, but no silent record", () => {
    const [kernel, record] = [new Kernel(), new Kernel(true)];
    vi.advanceTimersByTime(2500);
    expect(kernel.client.isSilent).toBe(false);
    vi.advanceTimersByTime(1);
    expect([kernel.client.isSilent, record.client.isSilent]).toEqual([true, false]);
    kernel.tell({ word: "pressed", view: "", button: "step", text: "" });
    expect(kernel.client.isSilent).toBe(false);
  });
});

describe("a client asks about moments", () => {
  it("one question at a time; of those asked meanwhile only the last is sent", () => {
    const kernel = new Kernel(), { client } = kernel;
    client.askAt(10);
    client.askAt(20);
    client.askBeside(moment(3, { rank: 2, seq: 9 }), -1);
    expect(kernel.asked).toEqual([{ word: "at", view: client.id, number: 1, t_us: 10 }]);
    kernel.tellMoment(1, 5);
    expect(kernel.log).toEqual([["moment", 5, false], "answer"]);
    expect(kernel.asked[1]).toEqual({ word: "beside", view: client.id, number: 2, rank: 2, seq: 9, by: -1 });
    kernel.tellMoment(2, 6);
    expect(kernel.log.slice(2)).toEqual([["moment", 6, true], "answer"]);
    expect([kernel.asked.length, client.isWaiting]).toEqual([2, false]);
  });

  it("and ignores answers to questions that it has forgotten", () => {
    const kernel = new Kernel(), { client } = kernel;
    client.askAt(10);
    client.askAt(20);
    client.forgetMoment();
    kernel.tellMoment(1, 5);
    expect(kernel.log).toEqual(["answer"]);
    expect([kernel.asked.length, client.isWaiting]).toEqual([1, false]);
    client.askAt(30);
    expect(kernel.asked[1]).toMatchObject({ number: 3, t_us: 30 });
  });

  it("again if the answer does not come", () => {
    const kernel = new Kernel();
    kernel.client.askAt(10);
    vi.advanceTimersByTime(ASK_AGAIN_MS);
    kernel.client.askAt(20);
    expect(kernel.asked).toHaveLength(1);
    vi.advanceTimersByTime(1);
    kernel.client.askAt(30);
    expect(kernel.asked[1]).toMatchObject({ number: 2, t_us: 30 });
  });

  it("and goes on after a moment at which nothing is recorded", () => {
    const kernel = new Kernel();
    kernel.client.askAt(10);
    kernel.tell({ word: "moment", view: "", number: 1, moment: null });
    expect([kernel.client.isWaiting, kernel.log]).toEqual([false, ["answer"]]);
  });
});

describe("a client", () => {
  it("presses buttons and asks for windows", () => {
    const kernel = new Kernel(), view = kernel.client.id;
    kernel.client.press("next", "unit");
    kernel.client.askWindow(3, 10, 20);
    expect(kernel.asked).toEqual([{ word: "press", view, button: "next", argument: "unit" }, { word: "window", view, number: 3, from_us: 10, to_us: 20 }]);
    const { counts, data } = tables({ memory: { t: [1], bytes: new Array<number>(10).fill(1), group: [0] } });
    kernel.tell({ word: "window", view, number: 3, from_us: 10, to_us: 20, exact: false, counts }, [data]);
    kernel.tell({ word: "refused", view, number: 3, text: "no" });
    expect(kernel.log).toEqual([["window", { number: 3, from: 10, to: 20, isExact: false }, 1], "answer", ["reply", "no"], "answer"]);
  });

  it("ignores answers to other views", () => {
    const kernel = new Kernel();
    for (const call of kernel.calls) call({ word: "pressed", view: "other", button: "", text: "a" }, []);
    expect(kernel.log).toEqual([]);
  });

  it("says goodbye, and is quiet then", () => {
    const kernel = new Kernel();
    kernel.client.wake(true);
    kernel.client.close();
    kernel.client.wake(true);
    kernel.client.askWindow(1, 2, 3);
    vi.advanceTimersByTime(60_000);
    expect(kernel.asked.map(({ word }) => word)).toEqual(["feed", "bye"]);
    expect(kernel.calls.size).toBe(0);
  });
});

describe("a close look at a window", () => {
  const END = 10_000_000;
  const ask = vi.fn<(number: number, from: number, to: number) => void>();
  let closeup = new Closeup(ask);

  beforeEach(() => {
    ask.mockClear();
    closeup = new Closeup(ask);
  });

  const answer = (isExact = true): boolean => {
    const [number, from, to] = ask.mock.lastCall ?? [0, 0, 0];
    return closeup.take({ number, from, to, isExact }, new History(), []);
  };

  it("is asked for, with margins, once the view holds still", () => {
    closeup.look([0, 50], END, 0);
    vi.advanceTimersByTime(99);
    closeup.look([100, 200], END, 0);
    vi.advanceTimersByTime(99);
    expect(ask).not.toHaveBeenCalled();
    vi.advanceTimersByTime(1);
    expect(ask.mock.calls).toEqual([[1, 75, 225]]);
    expect(closeup.covering([100, 200], END)).toBeNull();
    expect(answer()).toBe(true);
    expect(closeup.covering([75, 225], END)).toMatchObject({ from: 75, to: 225 });
    expect([closeup.covering([74, 200], END), closeup.covering([100, 226], END)]).toEqual([null, null]);
  });

  it("is not asked for again while it covers the view", () => {
    closeup.look([100, 200], END, 0);
    vi.advanceTimersByTime(100);
    answer();
    closeup.look([110, 210], END, 0);
    vi.advanceTimersByTime(9000);
    expect(ask).toHaveBeenCalledTimes(1);
    closeup.look([300, 400], END, 0);
    vi.advanceTimersByTime(100);
    expect(ask).toHaveBeenLastCalledWith(2, 275, 425);
  });

  it("is asked for again of the newest time when there is news, but not too soon", () => {
    closeup.look([END - 100, END], END, 0);
    vi.advanceTimersByTime(100);
    answer();
    closeup.look([END - 100, END], END, 1);
    vi.advanceTimersByTime(499);
    expect(ask).toHaveBeenCalledTimes(1);
    vi.advanceTimersByTime(1);
    expect(ask).toHaveBeenCalledTimes(2);
    expect(answer()).toBe(true);
    closeup.look([100, 200], END, 1); // elsewhere
    vi.advanceTimersByTime(100);
    answer();
    closeup.look([100, 200], END, 2); // long past: no news of it will come
    vi.advanceTimersByTime(9000);
    expect(ask).toHaveBeenCalledTimes(3);
  });

  it("reaches to the end of the run, which may be before that of the view", () => {
    closeup.look([100, 200], 150, 0);
    vi.advanceTimersByTime(100);
    answer();
    expect(closeup.covering([100, 200], 150)).not.toBeNull();
    expect(closeup.covering([100, 200], 160)).toBeNull();
  });

  it("ignores answers to earlier questions", () => {
    closeup.look([100, 200], END, 0);
    vi.advanceTimersByTime(100);
    closeup.forget();
    expect([answer(), closeup.found]).toEqual([false, null]);
    closeup.look([100, 200], END, 0);
    vi.advanceTimersByTime(100);
    expect(closeup.take({ number: 1, from: 0, to: 1, isExact: true }, new History(), [])).toBe(false);
    expect(answer()).toBe(true);
  });

  it("hints that it is simplified, after a while also without an answer", () => {
    expect(closeup.hint(null)).toBe("");
    closeup.look([100, 200], END, 0);
    vi.advanceTimersByTime(700);
    expect(closeup.hint(null)).toBe("");
    vi.advanceTimersByTime(1);
    expect(closeup.hint(null)).toBe("simplified");
    answer(false);
    expect(closeup.hint(closeup.found)).toBe("simplified: zoom in for every change");
    closeup.rest();
    expect(closeup.hint(null)).toBe("");
  });
});
