// The page of a run: curves, what runs, and its checkpoints with their times.

import { curve } from "./curve.js";
import { h, svg } from "./dom.js";
import { showDuration, showNumber, showSize, showTime } from "./format.js";
import { link } from "./links.js";
import { age, badge, runningList, section, table } from "./parts.js";
import { language, t } from "./strings.js";
import { strip } from "./strip.js";
import { normCurves, weightsTable } from "./weights.js";

/** @typedef {import("./types.js").Location} Location */
/** @typedef {import("./types.js").RunDocument} RunDocument */

const GAP = 16;
const NARROWEST = 260; // pixels of a curve
const FIRST = ["loss", "eval_loss", "learning_rate", "grad_norm"];
const DULL = /^eval_(runtime|samples_per_second|steps_per_second|.*_per_second)$/;
/** @type {readonly ("saved"|"uploaded"|"merged"|"verified")[]} */
const PHASES = ["saved", "uploaded", "merged", "verified"];

let isLog = false;

/**
 * Return the page with the newest `most` checkpoints; `width` in pixels.
 * @param {RunDocument} doc @param {number} width @param {number} most @param {() => void} redraw
 * @returns {Node[]}
 */
export function runPage(doc, width, most, redraw) {
  const checkpoints = [...doc.checkpoints].sort((a, b) => orderOf(b) - orderOf(a));
  const cells = checkpoints.slice(0, 60).reverse().map((c) => ({ location: c.location, step: c.step ?? null, status: c.status }));
  const running = doc.running ?? [];
  const weights = weightsOf(doc, checkpoints, width, most);
  const parts = [
    h("h1", { dir: "auto" }, doc.run),
    h("div", { class: "summary" }, strip(doc.run, cells), h("span", { class: "quiet" }, t("n-checkpoints", String(checkpoints.length)))),
    running.length ? section(t("running"), runningList(running, false)) : null,
    section(t("curves"), ...curves(doc, width, redraw)),
    weights.length ? section(t("weights"), ...weights) : null,
    section(t("checkpoints"), checkpoints.length ? checkpointTable(checkpoints, most) : h("p", { class: "quiet" }, t("no-checkpoints"))),
  ];
  return parts.flatMap((part) => part ?? []);
}

/**
 * Checkpoints without a step are sorted by when they were saved, after the others.
 * @param {Location} c
 */
function orderOf(c) {
  return c.step ?? (c.saved ?? 0) / 1e12 - 1;
}

/**
 * Return the figures of a run's curves, or a note without curves.
 * `redraw` is called when the scale is changed.
 * @param {RunDocument} doc @param {number} width @param {() => void} redraw @returns {Node[]}
 */
function curves(doc, width, redraw) {
  const names = Object.keys(doc.curves ?? {}).filter((name) => doc.curves[name]?.length && !DULL.test(name));
  if (!names.length) return [h("p", { class: "quiet" }, t("no-curves"))];
  const rank = (/** @type {string} */ name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
  names.sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
  const [marks, each] = [marksOf(doc), eachOf(names.length, width)];
  const onchange = (/** @type {Event} */ event) => {
    isLog = /** @type {HTMLInputElement} */ (event.currentTarget).checked;
    redraw();
  };
  return [
    h("label", { class: "switch" }, h("input", { type: "checkbox", checked: isLog, onchange }), " ", t("log")),
    h("div", { class: "curves" }, ...names.map((name) => curve(t(name), doc.curves[name] ?? [], marks, isLog, each))),
  ];
}

/** @param {RunDocument} doc */
function marksOf(doc) {
  return doc.checkpoints.flatMap(({ step, status }) => (typeof step === "number" ? [{ step, status }] : []));
}

/**
 * Return the width of each figure, in pixels, if as many as fit stand in a row.
 * @param {number} count of figures @param {number} width @returns {number} pixels of each
 */
function eachOf(count, width) {
  const columns = Math.min(count, Math.max(1, Math.floor((width + GAP) / (NARROWEST + GAP))));
  return Math.floor((width - GAP * (columns - 1)) / columns) - 26;
}

/**
 * @param {RunDocument} doc @param {Location[]} checkpoints @param {number} width @param {number} most
 * @returns {Node[]} nothing where no model has statistics
 */
function weightsOf(doc, checkpoints, width, most) {
  const groups = new Set(checkpoints.flatMap((c) => Object.keys(c.weights?.groups ?? {})));
  if (!groups.size) return [];
  const figures = normCurves(checkpoints, marksOf(doc), isLog, eachOf(groups.size, width));
  return [...(figures.length ? [h("div", { class: "curves" }, ...figures)] : []), ...weightsTable(checkpoints, most)];
}

/**
 * Return the table of the first `most` checkpoints; columns without values are left out.
 * @param {Location[]} checkpoints @param {number} most @returns {HTMLElement}
 */
function checkpointTable(checkpoints, most) {
  const longest = scaleOfTimes(checkpoints);
  const hasLoss = checkpoints.some((c) => typeof c.loss === "number");
  const hasReason = checkpoints.some((c) => reasonOf(c));
  const hasEval = checkpoints.some((c) => typeof c.eval_loss === "number");
  /** @type {[string, import("./parts.js").Kind][]} */
  const columns = [
    [t("checkpoint"), ""], [t("status"), "short"], [t("saved"), "short"], [t("timeline"), "wide"],
    ...(hasLoss ? [/** @type {[string, "number"]} */ ([t("loss"), "number"])] : []),
    ...(hasEval ? [/** @type {[string, "number"]} */ ([t("eval_loss"), "number"])] : []),
    [t("size"), "number"], [t("nodes"), "number"], [t("model"), "short"], [t("resume"), "short"],
    ...(hasReason ? [/** @type {[string, ""]} */ ([t("why"), ""])] : []),
  ];
  const rows = checkpoints.slice(0, most).map((c) => ({
    key: c.location,
    cells: [
      [link(["runs", c.run, c.location], c.location), c.kept ? h("span", { class: "kept" }, t("kept")) : null],
      badge(c.status),
      age(c.saved),
      timeLine(c, longest),
      ...(hasLoss ? [showNumber(c.loss)] : []),
      ...(hasEval ? [showNumber(c.eval_loss)] : []),
      showSize(c.bytes),
      String(c.nodes.length),
      modelText(c),
      t(c.resume_complete ? "yes" : "no"),
      ...(hasReason ? [h("span", { class: "why", title: c.evidence.join("\n") || null }, reasonOf(c))] : []),
    ],
    same: JSON.stringify([c, longest, language()]),
  }));
  return table(t("checkpoints"), columns, rows);
}

/**
 * Return whether the consolidated model can be opened; a dash if there is none.
 * @param {Location} c @returns {string}
 */
export function modelText(c) {
  if (c.model && c.model_damaged) return t("model-damaged");
  if (c.missing_to_open.length) return t("no-config");
  return c.model ? t("opens") : "–";
}

/**
 * Return one short reason: what is lost, missing or doubted.
 * @param {Location} c @returns {string}
 */
function reasonOf(c) {
  if (c.status === "VERIFIED" || c.status === "RETIRED") return "";
  const text = c.evidence[0] ?? c.lost[0] ?? c.doubts[0] ?? "";
  const rest = c.evidence.length - 1;
  return rest > 0 ? `${text} (+${rest})` : text;
}

/**
 * Return the seconds from the save to each later phase, NaN for a phase without a time; none while
 * the checkpoint is not complete.
 * @param {Location} c @returns {number[]}
 */
function phasesOf(c) {
  const saved = c.saved;
  if (!saved || ["WAITING", "REFUSED", "UPLOADING", "INCOMPLETE"].includes(c.status)) return [];
  return PHASES.slice(1).map((name) => (c[name] ? Math.max(0, Number(c[name]) - saved) : NaN));
}

/**
 * Return the seconds that the bars' full width means: three times the median, no more than the longest.
 * @param {Location[]} checkpoints
 */
function scaleOfTimes(checkpoints) {
  const ends = checkpoints.map((c) => Math.max(0, ...phasesOf(c).filter(Number.isFinite))).filter((s) => s > 0);
  ends.sort((a, b) => a - b);
  const median = ends[ends.length >> 1] ?? 1;
  return Math.min(ends[ends.length - 1] ?? 1, 3 * median) || 1;
}

/**
 * Return bars for how long upload, merge and verification took, one after another, and their text.
 * @param {Location} c @param {number} longest @returns {HTMLElement|string}
 */
export function timeLine(c, longest) {
  const ends = phasesOf(c);
  if (!ends.some(Number.isFinite)) return "–";
  const words = [];
  const bars = [];
  let from = 0;
  for (const [n, end] of ends.entries()) {
    const name = PHASES[n + 1];
    if (!Number.isFinite(end) || !name) continue;
    const took = Math.max(0, end - from);
    words.push(`${t(name)} +${showDuration(took)}`);
    const [x, width] = [Math.min(100, (100 * from) / longest), (100 * took) / longest];
    bars.push(svg("rect", { class: `phase-${name}`, x: `${x}%`, width: `${Math.max(0.8, Math.min(100 - x, width))}%`, height: "100%" },
      svg("title", null, `${t(name)}: ${showTime(Number(c[name]))}, ${t("after", showDuration(took))}`)));
    from = Math.max(from, end);
  }
  const text = words.join(" · ");
  return h("span", { class: "timeline" }, svg("svg", { role: "img", "aria-label": text, preserveAspectRatio: "none" }, ...bars), h("span", { class: "quiet" }, text));
}
