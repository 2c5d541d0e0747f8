/** Numbers, times and names as a person reads them. Every function returns plain text. */

const integer = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** @param {number} value @returns {string} A whole number with commas: "1,048". */
export const count = (value) => integer.format(value ?? 0);

/** @returns {string} "1 sample", "2,048 samples". */
export const counted = (value, one, many = `${one}s`) => `${count(value)} ${Math.round(value) === 1 ? one : many}`;

/** @returns {string} A rate: one decimal below 100, none above. */
export function rate(value) {
  const size = Math.abs(value ?? 0);
  if (size >= 100) return count(value);
  if (size >= 0.1 || size === 0) return (value ?? 0).toFixed(1);
  return size < 0.001 ? "<0.001" : value.toPrecision(1);
}

/** @returns {string} A share from 0 to 1: "63 %"; what is not 0 and less than a half percent: "<1 %". */
export function share(value) {
  const percent = 100 * (value ?? 0);
  if (percent > 0 && percent < 0.5) return "<1 %";
  return `${Math.round(percent)} %`;
}

/** @param {number | null} seconds @returns {string} "0.4 s", "24 s", "3 min 14 s", "6 h 12 min", "2 d 3 h". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "?";
  const value = Math.max(0, seconds);
  if (value < 0.0995) return `${value ? Math.max(1, Math.round(1000 * value)) : 0} ms`;
  if (value < 9.95) return `${value.toFixed(1)} s`;
  if (value < 99.5) return `${Math.round(value)} s`;
  const rounded = Math.round(value);
  if (rounded < 3600) return `${Math.floor(rounded / 60)} min ${rounded % 60} s`;
  if (rounded < 172800) return `${Math.floor(rounded / 3600)} h ${Math.floor((rounded % 3600) / 60)} min`;
  return `${Math.floor(rounded / 86400)} d ${Math.floor((rounded % 86400) / 3600)} h`;
}

const two = (number) => String(number).padStart(2, "0");

/** @param {number} time Unix seconds. @returns {string} The time of day where the reader is: "03:11:26". */
export function clock(time) {
  const date = new Date(1000 * time);
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/** @returns {string} "2026-01-31 at 03:11:26" */
export function dayAndClock(time) {
  const date = new Date(1000 * time);
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} at ${clock(time)}`;
}

/** @returns {string} "03:11" */
export const hourAndMinute = (time) => clock(time).slice(0, 5);

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

function unitOf(value) {
  let unit = 0;
  while (unit < UNITS.length - 1 && value >= 1000 * 1024 ** unit) unit += 1;
  return unit;
}

const scaled = (value, unit) => {
  const number = value / 1024 ** unit;
  return unit === 0 || number >= 99.5 || Number.isInteger(number) ? count(number) : number.toFixed(number < 9.995 ? 2 : 1);
};

/** @returns {string} "1.68 GiB" */
export const bytes = (value) => `${scaled(value, unitOf(value))} ${UNITS[unitOf(value)]}`;

/** @returns {string} "0.45 of 1 GiB" */
export function bytesOf(value, capacity) {
  const unit = unitOf(capacity);
  if (value && value / 1024 ** unit < 0.01) return `${bytes(value)} of ${bytes(capacity)}`;
  return `${value ? scaled(value, unit) : 0} of ${scaled(capacity, unit)} ${UNITS[unit]}`;
}

// Characters that are invisible, or that change the direction of the text after them.
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

function visible(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  return code === 0x7f ? "\u2421" : `\\u${code.toString(16).padStart(4, "0")}`;
}

/** @returns {string} A name or a value with its control characters shown as signs, so that it cannot disturb the page. */
export const plain = (text) => String(text ?? "").replace(HIDDEN, visible);

/** @returns {string} The same of a text of several lines: line ends and tabs stay. */
export const plainLines = (text) => String(text ?? "").replace(HIDDEN, (each) => ("\n\t".includes(each) ? each : visible(each)));

/** @returns {string} At most `length` characters of a name, the middle left out. */
export function shortened(text, length) {
  const letters = Array.from(plain(text));
  if (letters.length <= length) return letters.join("");
  const tail = Math.floor((length - 1) / 3);
  return `${letters.slice(0, length - 1 - tail).join("")}…${letters.slice(letters.length - tail).join("")}`;
}

/** @returns {string} "a", "a and b", "a, b and 3 more". */
export function listed(names, most = 3) {
  const shown = names.slice(0, most);
  if (names.length > most) return `${shown.join(", ")} and ${count(names.length - most)} more`;
  return shown.length < 2 ? shown.join("") : `${shown.slice(0, -1).join(", ")} and ${shown[shown.length - 1]}`;
}
