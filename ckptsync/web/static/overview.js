// The first page: alarms, what runs, runs with their strips, nodes.

import { h } from "./dom.js";
import { showDuration, showSize, showStep, showTime } from "./format.js";
import { link } from "./links.js";
import { age, now, runningList, section, table, withCommands } from "./parts.js";
import { t } from "./strings.js";
import { strip } from "./strip.js";

/** @typedef {import("./types.js").OverviewDocument} OverviewDocument */
/** @typedef {import("./types.js").RunSummary} RunSummary */
/** @typedef {import("./types.js").StoreNode} StoreNode */

/**
 * Return the page with the first `most` runs.
 * @param {OverviewDocument} doc @param {number} most @returns {Node[]}
 */
export function overviewPage(doc, most) {
  const running = doc.running ?? [];
  return [
    h("h1", { class: "hidden" }, t("overview")),
    facts(doc),
    section(t("running"), runningList(running, true)),
    section(t("runs"), doc.runs.length ? runsTable(doc, most) : emptyStore(doc.store)),
    section(t("nodes"), doc.nodes.length ? nodeList(doc.nodes) : h("p", { class: "quiet" }, t("no-nodes"))),
    ...(doc.unreadable.length ? [section(t("unreadable-records"), textList(doc.unreadable))] : []),
  ];
}

/**
 * Return the elements of alarms; their parent is a live region, which screen readers announce.
 * @param {import("./types.js").Alarm[]} alarms @returns {Node[]}
 */
export function alarmList(alarms) {
  return alarms.map(({ severity, text, todo, since, code, subject }) =>
    h(
      "div",
      { class: `alarm a-${severity}`, "data-key": `${code} ${subject}` },
      h("strong", null, t(severity)),
      h("div", null, h("p", null, text), todo && h("p", { class: "todo" }, h("b", null, t("todo")), " ", ...withCommands(todo))),
      since ? h("span", { class: "quiet" }, age(since)) : null,
    ),
  );
}

/**
 * Return a list with one item for each text.
 * @param {string[]} texts @returns {HTMLElement}
 */
export function textList(texts) {
  return h("ul", { class: "texts" }, ...texts.map((text) => h("li", null, text)));
}

/**
 * Return the numbers of the store: checkpoints, nodes, sizes.
 * @param {OverviewDocument} doc @returns {HTMLElement}
 */
function facts(doc) {
  const counts = { VERIFIED: 0, all: 0 };
  for (const run of doc.runs) {
    for (const [status, n] of Object.entries(run.checkpoints)) {
      counts.all += n;
      if (status === "VERIFIED") counts.VERIFIED += n;
    }
  }
  const alive = doc.nodes.filter((node) => node.state === "alive").length;
  const isBad = doc.alarms.some(({ severity }) => severity === "critical");
  const calm = doc.alarms.length ? `${doc.alarms.length}` : "✓";
  return h(
    "dl",
    { class: "facts" },
    fact(t("alarms"), calm, doc.alarms.length ? "" : t("no-alarms"), doc.alarms.length ? (isBad ? "bad" : "warn") : "good"),
    fact(t("verified"), `${counts.VERIFIED} / ${counts.all}`, t("checkpoints").toLowerCase()),
    fact(t("nodes"), `${alive} / ${doc.nodes.length}`, t("alive")),
    fact(t("stored"), showSize(doc.bytes), t("models", showSize(doc.model_bytes))),
    doc.room && fact(t("room"), showSize(doc.room.free), t("of", showSize(doc.room.total))),
  );
}

/** @param {string} title @param {string} value @param {string} note @param {string} [kind] */
function fact(title, value, note, kind) {
  return h("div", { class: `fact ${kind ?? ""}` }, h("dt", null, title), h("dd", null, h("b", null, value), " ", h("span", null, note)));
}

/**
 * Return what to do first with a store without checkpoints.
 * @param {string} store @returns {HTMLElement}
 */
function emptyStore(store) {
  return h(
    "div",
    { class: "empty" },
    h("p", null, h("b", null, t("no-runs"))),
    h("p", null, t("no-runs-why")),
    h("pre", null, `ckptsync push --store ${store} DIRECTORY\nckptsync service --config /etc/ckptsync.yaml`),
  );
}

/**
 * Return the table of the first `most` runs.
 * @param {OverviewDocument} doc @param {number} most @returns {HTMLElement}
 */
function runsTable(doc, most) {
  /** @type {[string, import("./parts.js").Kind][]} */
  const columns = [
    [t("run"), ""], [t("newest"), "wide"], [t("latest-verified"), "short"], [t("checkpoints"), "number"], [t("size"), "number"],
  ];
  const rows = doc.runs.slice(0, most).map((run) => ({ key: run.run, cells: runCells(run, doc) }));
  return table(t("runs"), columns, rows);
}

/** @param {RunSummary} run @param {OverviewDocument} doc */
function runCells(run, doc) {
  const { verified } = run;
  const total = Object.values(run.checkpoints).reduce((sum, n) => sum + n, 0);
  const verifiedCell = verified && h(
    "span",
    null,
    link(["runs", run.run, verified.location], verified.step === null ? verified.location : t("step-n", showStep(verified.step))),
    " ",
    h("span", { class: "quiet" }, age(verified.ended || verified.arrived)),
  );
  return [
    [link(["runs", run.run], run.run, { class: "name" }), run.training ? h("span", { class: `training t-${run.training}` }, trainingText(run.training)) : null],
    strip(run.run, doc.strips?.[run.run] ?? []),
    verifiedCell ?? h("span", { class: "quiet" }, t("no-verified")),
    String(total),
    showSize(run.bytes + run.model_bytes),
  ];
}

/**
 * Return the state of a training in the viewer's language; an unknown state as it is.
 * @param {string} state @returns {string}
 */
function trainingText(state) {
  return ["runs", "ended", "gone"].includes(state) ? t(`training-${state}`) : state;
}

/**
 * Return the list of nodes, each with its state.
 * @param {StoreNode[]} nodes @returns {HTMLElement}
 */
function nodeList(nodes) {
  return h(
    "ul",
    { class: "nodes" },
    ...nodes.map((node) =>
      h(
        "li",
        { "data-key": node.name, class: `node n-${node.state}`, title: showTime(node.beat) },
        h("span", { class: "dot", "aria-hidden": "true" }, { alive: "●", silent: "▲", stopped: "■" }[node.state] ?? "✕"),
        link(["nodes"], node.name),
        h("span", { class: "quiet" }, nodeText(node)),
      ),
    ),
  );
}

/**
 * Return a node's roles, state and rate.
 * @param {StoreNode} node @returns {string}
 */
function nodeText(node) {
  const roles = node.roles.map((role) => t(role)).join(", ");
  const isAlive = node.state === "alive";
  const last = isAlive ? node.rate > 0 && t("rate", showSize(node.rate)) : t("ago", showDuration(now() - node.beat));
  return [roles, t(node.state), last].filter(Boolean).join(" · ");
}
