// Axes of curves, and fewer points of a long one. Pure.

/** @typedef {import("./types.js").Point} Point */
/** @typedef {{from: number, to: number, isLog: boolean}} Scale */

/**
 * Return where a value lies between the ends of a scale, as 0 to 1.
 * @param {Scale} scale @param {number} value @returns {number}
 */
export function position({ from, to, isLog }, value) {
  if (isLog) return (Math.log(value) - Math.log(from)) / (Math.log(to) - Math.log(from));
  return (value - from) / (to - from);
}

/**
 * Return a scale that holds all values, with some room. Values ≤ 0 have no place on a log scale.
 * @param {Point[]} points @param {boolean} isLog @returns {Scale|null}
 */
export function scaleOf(points, isLog) {
  let [low, high] = [Infinity, -Infinity];
  for (const [, y] of points) {
    if (y === null || !Number.isFinite(y) || (isLog && y <= 0)) continue;
    if (y < low) low = y;
    if (y > high) high = y;
  }
  if (low > high) return null;
  if (isLog) {
    return low === high ? { from: low / 2, to: high * 2, isLog } : { from: low * 0.95, to: high * 1.05, isLog };
  }
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return { from: low >= 0 ? Math.max(0, low - room) : low - room, to: high + room, isLog };
}

/**
 * Return round values on a scale: about `count` of them.
 * @param {Scale} scale @param {number} count @returns {number[]}
 */
export function ticks({ from, to, isLog }, count) {
  if (isLog) {
    const powers = [];
    const whole = Math.log10(to / from) > 2.5 ? [1] : [1, 2, 5];
    for (let e = Math.floor(Math.log10(from)); e <= Math.log10(to); e += 1) {
      powers.push(...whole.map((m) => m * 10 ** e).filter((v) => v >= from && v <= to));
    }
    if (powers.length >= 2) {
      const every = Math.ceil(powers.length / (count + 2));
      return powers.filter((_, n) => n % every === 0);
    }
  }
  const raw = (to - from) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const size = ([1, 2, 5, 10].find((m) => m * power >= raw) ?? 10) * power;
  const values = [];
  for (let n = Math.ceil(from / size); n * size <= to + size * 1e-9; n += 1) values.push(n * size);
  return values.map((v) => Number(v.toPrecision(12)));
}

/**
 * Return at most two points for each of `columns` of the steps: its least and its greatest.
 *
 * A gap (null) stays one where its whole column has no value.
 * @param {Point[]} points by step @param {number} columns @returns {Point[]}
 */
export function thinned(points, columns) {
  const [first, last] = [points[0], points[points.length - 1]];
  if (!first || !last || points.length <= 2 * columns) return points;
  const width = (last[0] - first[0]) / columns || 1;
  /** @type {Point[]} */
  const result = [];
  /** @type {Point|null} */
  let low = null;
  /** @type {Point|null} */
  let high = null;
  let column = 0;
  const end = () => {
    if (low && high) result.push(...(low === high ? [low] : low[0] < high[0] ? [low, high] : [high, low]));
    low = high = null;
  };
  for (const point of points) {
    const index = Math.min(columns - 1, Math.floor((point[0] - first[0]) / width));
    if (index !== column) end();
    column = index;
    if (point[1] === null) continue;
    if (low === null || point[1] < Number(/** @type {Point} */ (low)[1])) low = point;
    if (high === null || point[1] > Number(/** @type {Point} */ (high)[1])) high = point;
  }
  end();
  return result;
}

/**
 * Return the index of the point whose step is nearest; -1 without points.
 * @param {Point[]} points by step @param {number} step @returns {number}
 */
export function nearest(points, step) {
  let [low, high] = [0, points.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((points[middle]?.[0] ?? 0) < step) low = middle + 1;
    else high = middle;
  }
  const [before, after] = [points[low - 1], points[low]];
  if (before && after && step - before[0] < after[0] - step) return low - 1;
  return after ? low : -1;
}
