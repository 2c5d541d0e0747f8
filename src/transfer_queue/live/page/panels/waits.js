/** Who waits, and for what: the wait that costs most is first. */

import { Name, SampleLink, Words } from "../elements.js";
import { clock, count, counted, duration, listed, plain, share } from "../format.js";
import { html, Panel } from "../html.js";

const RANK = /^rank (\d+)(?=,|$)/;

/** "ranks 1 and 3"; of one rank, and of ranks without a number, their processes, too. */
function ranksOf(wait) {
  const labels = wait.ranks.map(plain);
  if (!labels.length) return counted(wait.count, "rank");
  const numbers = labels.map((label) => RANK.exec(label)?.[1]);
  const short = labels.length > 1 && numbers.every(Boolean);
  const [word, names] = short ? ["ranks ", numbers] : ["", labels];
  const hidden = wait.count - names.length;
  return word + (hidden > 0 ? `${names.slice(0, 3).join(", ")} and ${count(wait.count - 3)} more` : listed(names, 4));
}

function tagOf(wait) {
  if (wait.kind === "gone") return `✕ ${ranksOf(wait)} ${wait.count === 1 ? "is" : "are"} gone`;
  const which = wait.of > 1 ? `${count(wait.count)} of ${counted(wait.of, "rank")}` : ranksOf(wait);
  const verb = wait.kind === "held" ? "held back" : wait.count === 1 ? "waits" : "wait";
  return `${which} ${wait.kind === "held" ? (wait.count === 1 ? "is " : "are ") : ""}${verb} now`;
}

function Long({ wait, now, window }) {
  const open = now - wait.since;
  if (wait.kind === "gone" || open > window) {
    return html`<div class="long">${duration(open)} <small>since ${clock(wait.since)}</small></div>`;
  }
  return html`<div class="long">${share(wait.share)} <small>of the last ${duration(window)}</small></div>`;
}

function Asked({ wait }) {
  if (wait.kind === "gone") return null;
  const rows = wait.rows ? ` of ${counted(wait.rows, "sample")}` : "";
  const partition = wait.partition ? html` in partition <${Name} of=${wait.partition} />` : "";
  if (wait.kind === "held") return html`Puts${rows}${partition} are held back. `;
  const fields = wait.fields.length ? ` with ${counted(wait.fields.length, "field")}` : "";
  const missing = wait.field ? html` wait for <${Name} of=${wait.field} />${wait.producer ? html`, which <${Name} of=${wait.producer} /> puts` : ", which no task puts"}` : " wait";
  return html`Claims${rows}${fields}${partition}${missing}. `;
}

// The panel already shows this part in its own words.
const CLAIM = /^Task '.*?' waits for [\d,]+ samples .*?; [\d,]+ available\. ?/s;

/** The reason, in words of the controller: its first sentence, and on request the others and the ranks. */
function Reason({ wait, link }) {
  const [first, ...others] = wait.words.replace(CLAIM, "").split(/(?<=\.) (?=[A-Z])/);
  const ranks = wait.kind === "gone" || wait.of < 2 ? "" : wait.ranks.map(plain).join("; ") + (wait.count > wait.ranks.length ? "; …" : "");
  const more = others.length > 0 || ranks;
  return html`${first && html`<b><${Words} text=${first} /></b> `}${link} ${more && html`<details><summary>More</summary><${Words} text=${others.join(" ")} />${ranks && ` The ranks: ${ranks}.`}</details>`}`;
}

function Wait({ wait, now, window, hot }) {
  const sample = wait.sample === null ? null : { partition: wait.partition, index: wait.sample };
  return html`<li>
    <div><span class="who"><${Name} of=${wait.task || "a client without a task"} /></span>${" "}
      <span class=${hot ? "tag hot" : "tag"}>${tagOf(wait)}</span></div>
    <${Long} wait=${wait} now=${now} window=${window} />
    <div class="reason"><${Asked} wait=${wait} /><${Reason} wait=${wait} link=${sample && html`<${SampleLink} sample=${sample}>Open sample ${count(wait.sample)}<//>`} /></div>
  </li>`;
}

export class Waits extends Panel {
  render({ waits, verdict, memory, now, window }) {
    const slow = verdict.state === "slow" || verdict.state === "stopped";
    const puts = memory.waiting_puts;
    return html`<section class="panel waits" aria-label="Who waits">
      <h2>Who waits, and for what <small>the wait that costs most is first</small></h2>
      <ol>${waits.map((wait, at) => html`<${Wait} key=${`${wait.task} ${wait.kind} ${wait.partition}`} wait=${wait} now=${now}
        window=${window} hot=${wait.kind === "gone" || (slow && at === 0)} />`)}</ol>
      ${!waits.length && html`<p class="nothing">No task waits.</p>`}
      <p class="end">${puts ? html`<b>${counted(puts, "put")}</b> ${puts === 1 ? "waits" : "wait"} for space or for the policy version.` : "No put waits for space or for the policy version."}</p>
    </section>`;
  }
}
