/** Small elements that several panels use: names, keys of colors, bars, lines, links to samples. */

import { count, counted, plain, share } from "./format.js";
import { html } from "./html.js";

/** A name of the user's (a task, a field, a partition, a key): always text, in a direction of its own. */
export function Name({ of, className = "" }) {
  const text = plain(of);
  return html`<code class=${`name ${className}`} title=${text.length > 24 ? text : undefined}><bdi>${text}</bdi></code>`;
}

/** A sentence of the server. Text between backticks, and each of `names` as a complete word, is shown as a name. */
export function Words({ text, names = [] }) {
  const parts = plain(text).split("`");
  return parts.map((part, at) => (at % 2 ? html`<${Name} of=${part} />` : withNames(part, names)));
}

function withNames(text, names) {
  const escaped = names.filter((name) => name.length > 1).map((name) => plain(name).replace(/[.*+?^${}()|[\]\\/-]/g, "\\$&"));
  if (!escaped.length) return text;
  const pattern = new RegExp(`(?<![\\p{L}\\p{N}_'])(${escaped.sort((a, b) => b.length - a.length).join("|")})(?![\\p{L}\\p{N}_'])`, "u");
  return text.split(pattern).map((part, at) => (at % 2 ? html`<${Name} of=${part} />` : part));
}

/** The meaning of the colors of a panel. `items`: pairs of a class of a swatch and its word. */
export function Key({ items }) {
  return html`<span class="key">
    ${items.map(([kind, word]) => html`<span key=${kind}><i class=${`swatch ${kind}`}></i>${word}</span>`)}
  </span>`;
}

export const STATES_KEY = [["work", "works"], ["wait thin", "waits for samples"], ["held thin", "held back"]];

/** A bar of several parts, next to each other. `parts`: pairs of a class and a share from 0 to 1. */
export function Bar({ parts, className = "", label }) {
  return html`<div class=${`bar ${className}`} role="img" aria-label=${label}>
    ${parts.map(([kind, part]) => part > 0 && html`<i key=${kind} class=${kind} style=${{ width: `${100 * Math.min(1, part)}%` }}></i>`)}
  </div>`;
}

/** A line of values over time, without axes: the numbers are next to it. */
export function Sparkline({ values, kind }) {
  const most = Math.max(...values, 1e-9);
  const points = values.map((value, at) => {
    const x = values.length < 2 ? 0 : (120 * at) / (values.length - 1);
    return `${x.toFixed(1)},${(19 - (17 * value) / most).toFixed(1)}`;
  });
  return html`<svg class=${`spark ${kind}`} viewBox="0 0 120 20" preserveAspectRatio="none" aria-hidden="true">
    <polyline points=${points.join(" ")} vector-effect="non-scaling-stroke" />
  </svg>`;
}

/** A link that opens the inspector of a sample. `sample`: {partition, index}. */
export function SampleLink({ sample, children }) {
  return html`<button type="button" class="link" data-partition=${sample.partition} data-index=${sample.index}>
    ${children ?? `sample ${count(sample.index)}`}
  </button>`;
}

/** How the time of a task is spent, in words: "waits 63 %, held 2 %". */
export function timeWords(task) {
  if (!task.alive && task.ranks) return "no rank is left";
  const words = [];
  if (task.waits > 0.005) words.push(`waits ${share(task.waits)}`);
  if (task.held > 0.005) words.push(`held ${share(task.held)}`);
  return words.join(", ") || "never waits";
}

export const ranksWords = (task) => (task.alive < task.ranks ? `${count(task.alive)} of ${count(task.ranks)}` : counted(task.ranks, "rank"));
