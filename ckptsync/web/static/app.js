// The entry point of the page: fetches the document of the current URL, draws it with header and
// alarms, fetches it again when the store has changed, and follows links without reloading.

import { checkpointPage } from "./checkpoint.js";
import { h, patch } from "./dom.js";
import { showDuration, showTime } from "./format.js";
import { currentUrl, hrefOf, link } from "./links.js";
import { nodesPage } from "./nodes.js";
import { alarmList, overviewPage } from "./overview.js";
import { now, renewAges, setClock, withCommands } from "./parts.js";
import { runPage } from "./run.js";
import { follow, isFile, load, LoadError } from "./source.js";
import { chooseLanguage, language, t } from "./strings.js";

/**
 * Return the element of an id, which the page must have.
 * @param {string} id @returns {HTMLElement}
 */
function byId(id) {
  return /** @type {HTMLElement} */ (document.getElementById(id));
}

const shown = {
  url: currentUrl(),
  /** @type {any} */ document: null,
  /** @type {LoadError|null} */ error: null,
  answered: 0, // ms of this machine's clock when the server answered last
  store: "",
  /** @type {import("./types.js").Alarm[]} */ alarms: [],
};
const FIRST_ROWS = 12; // of a long table, and alarms, that are drawn first: the rest follows
let isWhole = false; // whether all rows are drawn
let isLoading = false;
let isStale = false; // whether the store changed while a document was being fetched

/** Fetch the document of the current URL, and draw it or the error; only one fetch at a time. */
async function refresh() {
  if (isLoading) {
    isStale = true;
    return;
  }
  isLoading = true;
  const url = currentUrl();
  try {
    const doc = await load(url);
    if (url === currentUrl()) {
      setClock(doc.at, isFile);
      Object.assign(shown, { url, document: doc, error: null });
      if (doc.store) shown.store = doc.store;
      if (doc.alarms) shown.alarms = doc.alarms;
    } else {
      isStale = true;
    }
    shown.answered = Date.now();
  } catch (error) {
    if (!(error instanceof LoadError)) throw error;
    if (!error.isAway) {
      shown.answered = Date.now();
      shown.document = null;
    }
    shown.error = error;
    shown.url = url;
  } finally {
    isLoading = false;
  }
  draw();
  const isDue = isStale && !document.hidden; // becoming visible refreshes, too
  isStale = false;
  if (isDue) await refresh();
}

/** Draw the last document or error; a long page in two steps. */
function draw() {
  document.documentElement.lang = language() === "zh" ? "zh-CN" : "en";
  document.title = titleOf(shown.url);
  byId("skip").textContent = t("skip");
  patch(byId("header"), header());
  const isAway = Boolean(shown.error?.isAway);
  const isFront = shown.url === "/" && !shown.error;
  const most = isWhole ? Infinity : FIRST_ROWS;
  patch(byId("alerts"), isFront ? alarmList(shown.alarms.slice(0, most)) : []);
  const main = byId("main");
  main.classList.toggle("stale", isAway);
  if (shown.document) patch(main, pageOf(shown.url, shown.document));
  else if (shown.error) patch(main, [problem(shown.error)]);
  drawConnection();
  if (shown.document && !isWhole) {
    isWhole = true;
    window.requestAnimationFrame(() => window.setTimeout(draw));
  }
}

/**
 * Return the decoded segments of a URL; none if it cannot be decoded.
 * @param {string} url @returns {string[]} the decoded segments of a URL
 */
function segments(url) {
  try {
    return url.split("/").filter(Boolean).map(decodeURIComponent);
  } catch {
    return [];
  }
}

/**
 * Return the title of the page, with the number of alarms.
 * @param {string} url @returns {string}
 */
function titleOf(url) {
  const [page, ...names] = segments(url);
  const name = page === "nodes" ? t("nodes") : names.length ? names.join(" / ") : t("overview");
  const count = shown.alarms.length;
  return `${count ? `(${count}) ` : ""}${name} · ckptsync`;
}

/**
 * Return the nodes of the page that a URL names, drawn from its document.
 * @param {string} url @param {any} doc @returns {Node[]}
 */
function pageOf(url, doc) {
  const [page, , location] = segments(url);
  const most = isWhole ? Infinity : FIRST_ROWS;
  const width = Math.max(280, byId("main").clientWidth - 32);
  if (page === "nodes") return nodesPage(doc);
  if (page === "runs" && location) return checkpointPage(doc);
  if (page === "runs") return runPage(doc, width, most, draw);
  return overviewPage(doc, most);
}

/**
 * Return the header: links, the store, the connection, and the button for the other language.
 * @returns {Node[]}
 */
function header() {
  const isNodes = shown.url === "/nodes";
  const otherLanguage = language() === "zh" ? "en" : "zh";
  const onclick = () => {
    chooseLanguage(otherLanguage);
    draw();
  };
  return [
    h("a", { class: "brand", href: hrefOf("/") }, h("b", null, "ckptsync")),
    h("nav", { "aria-label": t("pages") },
      link([], t("overview"), { "aria-current": shown.url === "/" ? "page" : null }),
      link(["nodes"], t("nodes"), { "aria-current": isNodes ? "page" : null })),
    h("span", { class: "store", title: shown.store, dir: "auto" }, shown.store),
    h("span", { id: "connection", "data-same": "connection" }),
    h("button", { type: "button", class: "language", lang: otherLanguage === "zh" ? "zh-CN" : "en", "aria-label": t("other-label"), onclick }, t("other")),
  ];
}

/**
 * Return what is shown where there is no document: the error and its hint.
 * @param {LoadError} error @returns {HTMLElement}
 */
function problem(error) {
  const text = error.isAway ? t("never-connected") : error.message;
  const hint = error.isAway ? t("retrying") : error.hint;
  return h("div", { class: "empty problem", role: "alert", "data-key": "problem" },
    h("h1", null, t("error-title")), h("p", null, text),
    hint ? h("p", { class: "todo" }, error.isAway ? "" : h("b", null, `${t("hint")} `), ...withCommands(hint)) : null);
}

/** Show in the header whether the page is live, a file, or without a connection. */
function drawConnection() {
  const element = document.getElementById("connection");
  if (!element) return; // nothing is drawn yet
  const isAway = Boolean(shown.error?.isAway);
  let text = t("live");
  if (isFile) text = t("file-of", showTime(now()));
  else if (isAway) text = shown.answered ? t("lost-connection", showDuration((Date.now() - shown.answered) / 1000)) : t("never-connected");
  element.className = isFile ? "file" : isAway ? "away" : "live";
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Follow a link inside of the page without loading it anew.
 * @param {MouseEvent} event
 */
function navigate(event) {
  const anchor = event.target instanceof Element ? event.target.closest("a") : null;
  if (!anchor || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
  const href = anchor.getAttribute("href") ?? "";
  if (href === "#main") {
    event.preventDefault();
    byId("main").focus();
  } else if (!isFile && href.startsWith("/") && !href.startsWith("/static/")) {
    event.preventDefault();
    if (href !== currentUrl()) window.history.pushState(null, "", href);
    arrive();
  }
}

/** Show the page of the current URL from its top, and put the focus there. */
async function arrive() {
  shown.document = null;
  shown.error = null;
  isWhole = false;
  await refresh();
  window.scrollTo(0, 0);
  byId("main").focus({ preventScroll: true });
}

/** Renew the ages of a visible page, and fetch again if the server did not answer. */
function tick() {
  if (document.hidden) return;
  if (!isFile) renewAges();
  if (shown.error?.isAway) refresh();
}

let resize = 0;
document.addEventListener("click", navigate);
window.addEventListener("popstate", () => isFile || arrive());
window.addEventListener("hashchange", () => isFile && arrive());
window.addEventListener("resize", () => {
  window.cancelAnimationFrame(resize);
  resize = window.requestAnimationFrame(draw);
});
window.setInterval(() => document.hidden || drawConnection(), 1000);
window.setInterval(tick, 5000);
refresh();
follow(refresh);
