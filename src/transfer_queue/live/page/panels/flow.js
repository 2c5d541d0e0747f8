/** The flow graph: which task puts which field, which tasks take it, and what queues between them. */

import { Key, STATES_KEY, ranksWords, timeWords } from "../elements.js";
import { count, counted, duration, plain, rate, share, shortened } from "../format.js";
import { html, Panel } from "../html.js";
import { layOut } from "./flow_layout.js";
import { Life } from "./life.js";

const nameOf = (task) => plain(task.name) || "no task";

/** How its ranks are now: a full square works, an empty one waits, a cross is gone. */
function Ranks({ task, x, y, width }) {
  const letters = Array.from(task.rank_state);
  const step = Math.min(13, width / letters.length);
  if (!letters.length || step < 6.5) {
    const words = Object.entries(task.states).filter(([, ranks]) => ranks).map(([state, ranks]) => `${count(ranks)} ${state === "waits" && ranks > 1 ? "wait" : state === "works" && ranks > 1 ? "work" : state}`);
    return html`<text x=${x} y=${y + 9} class="muted">${shortened(words.join(", "), Math.floor(width / 5.6))}</text>`;
  }
  const size = Math.min(10, step - 2);
  return letters.map((letter, at) => {
    const left = x + at * step;
    if (letter === "x") return html`<path key=${at} class="rank x" d=${`M${left + 1} ${y + 1}l${size - 2} ${size - 2}m0 -${size - 2}l-${size - 2} ${size - 2}`} />`;
    const inset = letter === "W" ? 0 : 0.9;
    return html`<rect key=${at} class=${`rank ${letter}`} x=${left + inset} y=${y + inset} width=${size - 2 * inset} height=${size - 2 * inset} rx="2" />`;
  });
}

function Time({ task, x, y, width }) {
  let left = x;
  return [["works", task.works, 10], ["waits", task.waits, 6], ["helds", task.held, 6], ["rest", task.alive ? task.idle : 0, 2]].map(([kind, part, thick]) => {
    const wide = width * Math.min(1, part);
    const bar = wide > 0.4 && html`<rect key=${kind} class=${kind} x=${left} y=${y - thick / 2} width=${Math.max(wide - 1, 1)} height=${thick} rx="1.5" />`;
    left += wide;
    return bar;
  });
}

function TaskBox({ box, task, hot }) {
  const { x, y, width } = box;
  const name = nameOf(task);
  const ranks = ranksWords(task);
  const lacks = task.gone > 0 ? "bad" : "muted";
  const beside = name.length * 8 + ranks.length * 5.8 < width - 22;
  return html`<g>
    <rect class=${hot ? "box hot" : "box"} x=${x} y=${y} width=${width} height=${box.height} rx="7" />
    <text class="task" x=${x + 10} y=${y + 18}>${shortened(name, Math.floor((width - 20) / 9))}<title>${name}</title></text>
    <text class="rate" x=${x + 10} y=${y + 36}>${rate(task.rate)}${beside ? " samples/s" : "/s"}</text>
    <text class=${lacks} x=${x + width - 10} y=${beside ? y + 18 : y + 36} text-anchor="end">${ranks}</text>
    <${Time} task=${task} x=${x + 10} y=${y + 49} width=${width - 20} />
    <text class="muted" x=${x + 10} y=${y + 67}>${task.joined ? `${counted(task.joined, "task")}; ` : ""}${timeWords(task)}</text>
    <${Ranks} task=${task} x=${x + 10} y=${y + 75} width=${width - 20} />
  </g>`;
}

function Chips({ box, task, hot }) {
  if (!box.chips.length) return null;
  return html`<g>
    ${box.chips.map((chip) => html`<g key=${chip.name || "more"}>
      <rect class=${hot ? "chip hot" : "chip"} x=${chip.x} y=${chip.y} width=${chip.width} height="18" rx="9" />
      <text class=${chip.more ? "muted" : "mono"} x=${chip.x + chip.width / 2} y=${chip.y + 12.8} text-anchor="middle">
        ${chip.more ? `${count(chip.more.length)} more` : shortened(chip.name, Math.floor((chip.width - 10) / 6.7))}<title>${chip.more ? chip.more.map(plain).join(", ") : plain(chip.name)}</title></text>
    </g>`)}
    <text class="muted" x=${box.rateAt.x} y=${box.rateAt.y} text-anchor="middle">${rate(task.put_rate)}/s${box.chips.length > 1 ? " each" : ""}</text>
  </g>`;
}

function Queue({ spot, queue, most, hot }) {
  const [width, height] = [68, 38];
  const left = spot.x - width / 2;
  const below = queue.age_p50 === null ? (queue.rows ? "ready" : "none ready") : duration(queue.age_p50);
  return html`<g>
    <rect class=${hot ? "queue hot" : "queue"} x=${left} y=${spot.y - height / 2} width=${width} height=${height} rx="5" />
    <rect class="waits" x=${left + 2} y=${spot.y + height / 2 - 5} width=${(width - 4) * Math.min(1, queue.rows / most)} height="3.2" rx="1" />
    <text class="rows" x=${spot.x} y=${spot.y - 3} text-anchor="middle">${queue.rows >= 1e6 ? `${(queue.rows / 1e6).toFixed(1)} M` : count(queue.rows)}</text>
    <text class="muted" x=${spot.x} y=${spot.y + 10.5} text-anchor="middle">${below}</text>
    <title>${`${counted(queue.rows, "sample")} ready for ${plain(queue.task)}; median time in the queue ${duration(queue.age_p50)}, longest ${duration(queue.age_max)}`}</title>
  </g>`;
}

/** The way of the weights, from the last task back to the first one. */
function Weights({ plan, last, policy, now }) {
  const end = plan.boxes.find((box) => box.task === last);
  const begin = plan.boxes.find((box) => box.column === 0);
  if (plan.vertical || !end || !begin || begin === end) return null;
  const floor = plan.height - 6;
  const [from, to] = [end.x + end.width / 2, begin.x + begin.width / 2];
  const age = policy.since === null ? "" : `, ${duration(now - policy.since)} old`;
  return html`<g>
    <path class="weights" d=${`M${from} ${end.foot}V${floor}H${to}V${begin.foot + 3}`} />
    <path class="tip" d=${`M${to - 4} ${begin.foot + 9}l4 -7l4 7`} />
    <text class="muted" x=${to + 8} y=${floor - 5}>weights, version ${count(policy.version)}${age}</text>
  </g>`;
}

/** The same as a table, for a screen reader. */
function Table({ tasks, queues }) {
  const queueOf = new Map(queues.map((queue) => [queue.task, queue]));
  return html`<div class="hidden"><table><caption>Tasks in the order of the flow</caption>
    <thead><tr><th scope="col">task</th><th scope="col">ranks</th><th scope="col">samples per second</th><th scope="col">time</th><th scope="col">puts</th><th scope="col">queue before it</th></tr></thead>
    <tbody>${tasks.map((task) => html`<tr key=${task.name}><th scope="row">${nameOf(task)}</th><td>${ranksWords(task)}</td><td>${rate(task.rate)}</td>
      <td>works ${share(task.works)}, ${timeWords(task)}</td><td>${task.puts.map(plain).join(", ") || "nothing"}</td><td>${count(queueOf.get(task.name)?.rows ?? 0)}</td></tr>`)}</tbody>
  </table></div>`;
}

export class Flow extends Panel {
  render({ tasks, fields, queues, life, verdict, policy, now, window, width }) {
    const plan = layOut(tasks, fields, Math.max(280, width));
    const hot = (task) => verdict.stage !== null && verdict.state !== "flowing" && task.name === verdict.stage;
    const most = Math.max(...queues.map((queue) => queue.rows), 1) * 1.25;
    const thick = (line) => Math.max(1.2, Math.min(7, (7 * tasks[line.to].rate) / Math.max(...tasks.map((task) => task.rate), 1e-9)));
    const last = tasks.findIndex((task) => task.name === verdict.last);
    const slow = plan.boxes.find((box) => hot(tasks[box.task]));
    return html`<section class="panel flow" aria-label="Flow">
      <h2>Flow <small>who puts which field, who takes it, what queues between; last ${duration(window)}</small>${tasks.length > 0 && html`<${Key} items=${STATES_KEY} />`}</h2>
      ${!tasks.length && html`<p class="nothing">No task has put or claimed anything in the last ${duration(window)}.</p>`}
      <div class="graph" tabindex=${plan.width > width ? 0 : undefined} role=${plan.width > width ? "group" : undefined} aria-label=${plan.width > width ? "Flow graph" : undefined}>
        ${tasks.length > 0 && html`<svg width=${plan.width} height=${plan.height} viewBox=${`0 0 ${plan.width} ${plan.height}`} aria-hidden="true">
          ${plan.lines.map((line) => html`<path key=${`${line.from} ${line.to}`} d=${line.line}
            class=${tasks[line.to].rate < 0.05 ? "edge still" : "edge"} stroke-width=${thick(line).toFixed(1)} />`)}
          ${policy && html`<${Weights} plan=${plan} last=${last} policy=${policy} now=${now} />`}
          ${plan.boxes.map((box) => html`<${TaskBox} key=${tasks[box.task].name} box=${box} task=${tasks[box.task]} hot=${hot(tasks[box.task])} />
            <${Chips} box=${box} task=${tasks[box.task]} hot=${hot(tasks[box.task])} />`)}
          ${plan.queues.map((spot) => {
            const queue = queues.find((each) => each.task === tasks[spot.task].name);
            return queue && html`<${Queue} key=${queue.task} spot=${spot} queue=${queue} most=${most} hot=${hot(tasks[spot.task]) && queue.rows > 0} />`;
          })}
          ${slow && html`<text class="hot" x=${slow.x} y=${slow.y - 6}>▼ slowest stage</text>`}
        </svg>`}
        <${Table} tasks=${tasks} queues=${queues} />
      </div>
      <${Life} life=${life} last=${verdict.last} window=${window} width=${width} />
    </section>`;
  }
}

