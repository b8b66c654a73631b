// Pieces that several pages show: statuses, ages, tables, bars, commands.

import { h } from "./dom.js";
import { percent, showDuration, showSize, showTime } from "./format.js";
import { t } from "./strings.js";
import { link } from "./links.js";

/** @typedef {import("./dom.js").Child} Child */
/** @typedef {import("./types.js").Running} Running */
/** @typedef {import("./types.js").Status} Status */
/** @typedef {""|"number"|"short"|"wide"} Kind  How the cells of a column look. */

let ahead = 0; // seconds by which the store's clock is ahead of this machine's
let frozen = 0; // the time on the store's clock of a page that is a file, else 0

/**
 * Set the store's clock from the time of a document.
 * @param {number|undefined} time @param {boolean} isFile
 */
export function setClock(time, isFile) {
  if (!time) return;
  if (isFile) frozen = time;
  else ahead = time - Date.now() / 1000;
}

/** Return the time on the store's clock. */
export function now() {
  return frozen || Date.now() / 1000 + ahead;
}

/** Bring all ages of the page up to date. */
export function renewAges() {
  for (const e of document.querySelectorAll("time[data-at]")) {
    const text = t("ago", showDuration(now() - Number(e.getAttribute("data-at"))));
    if (e.textContent !== text) e.textContent = text;
  }
}

/**
 * Return how long ago a time was; "–" without one.
 * @param {number|null|undefined} time @returns {HTMLElement|string}
 */
export function age(time) {
  if (!time) return "–";
  const text = t("ago", showDuration(now() - time));
  return h("time", { "data-at": time, datetime: new Date(time * 1000).toISOString(), title: showTime(time) }, text);
}

/**
 * Return a status as a coloured label.
 * @param {Status} status @returns {HTMLElement}
 */
export function badge(status) {
  return h("span", { class: `badge s-${status}` }, t(status));
}

/**
 * Return a section with a heading.
 * @param {string} title @param {...(Child|Child[])} children @returns {HTMLElement}
 */
export function section(title, ...children) {
  return h("section", { "data-key": `section ${title}`, "aria-label": title }, h("h2", null, title), ...children);
}

/**
 * Return a table. Numbers stand right; a row's first cell is its heading.
 * @param {string} caption @param {[title: string, kind: Kind][]} columns
 * @param {{key: string, cells: (Child|Child[])[], same?: string}[]} rows
 * @returns {HTMLElement}
 */
export function table(caption, columns, rows) {
  const heads = columns.map(([title, kind]) => h("th", { scope: "col", class: kind || null }, title));
  const lines = rows.map(({ key, cells, same }) => {
    const elements = cells.map((cell, n) => {
      const [title, kind] = columns[n] ?? ["", ""];
      const props = { class: kind || null, "data-title": title };
      return n ? h("td", props, cell) : h("th", { ...props, scope: "row" }, cell);
    });
    return h("tr", { "data-key": key, "data-same": same ?? null }, ...elements);
  });
  return h(
    "div",
    { class: "scroll", role: "region", tabindex: 0, "aria-label": caption },
    h("table", null, h("caption", { class: "hidden" }, caption), h("thead", null, h("tr", null, ...heads)), h("tbody", null, ...lines)),
  );
}

/**
 * Return what runs now, as a list with bars.
 * @param {Running[]} entries @param {boolean} showsRun @returns {HTMLElement}
 */
export function runningList(entries, showsRun) {
  if (!entries.length) return h("p", { class: "quiet" }, t("nothing-runs"));
  return h("ul", { class: "running" }, ...entries.map((entry) => runningEntry(entry, showsRun)));
}

/**
 * Return one piece of work that a node does, waits for, or failed in.
 * @param {Running} entry @param {boolean} showsRun @returns {HTMLElement}
 */
function runningEntry(entry, showsRun) {
  const { kind, node, run, location, checkpoint, state, reason, done, total, rate, left } = entry;
  const isMoving = !["waiting", "queued", "refused", "failed"].includes(state);
  const place = [showsRun && run, location || checkpoint].filter(Boolean).join(" / ");
  const action = isMoving ? t(kind) : `${t(kind)} · ${t(state)}`;
  const numbers = [
    total > 0 && isMoving && `${percent(done, total)} %`,
    (done > 0 || isMoving) && (total > 0 ? `${showSize(done)} / ${showSize(total)}` : showSize(done)),
    rate > 0 && isMoving && t("rate", showSize(rate)),
    left !== null && isMoving && t("time-left", showDuration(left)),
    !isMoving && entry.until && t("until", showTime(entry.until)),
    now() - entry.at > 15 && t("as-of", showDuration(now() - entry.at)),
  ].filter(Boolean);
  const name = `${action} ${place} (${node})`;
  return h(
    "li",
    { "data-key": `${kind} ${node} ${run} ${location}`, class: `job j-${state}` },
    h("span", { class: "what" }, action),
    h("span", { class: "place" }, link(["runs", run, location], place), " ", h("span", { class: "quiet" }, node)),
    isMoving && h("progress", { max: total || null, value: total ? Math.min(done, total) : null, "aria-label": name }),
    h("span", { class: "numbers" }, numbers.join(" · ")),
    reason && h("span", { class: "reason" }, reason),
  );
}

/**
 * Return a text whose commands, between backquotes, are elements.
 * @param {string} text @returns {Child[]}
 */
export function withCommands(text) {
  return text.split("`").map((part, n) => (n % 2 ? h("code", null, part) : part));
}

/**
 * Return a command with a button that copies it.
 * @param {string} title @param {string} command @returns {HTMLElement}
 */
export function commandLine(title, command) {
  const announcement = h("span", { class: "hidden", "aria-live": "polite" });
  const button = h("button", { type: "button", "aria-label": `${t("copy")}: ${title}` }, t("copy"));
  button.onclick = async (event) => {
    const pressed = /** @type {HTMLElement} */ (event.currentTarget);
    const line = pressed.closest(".command");
    const code = line?.querySelector("code")?.textContent ?? "";
    const text = await copyText(code) ? t("copied") : t("not-copied");
    pressed.textContent = text;
    const live = line?.querySelector("[aria-live]");
    if (live) live.textContent = text;
    window.setTimeout(() => {
      pressed.textContent = t("copy");
    }, 2000);
  };
  return h("div", { class: "command", "data-key": title }, h("span", { class: "title" }, title), h("code", null, command), button, announcement);
}

/**
 * Copy a text; return whether that worked.
 * @param {string} text @returns {Promise<boolean>}
 */
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false; // not over plain HTTP from another machine
  }
}
