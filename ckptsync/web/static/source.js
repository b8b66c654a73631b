// Where the page's documents come from: the server, or the page itself if it was saved as a file.

const element = document.getElementById("data");
/** @type {Record<string, unknown>|null} */
const embedded = element ? JSON.parse(element.textContent ?? "{}") : null;
const LIMIT_MS = 30_000;

/** True where the page is one file, without a server. */
export const isFile = embedded !== null;

/** An answer of the server that is an error, or no answer (`isAway`). */
export class LoadError extends Error {
  /** @param {string} text @param {string} hint @param {boolean} isAway */
  constructor(text, hint, isAway) {
    super(text);
    this.hint = hint;
    this.isAway = isAway;
  }
}

/**
 * Return the document of a URL, fetched or embedded. Throws LoadError: an error, or no answer.
 * @param {string} url @returns {Promise<any>}
 */
export async function load(url) {
  if (embedded) {
    if (url in embedded) return embedded[url];
    const overview = /** @type {any} */ (embedded["/"]);
    if (url === "/nodes" && overview) {
      return { at: overview.at, nodes: overview.nodes, running: overview.running };
    }
    throw new LoadError("not in this file", `ckptsync web --store ${overview?.store ?? "URL"}`, false);
  }
  let answer;
  try {
    const controller = new AbortController();
    window.setTimeout(() => controller.abort(), LIMIT_MS);
    answer = await fetch(url, { headers: { Accept: "application/json" }, signal: controller.signal });
  } catch {
    throw new LoadError("", "", true);
  }
  const text = await answer.text();
  /** @type {any} */
  let document_ = {};
  try {
    document_ = JSON.parse(text);
  } catch {
    const isAway = answer.status >= 502 && answer.status <= 504;
    throw new LoadError(text.trim().slice(0, 500) || `HTTP ${answer.status}`, "", isAway);
  }
  if (!answer.ok) throw new LoadError(String(document_.error), document_.hint ?? "", false);
  return document_;
}

/**
 * Call `refresh` when the store has changed, only while the page is visible.
 *
 * By one event stream; every five seconds while there is none.
 * @param {() => void} refresh
 */
export function follow(refresh) {
  if (embedded) return;
  /** @type {EventSource|null} */
  let stream = null;
  let polls = 0;
  const poll = () => {
    polls ||= window.setInterval(refresh, 5000);
  };
  const stopPolling = () => {
    window.clearInterval(polls);
    polls = 0;
  };
  const begin = () => {
    if (document.hidden) return;
    poll();
    stream = new EventSource("/events");
    stream.onopen = stopPolling;
    stream.onerror = poll;
    stream.addEventListener("change", refresh);
  };
  const end = () => {
    stream?.close();
    stream = null;
    stopPolling();
  };
  document.addEventListener("visibilitychange", () => {
    end();
    if (document.hidden) return;
    refresh();
    begin();
  });
  window.addEventListener("pagehide", end);
  begin();
}
