/** The verdict in words, and the four most important numbers. */

import { Bar, Name, Sparkline, Words } from "../elements.js";
import { clock, count, counted, duration, plain, rate, share } from "../format.js";
import { html, Panel } from "../html.js";

const PILLS = { starting: "Starting", flowing: "Flowing", slow: "Flowing, slowly", stopped: "Not flowing", idle: "Idle" };

/** @returns {string} The state and the stage: what a screen reader says when one of them changes. */
export const announcementOf = (verdict) => {
  const stage = verdict.stage ? `, ${verdict.stage} is the slowest stage` : "";
  return `${PILLS[verdict.state] ?? verdict.state}${stage}.`;
};

/** @returns {string} The title of the tab. */
export const titleOf = (verdict, system, state) => {
  const stage = verdict.state === "slow" && verdict.stage ? `: ${verdict.stage} is the slowest stage` : "";
  return `${state === "snapshot" ? "Snapshot: " : ""}${PILLS[verdict.state] ?? verdict.state}${stage} · ${system.name} · transfer_queue`;
};

/** The detail without the cause, which has a separate line. */
function withoutCause({ detail, cause }) {
  const bare = cause.replace(/\.$/, "");
  if (!bare) return detail;
  for (const end of [`; ${bare}.`, `; ${bare}`, `${bare}.`, bare]) {
    if (detail.endsWith(end)) return end === detail ? "" : `${detail.slice(0, -end.length).replace(/[;:\s]+$/, "")}.`;
  }
  return detail;
}

/** Names keep their case. */
const capital = (text, names) => (text && !names.some((name) => name && text.startsWith(name)) ? text[0].toUpperCase() + text.slice(1) : text);
const sentence = (text) => (text && !text.endsWith(".") ? `${text}.` : text);

/** The processes that a sentence names, in parentheses: a headline has no space for them. */
const PROCESSES = / \(((?:rank \d|pid \d|client )[^)]*)\)/;

function Todo({ verdict, names }) {
  const { since, headline, advice, state } = verdict;
  const cause = headline.endsWith(verdict.cause) ? "" : verdict.cause;
  const processes = PROCESSES.exec(headline)?.[1];
  if (!cause && !advice && !processes) return null;
  const when = since === null || state === "flowing" ? "" : `Since ${clock(since)}: `;
  return html`<p class="todo">${processes && html`Gone: ${plain(processes)}. `}
    ${cause && html`${when && html`<b>${when}</b>`}<${Words} text=${sentence(when ? cause : capital(cause, names))} names=${names} /> `}
    ${advice && html`${!/^to keep up/i.test(advice) && html`<b>To keep up: </b>`}<${Words} text=${sentence(/^to keep up/i.test(advice) ? capital(advice, names) : advice)} names=${names} />`}
  </p>`;
}

function Reached({ verdict, rates }) {
  const now = rates.length ? rates[rates.length - 1].rows : 0;
  const before = rateBefore(verdict, rates);
  return html`<div class="figure">
    <div class="number">${rate(now)} <small>/s</small></div>
    <div class="label">samples reach ${verdict.last ? html`<${Name} of=${verdict.last} />` : "the last task"}${before}</div>
    <${Sparkline} values=${rates.map((each) => each.rows)} kind="rate" />
  </div>`;
}

/** The mean rate before the change that the verdict names. */
function rateBefore({ since, state }, rates) {
  const earlier = since === null || state === "flowing" ? [] : rates.filter((each) => each.t < since - 2);
  if (earlier.length < 10) return "";
  return ` (${rate(earlier.reduce((sum, each) => sum + each.rows, 0) / earlier.length)} before)`;
}

function Queued({ verdict, rates, queues }) {
  const task = verdict.stage || verdict.last;
  const rows = queues.find((each) => each.task === task)?.rows ?? verdict.queue_rows;
  return html`<div class="figure">
    <div class="number">${count(rows)}</div>
    <div class="label">${Math.round(rows) === 1 ? "queues" : "queue"} before ${task ? html`<${Name} of=${task} />` : "the last task"}</div>
    <${Sparkline} values=${rates.map((each) => each.queue)} kind="queue" />
  </div>`;
}

function Step({ step, verdict }) {
  if (!step) {
    return html`<div class="figure"><div class="number">–</div>
      <div class="label">${verdict.last ? html`<${Name} of=${verdict.last} />` : "The last task"} claims no partition</div></div>`;
  }
  if (!step.sealed) { // more may be put, so that neither a share nor an end is known
    return html`<div class="figure"><div class="number">${count(step.dealt)}</div>
      <div class="label">dealt of ${count(step.rows)} in <${Name} of=${step.partition} /> so far; not sealed</div></div>`;
  }
  const part = step.rows ? step.dealt / step.rows : 0;
  const end = step.dealt >= step.rows ? "; all of it" : step.eta === null ? "" : html`; ends in <b>${duration(step.eta)}</b>`;
  return html`<div class="figure">
    <div class="number">${share(part)}</div>
    <div class="label">of <${Name} of=${step.partition} /> dealt${end}</div>
    <${Bar} parts=${[["m3", part]]} label=${`${count(step.dealt)} of ${counted(step.rows, "sample")} dealt`} />
  </div>`;
}

function Health({ servers, tasks, memory }) {
  const gone = tasks.reduce((sum, each) => sum + each.gone, 0);
  const well = servers.answered === servers.count;
  return html`<div class="figure">
    <div class=${`number ${well ? "good" : "bad"}`}>${well ? "" : "✕ "}${count(servers.answered)} of ${count(servers.count)}</div>
    <div class="label">servers reply; ${gone ? html`<b class="bad">✕ ${counted(gone, "rank")} gone</b>` : "all ranks are connected"}</div>
    <div class="label">${memory.lost ? html`<b class="bad">✕ ${counted(memory.lost, "value")} lost</b>` : "0 values lost"}</div>
  </div>`;
}

export class Verdict extends Panel {
  render({ verdict, rates, step, tasks, servers, memory, queues }) {
    const detail = withoutCause(verdict);
    const names = tasks.map((task) => task.name);
    const pill = PILLS[verdict.state] ?? verdict.state;
    const headline = verdict.headline.replace(PROCESSES, "").replace(/^(Stopped|Starting|Idle|Flowing)(: |[:.]?$)/, "") || "";
    return html`<section id="verdict" class=${`panel verdict ${verdict.state}`} aria-label="Verdict">
      <div>
        <h1><span class="pill">${pill}</span>${" "}<${Words} text=${capital(headline, names)} names=${names} /></h1>
        ${detail && html`<p><${Words} text=${capital(detail, names)} names=${names} /></p>`}
        <${Todo} verdict=${verdict} names=${names} />
      </div>
      <div class="figures">
        <${Reached} verdict=${verdict} rates=${rates} />
        <${Queued} verdict=${verdict} rates=${rates} queues=${queues} />
        <${Step} step=${step} verdict=${verdict} />
        <${Health} servers=${servers} tasks=${tasks} memory=${memory} />
      </div>
    </section>`;
  }
}
