// URLs of the pages, and links between them; in a page that is a file the URL follows a #.

import { h } from "./dom.js";
import { isFile } from "./source.js";

/**
 * Return the URL of a page: RUN is one segment, LOCATION may contain slashes.
 * @param {string[]} path @returns {string}
 */
export function urlOf(path) {
  return `/${path.filter(Boolean).map((part) => part.split("/").map(encodeURIComponent).join("/")).join("/")}`;
}

/**
 * Return the href of a link to a URL.
 * @param {string} url @returns {string}
 */
export function hrefOf(url) {
  return isFile ? `#${url}` : url;
}

/** Return the URL that is shown now. */
export function currentUrl() {
  return isFile ? window.location.hash.replace(/^#/, "") || "/" : window.location.pathname;
}

/**
 * Return a link to a page.
 * @param {string[]} path @param {import("./dom.js").Child} text
 * @param {import("./dom.js").Props} [props] @returns {HTMLElement}
 */
export function link(path, text, props) {
  return h("a", { href: hrefOf(urlOf(path)), dir: "auto", ...props }, text);
}
