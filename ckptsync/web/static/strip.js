// The strip of a run: its newest checkpoints as cells, each a link with a letter and a tooltip.

import { h } from "./dom.js";
import { showStep } from "./format.js";
import { hrefOf, urlOf } from "./links.js";
import { t } from "./strings.js";

/** @type {Record<string, string>} */
const LETTERS = {
  WAITING: "W", REFUSED: "X", UPLOADING: "U", INCOMPLETE: "I", COMPLETE: "C", CONSOLIDATED: "M", VERIFIED: "V",
  DAMAGED: "!", CONFLICT: "?", RETIRED: "R",
};

/**
 * Return the strip; ``cells``: the newest last. Only the newest takes a tab stop.
 * @param {string} run @param {import("./types.js").Cell[]} cells @returns {HTMLElement}
 */
export function strip(run, cells) {
  const last = cells.length - 1;
  const links = cells.map(({ location, step, status }, n) => {
    const name = `${step === null ? location : t("step-n", showStep(step))}: ${t(status)}`;
    const href = hrefOf(urlOf(["runs", run, location]));
    const props = { class: `cell s-${status}`, href, title: name, "aria-label": name, tabindex: n === last ? null : -1 };
    return h("a", { ...props, "data-key": location }, LETTERS[status] ?? "·");
  });
  const same = cells.map((c) => `${c.location} ${c.step} ${c.status}`).join("\n") + t("step");
  return h(
    "div",
    { class: "strip", role: "group", "aria-label": t("newest-of", run), "data-same": same, onkeydown: move },
    ...links.reverse(),
  );
}

/**
 * Move the focus to the next cell on the left or right.
 * @param {KeyboardEvent} event
 */
function move(event) {
  const cell = /** @type {HTMLElement|null} */ (document.activeElement);
  const isSide = event.key === "ArrowLeft" || event.key === "ArrowRight";
  const target = event.key === "ArrowLeft" ? cell?.nextElementSibling : cell?.previousElementSibling;
  if (!isSide || !(target instanceof HTMLElement) || !cell) return;
  event.preventDefault();
  cell.tabIndex = -1;
  target.tabIndex = 0;
  target.focus();
}
