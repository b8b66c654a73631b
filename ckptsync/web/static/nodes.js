// The page of the nodes: queue, rate, disks, spool, errors.

import { h } from "./dom.js";
import { percent, showDuration, showSize } from "./format.js";
import { age, runningList, table } from "./parts.js";
import { t } from "./strings.js";
import { textList } from "./overview.js";

/** @typedef {import("./types.js").StoreNode} StoreNode */

/**
 * Return the page of all nodes.
 * @param {import("./types.js").NodesDocument} doc @returns {Node[]}
 */
export function nodesPage(doc) {
  const running = doc.running ?? [];
  const title = h("h1", null, t("nodes"));
  if (!doc.nodes.length) return [title, h("p", { class: "empty" }, t("no-nodes"))];
  return [title, ...doc.nodes.map((node) => nodeSection(node, running.filter((entry) => entry.node === node.name)))];
}

/**
 * Return the section of one node.
 * @param {StoreNode} node @param {import("./types.js").Running[]} running @returns {HTMLElement}
 */
function nodeSection(node, running) {
  const { queue, errors, notes } = node;
  const blocked = Object.entries(node.blocked ?? {}).map(([place, [text, todo]]) => `${place}: ${text}. ${todo}`);
  const offset = node.clock_offset;
  return h(
    "section",
    { "data-key": node.name, class: `card n-${node.state}`, "aria-label": node.name },
    h("h2", null, node.name, " ", h("span", { class: `state n-${node.state}` }, t(node.state))),
    h(
      "dl",
      { class: "facts small" },
      row(t("roles"), node.roles.map((role) => t(role)).join(", ") || "–"),
      row(t("age"), age(node.beat)),
      row(t("queue"), queue.length ? t("n-queued", String(queue.length), showDuration(node.oldest)) : "0"),
      row(t("rate-name"), t("rate", showSize(node.rate))),
      row(t("sent"), showSize(node.sent_bytes)),
      row(t("version"), node.version || "–"),
      offset !== null && Math.abs(offset) >= 1 && row("", t("clock", showDuration(Math.abs(offset)))),
    ),
    running.length ? runningList(running, true) : null,
    queue.length ? h("details", { "data-key": "queue" }, h("summary", null, `${t("queue")} (${queue.length})`), textList(queue.slice(0, 200))) : null,
    node.disk.length ? diskTable(node) : null,
    messages(t("errors"), "bad", [...errors, ...blocked]),
    messages(t("notes"), "", notes),
  );
}

/**
 * Return one fact: its title and its value.
 * @param {string} title @param {import("./dom.js").Child} value @returns {HTMLElement}
 */
function row(title, value) {
  return h("div", { class: "fact" }, h("dt", null, title), h("dd", null, value));
}

/**
 * Return a titled list of texts; null if there are none.
 * @param {string} title @param {string} kind @param {string[]} texts @returns {HTMLElement|null}
 */
function messages(title, kind, texts) {
  return texts.length ? h("div", { class: `messages ${kind}`, "data-key": title }, h("h3", null, title), textList(texts)) : null;
}

/**
 * Return the table of a node's disks, with the use of spool and disk.
 * @param {StoreNode} node @returns {HTMLElement}
 */
function diskTable(node) {
  /** @type {[string, import("./parts.js").Kind][]} */
  const columns = [[t("disk"), ""], [t("spool"), "number"], [t("disks"), "wide"], [t("watch"), ""]];
  const rows = node.disk.map((disk) => {
    const used = disk.total - disk.free;
    const text = `${percent(used, disk.total)} % · ${t("free-of", showSize(disk.free), showSize(disk.total))}`;
    const spool = disk.budget ? `${showSize(disk.spool)} / ${showSize(disk.budget)}` : showSize(disk.spool);
    const cells = [
      h("code", null, disk.path),
      spool,
      [h("meter", { min: 0, max: disk.total, high: disk.total * 0.9, value: used, "aria-label": text }), " ", text],
      node.watch[disk.path] ?? "–",
    ];
    return { key: disk.path, cells };
  });
  return table(`${t("disks")}: ${node.name}`, columns, rows);
}
