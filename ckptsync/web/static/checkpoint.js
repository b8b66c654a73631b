// The page of a checkpoint: its facts, missing and damaged files, commands, and all files.

import { h } from "./dom.js";
import { showNumber, showSize, showStep, showTime } from "./format.js";
import { link } from "./links.js";
import { age, badge, commandLine, runningList, section, table, withCommands } from "./parts.js";
import { t } from "./strings.js";
import { modelText, timeLine } from "./run.js";
import { textList } from "./overview.js";
import { findings, groupTable } from "./weights.js";

/** @typedef {import("./types.js").CheckpointDocument} CheckpointDocument */
/** @typedef {import("./types.js").Damage} Damage */

const MOST_RANGES = 20;

/**
 * Return the page of one checkpoint.
 * @param {CheckpointDocument} doc @returns {Node[]}
 */
export function checkpointPage(doc) {
  const running = doc.running ?? [];
  const parts = [
    h("p", { class: "crumbs" }, link(["runs", doc.run], doc.run)),
    h("h1", { dir: "auto" }, doc.location, " ", badge(doc.status)),
    summary(doc),
    running.length ? section(t("running"), runningList(running, false)) : null,
    reasons(doc),
    doc.damage.length ? section(t("damage"), damageTable(doc.damage)) : null,
    doc.weights ? section(t("weights"), ...weights(doc, doc.weights)) : null,
    section(t("commands"), ...commands(doc)),
    section(t("files"), ...files(doc)),
  ];
  return parts.flatMap((part) => part ?? []);
}

/**
 * Return the list of facts: step, times, size, nodes, loss, metrics and more.
 * @param {CheckpointDocument} doc @returns {HTMLElement}
 */
function summary(doc) {
  const location = /** @type {import("./types.js").Location} */ (/** @type {unknown} */ (doc));
  const last = Math.max(...[doc.uploaded, doc.merged, doc.verified].map(Number)) - Number(doc.saved);
  /** @type {[string, import("./dom.js").Child][]} */
  const rows = [
    [t("step"), typeof doc.step === "number" ? showStep(doc.step) : "–"],
    [t("saved"), age(doc.saved)],
    [t("timeline"), timeLine(location, last || 1)],
    [t("size"), showSize(doc.bytes)],
    [t("nodes"), doc.nodes.join(", ") || "–"],
    [t("loss"), showNumber(doc.metrics?.loss ?? doc.loss)],
    [t("eval_loss"), showNumber(doc.metrics?.eval_loss ?? doc.eval_loss)],
    ...Object.entries(doc.metrics ?? {}).filter(([name]) => !["loss", "eval_loss"].includes(name)).map(
      ([name, value]) => /** @type {[string, import("./dom.js").Child]} */ ([name, showNumber(value)]),
    ),
    [t("model"), modelText(location)],
    [t("resume"), t(doc.resume_complete ? "yes" : "no")],
    [t("verified"), doc.proof.when ? `${showTime(doc.proof.when)}${doc.proof.level ? ` (${doc.proof.level})` : ""}` : "–"],
    [t("kept-title"), t(doc.kept ? "yes" : "no")],
  ];
  return h("dl", { class: "facts small" }, ...rows.filter(([, value]) => value !== "–").map(([title, value]) =>
    h("div", { class: "fact", "data-key": title }, h("dt", null, title), h("dd", null, value))));
}

/**
 * Return why a checkpoint is incomplete or damaged; null without reasons.
 * @param {CheckpointDocument} doc @returns {HTMLElement|null}
 */
function reasons(doc) {
  /** @type {[string, string[]][]} */
  const all = [
    [t("why"), doc.evidence], [t("lost"), doc.lost], [t("missing-open"), doc.missing_to_open],
    [t("missing-resume"), doc.missing_for_resume], [t("doubts"), doc.doubts],
  ];
  const filled = all.filter(([, texts]) => texts.length);
  if (!filled.length && !doc.hint) return null;
  return section(
    doc.status === "VERIFIED" ? t("notes") : t(doc.status === "DAMAGED" ? "damaged" : "missing"),
    ...filled.map(([title, texts]) => h("div", { class: "messages", "data-key": title }, h("h3", null, title), textList(texts.slice(0, 200)))),
    doc.hint ? h("p", { class: "todo" }, h("b", null, t("hint")), " ", ...withCommands(doc.hint)) : null,
  );
}

/**
 * Return the table of damaged files, with their ranges and tensors.
 * @param {Damage[]} damage @returns {HTMLElement}
 */
function damageTable(damage) {
  /** @type {[string, import("./parts.js").Kind][]} */
  const columns = [[t("file"), ""], [t("ranges"), ""], [t("tensors"), "wide"]];
  return table(t("damage"), columns, damage.map(({ file, ranges, tensors }, n) => ({
    key: `${n} ${file}`,
    cells: [
      h("code", null, file),
      shortened(ranges.map(([from, to]) => t("to", showStep(from), showStep(to)))) || "–",
      shortened(tensors) || "–",
    ],
  })));
}

/**
 * Return the first `MOST_RANGES` texts, and how many more there are.
 * @param {string[]} texts @returns {string}
 */
function shortened(texts) {
  const hidden = texts.length - MOST_RANGES;
  return texts.slice(0, MOST_RANGES).join(", ") + (hidden > 0 ? ` (+${hidden})` : "");
}

/**
 * Return the findings about the weights, and the table of their groups.
 * @param {CheckpointDocument} doc @param {import("./types.js").Weights} values @returns {Node[]}
 */
function weights(doc, values) {
  return [...findings(doc).map((line) => h("p", { class: "bad" }, line)), groupTable(values)];
}

/**
 * Return a line for each command; those that this version does not know come first.
 * @param {CheckpointDocument} doc @returns {Node[]}
 */
function commands(doc) {
  const order = ["pull_model", "pull", "open", "verify", "repair", "keep", "ls"];
  const names = Object.keys(doc.commands).sort((a, b) => order.indexOf(a) - order.indexOf(b));
  return names.map((name) => commandLine(order.includes(name) ? t(`command-${name}`) : name, doc.commands[name] ?? ""));
}

/**
 * Return the table of files, below a note if the document has only the first ones.
 * @param {CheckpointDocument} doc @returns {Node[]}
 */
function files(doc) {
  const total = doc.files_total ?? doc.files.length;
  /** @type {[string, import("./parts.js").Kind][]} */
  const columns = [[t("file"), "wide"], [t("size"), "number"], [t("node"), ""], [t("rank"), "number"]];
  const rows = doc.files.map(({ name, bytes, node, rank }) => ({
    key: `${name} ${node}`, cells: [h("code", null, name), showSize(bytes), node, rank === null ? "–" : String(rank)],
  }));
  const note = total > doc.files.length ? h("p", { class: "quiet" }, t("first-files", String(doc.files.length), String(total))) : null;
  return [...(note ? [note] : []), table(t("files"), columns, rows)];
}
