// A curve over steps as SVG, with checkpoints marked on it, and the value under the pointer.

import { h, svg } from "./dom.js";
import { showNumber, showStep } from "./format.js";
import { nearest, position, scaleOf, thinned, ticks } from "./scale.js";
import { t } from "./strings.js";

/** @typedef {import("./types.js").Point} Point */
/** @typedef {{step: number, status: import("./types.js").Status}} Mark */
/** @typedef {(point: Point) => [x: number, y: number]} Place  Where a point is drawn. */

const HEIGHT = 190;
const LEFT = 52;
const BOTTOM = 22;
const TOP = 10;
const RIGHT = 10;

/**
 * Return a figure with one curve.
 * @param {string} title @param {Point[]} all by step @param {Mark[]} marks @param {boolean} isLog
 * @param {number} width in pixels @returns {HTMLElement}
 */
export function curve(title, all, marks, isLog, width) {
  const points = all.filter(([, y]) => y !== null && Number.isFinite(y) && !(isLog && y <= 0));
  const scale = scaleOf(points, isLog);
  const [first, last] = [points[0], points[points.length - 1]];
  if (!scale || !first || !last) return h("figure", { "data-key": title }, h("figcaption", null, title), h("p", { class: "quiet" }, "–"));
  const steps = { from: first[0], to: last[0] > first[0] ? last[0] : first[0] + 1, isLog: false };
  const [inner, tall] = [width - LEFT - RIGHT, HEIGHT - TOP - BOTTOM];
  /** @type {Place} */
  const place = ([x, y]) => [LEFT + inner * position(steps, x), TOP + tall * (1 - position(scale, Number(y)))];
  const drawn = thinned(points, Math.max(50, Math.round(inner)));
  const label = t("curve-label", title, String(points.length), showNumber(first[1]), showNumber(least(points)), showNumber(last[1]), String(last[0]));
  const same = [title, label, isLog, Math.round(width), marks.map((m) => `${m.step}${m.status}`).join(" ")].join("|");
  return h(
    "figure",
    { "data-key": title, "data-same": same },
    h("figcaption", null, title, " ", h("b", null, showNumber(last[1])), h("span", { class: "quiet" }, ` ${t("step-n", showStep(last[0]))}`)),
    svg(
      "svg",
      {
        viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", tabindex: 0, "aria-label": label,
        onpointermove: (/** @type {PointerEvent} */ event) => follow(event, drawn, points, place, marks, width),
        onpointerleave: hide,
        onblur: hide,
        onkeydown: (/** @type {KeyboardEvent} */ event) => walk(event, drawn, place, marks, width),
      },
      grid(ticks(scale, 5), ticks(steps, Math.max(3, Math.round(inner / 70))), place, first, steps, width),
      svg("path", { class: "line", d: pathOf(drawn, place) }),
      ...marksOf(marks, points, steps, place),
      svg("g", { class: "hover", visibility: "hidden" }, svg("line", { y1: TOP, y2: HEIGHT - BOTTOM }), svg("circle", { r: 3.5 }), svg("text", { y: TOP + 8 })),
    ),
    h("output", { class: "hidden", "aria-live": "polite" }),
  );
}

/** @param {Point[]} points */
function least(points) {
  return points.reduce((low, [, y]) => (y !== null && y < low ? y : low), Infinity);
}

/**
 * Return the path of a line through the points.
 * @param {Point[]} points @param {Place} place @returns {string}
 */
function pathOf(points, place) {
  return points.map((point, n) => `${n ? "L" : "M"}${place(point).map((v) => v.toFixed(1)).join(" ")}`).join("");
}

/**
 * @param {number[]} values @param {number[]} steps @param {Place} place @param {Point} first
 * @param {{from: number, to: number}} range @param {number} width @returns {SVGElement}
 */
function grid(values, steps, place, first, range, width) {
  const rows = values.map((value) => {
    const y = place([first[0], value])[1];
    return svg("g", null, svg("line", { x1: LEFT, x2: width - RIGHT, y1: y, y2: y }), svg("text", { x: LEFT - 6, y: y + 3.5, "text-anchor": "end" }, showNumber(value)));
  });
  const whole = steps.filter((step) => Number.isInteger(step) && step >= range.from && step <= range.to);
  const columns = whole.map((step) => {
    const x = place([step, first[1]])[0];
    return svg("text", { x, y: HEIGHT - 6, "text-anchor": x > width - 40 ? "end" : "middle" }, showStep(step));
  });
  return svg("g", { class: "grid" }, ...rows, ...columns);
}

/**
 * Return a sign for each checkpoint: a disc if verified, a cross if damaged, otherwise a ring.
 * @param {Mark[]} marks @param {Point[]} points @param {{from: number, to: number}} range
 * @param {Place} place @returns {SVGElement[]}
 */
function marksOf(marks, points, range, place) {
  return marks.filter(({ step }) => step >= range.from && step <= range.to).map(({ step, status }) => {
    const point = points[nearest(points, step)];
    const [x, y] = place([step, point ? point[1] : 0]);
    const isBad = status === "DAMAGED" || status === "CONFLICT";
    const title = svg("title", null, `${t("step-n", showStep(step))}: ${t(status)}`);
    if (isBad) return svg("path", { class: `mark s-${status}`, d: `M${x - 4} ${y - 4}l8 8m0-8l-8 8` }, title);
    return svg("circle", { class: `mark s-${status}`, cx: x, cy: y, r: marks.length > 60 ? 2 : 3.5 }, title);
  });
}

/**
 * Show the value of the point under the pointer.
 * @param {PointerEvent} event @param {Point[]} drawn @param {Point[]} points @param {Place} place
 * @param {Mark[]} marks @param {number} width
 */
function follow(event, drawn, points, place, marks, width) {
  const picture = /** @type {SVGSVGElement} */ (event.currentTarget);
  const box = picture.getBoundingClientRect();
  const x = ((event.clientX - box.left) / box.width) * width;
  const [first, last] = [drawn[0], drawn[drawn.length - 1]];
  if (!first || !last) return;
  const [left, right] = [place(first)[0], place(last)[0]];
  const step = first[0] + ((x - left) / (right - left || 1)) * (last[0] - first[0]);
  const point = points[nearest(points, step)];
  if (point) show(picture, point, place, marks, width);
}

/**
 * Move along the curve with the arrow keys.
 * @param {KeyboardEvent} event @param {Point[]} drawn @param {Place} place @param {Mark[]} marks
 * @param {number} width
 */
function walk(event, drawn, place, marks, width) {
  const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity }[event.key];
  if (by === undefined) return;
  event.preventDefault();
  const picture = /** @type {SVGSVGElement} */ (event.currentTarget);
  const last = picture.getAttribute("data-index");
  const moved = last === null ? drawn.length - 1 : Number(last) + by;
  const index = Math.max(0, Math.min(drawn.length - 1, moved));
  picture.setAttribute("data-index", String(index));
  const point = drawn[index];
  const live = picture.parentElement?.querySelector("output");
  if (point) {
    const text = show(picture, point, place, marks, width);
    if (live) live.textContent = text;
  }
}

/**
 * Show the line and the text of one point; return the text.
 * @param {SVGSVGElement} picture @param {Point} point @param {Place} place @param {Mark[]} marks
 * @param {number} width @returns {string}
 */
function show(picture, point, place, marks, width) {
  const [x, y] = place(point);
  const mark = marks.find(({ step }) => step === point[0]);
  const text = [t("step-n", showStep(point[0])), showNumber(point[1]), mark && t(mark.status)].filter(Boolean).join(" · ");
  const group = picture.querySelector(".hover");
  const [line, dot, words] = [group?.querySelector("line"), group?.querySelector("circle"), group?.querySelector("text")];
  for (const [e, name, value] of /** @type {const} */ ([[line, "x1", x], [line, "x2", x], [dot, "cx", x], [dot, "cy", y]])) {
    e?.setAttribute(name, String(value));
  }
  const isRight = x > width / 2;
  words?.setAttribute("x", String(isRight ? x - 8 : x + 8));
  words?.setAttribute("text-anchor", isRight ? "end" : "start");
  if (words) words.textContent = text;
  group?.setAttribute("visibility", "visible");
  return text;
}

/**
 * Hide the line and the text.
 * @param {Event} event
 */
function hide(event) {
  const picture = /** @type {SVGElement} */ (event.currentTarget);
  picture.querySelector(".hover")?.setAttribute("visibility", "hidden");
}
