/** What the two canvases share: their size in the pixels of the screen, the colors of the theme, and the pointer's note. */

/** @returns {{pen: CanvasRenderingContext2D, width: number, height: number}} The emptied canvas, in CSS pixels. */
export function prepare(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  if (canvas.style.height !== `${height}px`) canvas.style.height = `${height}px`;
  const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.textBaseline = "middle";
  return { pen, width, height };
}

let themed = { theme: null, colors: {} };

/** @returns {Record<string, string>} The colors of style.css by their names, in the theme that is shown. */
export function colors() {
  const theme = document.documentElement.dataset.theme;
  if (themed.theme !== theme) {
    const style = getComputedStyle(document.documentElement);
    const names = ["ink", "muted", "line", "panel", "work", "wait", "held", "bad", "focus", "m0", "m1", "m2", "m3", "m4", "m5"];
    themed = { theme, colors: Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()])) };
  }
  return themed.colors;
}

/** @param {string} color "#rrggbb" @returns {number[]} */
export const channels = (color) => [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));

export const SANS = '-apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif';
export const MONO = 'ui-monospace, "JetBrains Mono", Menlo, "DejaVu Sans Mono", monospace';

/** Show a note next to a point of the window; without a text, hide it. */
export function note(text, x = 0, y = 0) {
  const element = document.getElementById("note");
  element.hidden = !text;
  if (!text) return;
  element.textContent = text;
  const { offsetWidth: width, offsetHeight: height } = element;
  element.style.left = `${Math.max(4, Math.min(window.innerWidth - width - 6, x + 14))}px`;
  element.style.top = `${y + height + 20 > window.innerHeight ? Math.max(4, y - height - 12) : y + 16}px`;
}

/** @returns {string} The longest beginning of a text that is not wider than `width`. */
export function fitted(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  const letters = Array.from(text.slice(0, 200));
  let [fits, exceeds] = [0, letters.length + 1];
  while (exceeds - fits > 1) {
    const half = (fits + exceeds) >> 1;
    if (pen.measureText(`${letters.slice(0, half).join("")}…`).width <= width) fits = half;
    else exceeds = half;
  }
  return fits ? `${letters.slice(0, fits).join("")}…` : "";
}

/** Draw, and note how long it took where the browser's tools show it: the last time only, as a page may be open for days. */
export function measured(name, work) {
  const start = performance.now();
  const result = work();
  performance.clearMeasures(name);
  performance.measure(name, { start });
  return result;
}
