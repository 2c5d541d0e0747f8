/** Where the time of a sample goes, from its first put to the task at the end. */

import { duration, plain } from "../format.js";
import { html, Panel } from "../html.js";

const wordsOf = (each) => (each.part === "queue" ? `queues for ${plain(each.task)}` : plain(each.task) || "a client");

export class Life extends Panel {
  render({ life, last, window }) {
    const sum = life.reduce((total, each) => total + each.p50, 0);
    if (!sum) return html`<div class="life"><p class="remark">No sample has reached the end in the last ${duration(window)}, so how long a sample takes is not known.</p></div>`;
    return html`<div class="life">
      <h3>A sample takes ${duration(sum)} from its first put ${last ? `through ${plain(last)}` : "to the end"} <span>median of the last ${duration(window)}; queues are thin</span></h3>
      <ol>${life.map((each, at) => html`<li key=${at} style=${{ flex: `${each.p50 / sum} 1 0` }} title=${`${wordsOf(each)} ${duration(each.p50)}`}>
        <i class=${each.part === "queue" ? "wait" : "work"}></i>
        ${each.p50 / sum > 0.1
          ? html`<span>${wordsOf(each)} <b>${duration(each.p50)}</b></span>`
          : html`<span class="hidden">${wordsOf(each)} ${duration(each.p50)}</span>`}
      </li>`)}</ol>
    </div>`;
  }
}
