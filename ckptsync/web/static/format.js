// Numbers, sizes, times and names as people read them.

import { t, language } from "./strings.js";

/**
 * Return a number of bytes with its unit, in three digits.
 * @param {number} bytes @returns {string}
 */
export function showSize(bytes) {
  const units = ["B", "KB", "MB", "GB", "TB", "PB"];
  let [value, unit] = [bytes, 0];
  for (; value >= 999.5 && unit < units.length - 1; unit += 1) value /= 1000;
  const digits = unit === 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return `${value.toFixed(digits)} ${units[unit]}`;
}

/**
 * Return a duration in one unit: seconds, minutes, hours or days.
 * @param {number} seconds @returns {string}
 */
export function showDuration(seconds) {
  const s = Math.max(0, seconds);
  if (s < 0.95) return t("seconds", s.toFixed(1));
  if (s < 90) return t("seconds", String(Math.round(s)));
  if (s < 90 * 60) return t("minutes", String(Math.round(s / 60)));
  if (s < 36 * 3600) return t("hours", String(Math.round(s / 3600)));
  return t("days", String(Math.round(s / 86400)));
}

/**
 * Return a time as date and time of the viewer's zone and language.
 * @param {number} seconds since 1970 @returns {string}
 */
export function showTime(seconds) {
  const format = { dateStyle: "medium", timeStyle: "medium" };
  return new Date(seconds * 1000).toLocaleString(language(), /** @type {any} */ (format));
}

/**
 * Return a number in about four digits; a dash for none, NaN and infinity.
 * @param {number|null|undefined} value @returns {string}
 */
export function showNumber(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e");
  if (Number.isInteger(value)) return String(value);
  return value.toPrecision(4).replace(/\.?0+$/, "");
}

/**
 * Return a step with thin spaces between thousands.
 * @param {number} step @returns {string}
 */
export function showStep(step) {
  return step.toLocaleString("en").replaceAll(",", "\u2009");
}

/**
 * Return whole percents, never 100 before the end.
 * @param {number} done @param {number} total @returns {number}
 */
export function percent(done, total) {
  if (total <= 0) return 0;
  return done >= total ? 100 : Math.min(99, Math.floor((100 * done) / total));
}
