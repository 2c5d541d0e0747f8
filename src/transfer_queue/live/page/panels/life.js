/** Where the time of a sample goes, from its first put to the task at the end. */

import { duration, plain } from "../format.js";
import { html, Panel } from "../html.js";

const LETTER = 6; // pixels of a letter, at most on average
const wordsOf = (each) => (each.part === "queue" ? `queues for ${plain(each.task)}` : plain(each.task) || "a client");

export class Life extends Panel {
  render({ life, last, window, width }) {
    const sum = life.reduce((total, each) => total + each.p50, 0);
    if (!sum) return html`<div class="life"><p class="remark">No sample has reached the end in the last ${duration(window)}, so how long a sample takes is not known.</p></div>`;
    const label = (each) => `${wordsOf(each)} ${duration(each.p50)}`;
    const seen = life.filter((each) => each.p50 / sum > 0.1);
    const fits = (each) => seen.includes(each) && label(each).length * LETTER < (each.p50 / sum) * width;
    const below = seen.filter((each) => !fits(each));
    return html`<div class="life">
      <h3>A sample takes ${duration(sum)} from its first put ${last ? `through ${plain(last)}` : "to the end"} <span>median of the last ${duration(window)}; queues are thin</span></h3>
      <ol>${life.map((each, at) => html`<li key=${at} style=${{ flex: `${each.p50 / sum} 1 0` }} title=${label(each)}>
        <i class=${each.part === "queue" ? "wait" : "work"}></i>
        ${fits(each)
          ? html`<span>${wordsOf(each)} <b>${duration(each.p50)}</b></span>`
          : html`<span class="hidden">${label(each)}</span>`}
      </li>`)}</ol>
      ${below.length > 0 && html`<p class="remark" aria-hidden="true">${below.map(label).join(", ")}</p>`}
    </div>`;
  }
}
