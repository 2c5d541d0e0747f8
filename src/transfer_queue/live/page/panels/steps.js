/** How long the last steps of the training took, and the current one so far. */

import { Name } from "../elements.js";
import { duration, plain } from "../format.js";
import { html, Panel } from "../html.js";

const middleOf = (values) => [...values].sort((a, b) => a - b)[values.length >> 1];

function Bar({ name, seconds, most, current }) {
  const words = `${plain(name)}: ${duration(seconds)}`;
  return html`<li title=${words}><span class="hidden">${words}</span><i class=${current ? "now" : ""} style=${{ height: `${(100 * seconds) / most}%` }}></i></li>`;
}

export class Steps extends Panel {
  render({ steps: { by, task, steps, since }, now }) {
    const current = since === null ? null : Math.max(0, now - since);
    const most = Math.max(...steps.map((each) => each.seconds), current ?? 0, 1e-9);
    const [last, longest] = [steps[steps.length - 1], steps.find((each) => each.seconds === Math.max(...steps.map((step) => step.seconds)))];
    const what = by === "version" ? "from one policy version to the next" : html`from the first claim of one partition${task && html` by <${Name} of=${task} />`} to that of the next`;
    return html`<section class="panel steps" aria-label="Step time">
      <h2>Step time <small>${what}</small></h2>
      ${!last && html`<p class="nothing">No complete step has been seen yet.${current !== null && html` The current one has taken ${duration(current)} so far.`}</p>`}
      ${last && html`<ol class="columns">${steps.map((each) => html`<${Bar} key=${each.name} name=${each.name} seconds=${each.seconds} most=${most} />`)}
          ${current !== null && html`<${Bar} key="current" name="current step so far" seconds=${current} most=${most} current=${true} />`}</ol>
        <p class="ends" aria-hidden="true"><${Name} of=${steps[0].name} /> to <${Name} of=${last.name} />${current !== null && ", and the current step"}</p>
        <p class="remark">Last <b>${duration(last.seconds)}</b>, median <b>${duration(middleOf(steps.map((each) => each.seconds)))}</b>, longest <b>${duration(longest.seconds)}</b> (<${Name} of=${longest.name} />).
          ${current !== null && html` The current step has taken <b>${duration(current)}</b> so far.`}</p>`}
    </section>`;
  }
}
