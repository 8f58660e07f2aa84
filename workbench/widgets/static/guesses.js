// Predictions on a page of a notebook: what follows a question is hidden until the reader has locked a guess.

/**
 * Return how far a guess is from what was measured, in words, as PredictionReport.distance has it.
 * @param {string} guess
 * @param {string | number} measured
 */
function distance(guess, measured) {
  if (typeof measured === "string") return guess === measured ? "exactly right" : "not right";
  const difference = Number(guess) - measured, away = Math.abs(difference);
  if (away <= 1e-9 * Math.abs(measured)) return "exactly right";
  const ratio = Number(guess) / measured;
  const times = ratio > 0 && (ratio < 0.5 || ratio > 2) ? `, ${String(Number(ratio.toPrecision(3)))} times the answer` : "";
  const share = measured ? ` (${String(Math.round((100 * away) / Math.abs(measured)))}%${times})` : "";
  const words = away.toLocaleString("en", { maximumSignificantDigits: Number.isInteger(away) ? 21 : 4 });
  return `${words} too ${difference > 0 ? "high" : "low"}${share}`;
}

/** Guesses of an earlier visit, where the browser keeps any for the page. */
const kept = {
  /** @param {string} name */
  get(name) {
    try {
      return localStorage.getItem(key(name));
    } catch {
      return null;
    }
  },
  /**
   * @param {string} name
   * @param {string} guess
   */
  set(name, guess) {
    try {
      localStorage.setItem(key(name), guess);
    } catch {
      // it holds as long as the page
    }
  },
};

/** @param {string} name */
function key(name) {
  return `guess ${location.pathname} ${document.title} ${name}`;
}

/** Let each question of the page wait for a guess. */
export function askFirst() {
  const cells = /** @type {HTMLElement[]} */ ([...document.querySelectorAll(".jp-Cell")]);
  const forms = /** @type {HTMLFormElement[]} */ ([...document.querySelectorAll("form.fw-guess")]);
  const showUpToQuestion = () => {
    let isOpen = false;
    for (const cell of cells) {
      cell.hidden = isOpen;
      isOpen ||= cell.querySelector("form.fw-guess:not([data-answered])") !== null;
    }
  };
  for (const form of forms) {
    const name = form.dataset.name ?? "", unit = form.dataset.unit ?? "";
    const status = /** @type {HTMLElement} */ (form.querySelector("[role=status]"));
    /** @param {string} guess empty: none */
    const answer = (guess) => {
      const words = guess && unit && unit !== "%" ? `${guess} ${unit}` : `${guess}${guess && unit}`;
      form.dataset.answered = "";
      for (const field of form.querySelectorAll("fieldset")) field.disabled = true;
      status.textContent = guess ? `Locked: ${words}.` : "Shown without a guess.";
      for (const found of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll(".fw-measured"))) {
        const place = found.querySelector(".fw-distance");
        if (found.dataset.name !== name || !place || !guess) continue;
        /** @type {unknown} */
        const parsed = JSON.parse(found.dataset.measured ?? "0");
        const measured = typeof parsed === "string" ? parsed : Number(parsed);
        place.textContent = `; you predicted ${words}: ${distance(guess, measured)}`;
      }
      showUpToQuestion();
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (form.dataset.answered !== undefined) return;
      const given = new FormData(form).get("guess"), text = typeof given === "string" ? given.trim() : "";
      const number = Number(text.replaceAll("_", "").replaceAll(",", ""));
      const isNumber = !form.querySelector("[type=radio]");
      if (!text || (isNumber && !Number.isFinite(number))) {
        status.textContent = isNumber ? "A guess is a number, such as 12." : "Choose one of the answers.";
        return;
      }
      const guess = isNumber ? String(number) : text;
      kept.set(name, guess);
      answer(guess);
    });
    form.querySelector(".fw-skip")?.addEventListener("click", () => { answer(""); });
    const before = kept.get(name);
    if (before) answer(before);
  }
  showUpToQuestion();
}
