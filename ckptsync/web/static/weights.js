// The weights of a run's models: norms by group of layers over steps, and counts of NaN, infinity, 0.

import { curve } from "./curve.js";
import { h } from "./dom.js";
import { showNumber } from "./format.js";
import { link } from "./links.js";
import { table } from "./parts.js";
import { language, t } from "./strings.js";

/** @typedef {import("./types.js").Location} Location */
/** @typedef {import("./types.js").Weights} Weights */
/** @typedef {import("./curve.js").Mark} Mark */

const GROUPS = ["embeddings", "attention", "mlp", "norm", "head", "lora_a", "lora_b", "other"];
/** @type {readonly ("nan"|"infinite"|"zeros")[]} */
const COUNTS = ["nan", "infinite", "zeros"];

/**
 * Return a figure for the norm of each group, over the steps of checkpoints that have it.
 * @param {Location[]} checkpoints @param {Mark[]} marks @param {boolean} isLog @param {number} each
 * @returns {Node[]}
 */
export function normCurves(checkpoints, marks, isLog, each) {
  return GROUPS.flatMap((group) => {
    const points = checkpoints.flatMap(({ step, weights }) => {
      const norm = weights?.groups[group]?.norm;
      return typeof step === "number" && typeof norm === "number" ? [/** @type {[number, number]} */ ([step, norm])] : [];
    });
    points.sort((a, b) => a[0] - b[0]);
    return points.length ? [curve(t("norm-of", t(`group-${group}`)), points, marks, isLog, each)] : [];
  });
}

/**
 * Return the number of values of a kind in a model.
 * @param {Weights} weights @param {"nan"|"infinite"|"zeros"} kind
 */
function count(weights, kind) {
  return Object.values(weights.groups).reduce((sum, group) => sum + group[kind], 0);
}

/**
 * Return a table of the checkpoints with statistics: how many values are NaN, infinite or zero.
 * @param {Location[]} checkpoints the newest first @param {number} most @returns {Node[]}
 */
export function weightsTable(checkpoints, most) {
  const counted = checkpoints.filter((c) => c.weights).slice(0, most);
  if (!counted.length) return [];
  /** @type {[string, import("./parts.js").Kind][]} */
  const columns = [[t("checkpoint"), ""], ...COUNTS.map((kind) => /** @type {[string, "number"]} */ ([t(kind), "number"])), [t("findings"), "wide"]];
  const rows = counted.map((c) => {
    const weights = /** @type {Weights} */ (c.weights);
    return {
      key: c.location,
      cells: [
        link(["runs", c.run, c.location], c.location),
        ...COUNTS.map((kind) => countText(count(weights, kind), kind !== "zeros")),
        findings(c).join("; ") || "–",
      ],
      same: JSON.stringify([c.location, c.weights, c.weights_findings, language()]),
    };
  });
  return [table(t("weights"), columns, rows)];
}

/**
 * Return a count, marked if it is bad and not 0.
 * @param {number} number @param {boolean} isBad where it is not 0 @returns {HTMLElement|string}
 */
function countText(number, isBad) {
  const text = number.toLocaleString(language());
  return isBad && number ? h("strong", { class: "bad" }, text) : text;
}

/**
 * Return a sentence for each finding, with the first tensors that it is about.
 * @param {Pick<Location, "weights_findings">} location @returns {string[]}
 */
export function findings({ weights_findings: entries }) {
  return entries.map(({ text, tensors, first }) => {
    const more = tensors > first.length ? ", …" : "";
    return first.length ? `${text} (${first.join(", ")}${more})` : text;
  });
}

/**
 * Return a table of the groups of one model.
 * @param {Weights} weights @returns {HTMLElement}
 */
export function groupTable(weights) {
  /** @type {[string, import("./parts.js").Kind][]} */
  const columns = [
    [t("group"), ""], [t("tensors"), "number"], [t("norm"), "number"], [t("least"), "number"], [t("greatest"), "number"],
    ...COUNTS.map((kind) => /** @type {[string, "number"]} */ ([t(kind), "number"])),
  ];
  const rows = GROUPS.flatMap((group) => {
    const values = weights.groups[group];
    if (!values) return [];
    return [{
      key: group,
      cells: [
        t(`group-${group}`), String(values.tensors), showNumber(values.norm), showNumber(values.min), showNumber(values.max),
        ...COUNTS.map((kind) => countText(values[kind], kind !== "zeros")),
      ],
    }];
  });
  return table(t("weights"), columns, rows);
}
