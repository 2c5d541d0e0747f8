/** What each rank did in the last minutes: works, waits, is held back, is gone. */

import { measured, note } from "../canvas.js";
import { Key, Name, STATES_KEY } from "../elements.js";
import { clock, counted, duration, plain, share } from "../format.js";
import { html, Panel } from "../html.js";
import { draw, GONE, HELD, IDLE, secondsIn, spanAt, timeAt, WAITS, WORKS, xOf } from "./timeline_drawing.js";

const KEY = [...STATES_KEY, ["cross", "gone"], ["tick", "policy version"]];
const STEP = 5; // seconds of an arrow key
const HELD_UNTIL = {
  policy: " until the policy version advances",
  capacity: " until there is free space",
  demand: " until more groups are wanted",
};
const STATES = ["is idle", "works", "is held back", "waits", "is gone"];

const laneName = (lane) => {
  const task = plain(lane.task) || "no task";
  if (lane.ranks > 1) return `${task}, ${counted(lane.ranks, "rank")} together`;
  return lane.rank >= 0 ? `${task} rank ${lane.rank}` : `${task}, ${plain(lane.client)}`;
};

function reasonOf(span, why) {
  const reason = plain(why[span[3]] ?? "");
  if (span[2] === WAITS && reason) return ` for ${reason}`;
  if (span[2] === HELD && reason) return HELD_UNTIL[reason] ?? HELD_UNTIL.capacity;
  return "";
}

/** @returns {string} What a lane did at a time (seconds since the origin). */
function laneWords(timeline, lane, time) {
  const name = laneName(lane);
  const at = clock(timeline.origin + time);
  if (lane.ranks > 1) {
    const point = lane.band.find((each) => each[0] >= time && each[0] - 1 <= time);
    return point ? `${name}\n${at}: ${point[1]} % work, ${point[2]} % wait, ${point[3]} % are held back, ${point[4]} % are gone` : `${name}\n${at}: nothing is known`;
  }
  const where = lane.host ? `\n${plain(lane.host)}, pid ${lane.pid}` : "";
  if (lane.gone_at !== null && timeline.origin + time >= lane.gone_at) return `${name} is gone since ${clock(lane.gone_at)}${where}`;
  const span = spanAt(lane, time);
  if (!span) return `${name}\n${at}: nothing is known${where}`;
  const end = span[1] >= timeline.until - 0.05 ? "now" : clock(timeline.origin + span[1]);
  return `${name} ${STATES[span[2]]}${reasonOf(span, timeline.why)}\n${clock(timeline.origin + span[0])} to ${end}, ${duration(span[1] - span[0])}${where}`;
}

/** The lanes in numbers. */
function Table({ timeline, history }) {
  const rows = timeline.lanes.map((lane) => {
    const seconds = secondsIn(lane, timeline.until - history, timeline.until);
    const lived = seconds[IDLE] + seconds[WORKS] + seconds[HELD] + seconds[WAITS] || 1;
    const last = lane.gone_at !== null || (lane.ranks === 1 && spanAt(lane, timeline.until - 0.05)?.[2] === GONE) ? "gone" : STATES[spanAt(lane, timeline.until - 0.05)?.[2]] ?? "–";
    return html`<tr key=${lane.id}><th scope="row"><${Name} of=${laneName(lane)} /></th><td>${last.replace("is ", "")}</td>
      ${[WORKS, WAITS, HELD].map((state) => html`<td key=${state} class="right">${share(seconds[state] / lived)}</td>`)}</tr>`;
  });
  return html`<div class="scroll rows" tabindex="0" role="group" aria-label="The timeline as a table"><table>
    <thead><tr><th scope="col">rank</th><th scope="col">now</th><th scope="col" class="right">works</th><th scope="col" class="right">waits</th><th scope="col" class="right">held back</th></tr></thead>
    <tbody>${rows}</tbody></table></div>`;
}

export class Timeline extends Panel {
  constructor() {
    super();
    this.state = { table: false };
    this.cursor = null;
    this.visible = true;
  }

  componentDidMount() {
    this.observer = new IntersectionObserver(([entry]) => {
      this.visible = entry.isIntersecting;
      if (this.visible) this.draw();
    }, { rootMargin: "100px" });
    this.observer.observe(this.section);
    this.draw();
  }

  componentDidUpdate() {
    this.draw();
  }

  componentWillUnmount() {
    this.observer.disconnect();
  }

  draw() {
    if (!this.visible) return;
    const { timeline, history } = this.props;
    if (this.cursor && this.cursor.row >= timeline.lanes.length) this.cursor = null;
    const cursor = document.activeElement === this.canvas ? this.cursor : null;
    this.plan = measured("timeline", () => draw(this.canvas, timeline, history, cursor));
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const row = this.plan.rows.find((each) => y >= each.y - 1 && y < each.y + each.height - 1);
    note(row && x >= this.plan.label ? laneWords(this.props.timeline, row.lane, timeAt(this.plan, x)) : "", event.clientX, event.clientY);
  }

  press(event) {
    const step = { ArrowRight: [STEP, 0], ArrowLeft: [-STEP, 0], PageDown: [60, 0], PageUp: [-60, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!step || !this.plan.rows.length) return;
    event.preventDefault();
    const { begin, end, rows } = this.plan;
    const { row, time } = this.cursor ?? { row: 0, time: end };
    this.cursor = { row: Math.max(0, Math.min(rows.length - 1, row + step[1])), time: Math.max(begin + 0.1, Math.min(end - 0.1, time + step[0])) };
    this.draw();
    const words = laneWords(this.props.timeline, rows[this.cursor.row].lane, this.cursor.time);
    const box = this.canvas.getBoundingClientRect();
    note(words, box.left + xOf(this.plan, this.cursor.time), box.top + rows[this.cursor.row].y);
    this.spoken.textContent = words.replaceAll("\n", ", ");
  }

  leave() {
    note("");
    this.draw();
  }

  render({ timeline, history }, { table }) {
    const bands = timeline.lanes.some((lane) => lane.ranks > 1);
    const key = timeline.gaps.length ? [...KEY, ["gap", "not known"]] : KEY;
    return html`<section class="panel timeline" aria-label="Timeline" ref=${(section) => (this.section = section)}>
      <h2>Last ${Math.round(history / 60)} minutes <small>a line for each rank${bands ? ", or for many" : ""}</small><${Key} items=${key} /></h2>
      <canvas id="timeline" hidden=${!timeline.lanes.length} tabindex="0" role="application" aria-label="Working and waiting of each rank. Arrow keys move." ref=${(canvas) => (this.canvas = canvas)}
        onMouseMove=${(event) => this.point(event)} onMouseLeave=${() => note("")} onKeyDown=${(event) => this.press(event)}
        onFocus=${() => this.draw()} onBlur=${() => this.leave()}></canvas>
      <div class="hidden" role="status" ref=${(spoken) => (this.spoken = spoken)}></div>
      ${!timeline.lanes.length && html`<p class="nothing">No rank has put or claimed anything.</p>`}
      <details class="others" hidden=${!timeline.lanes.length} onToggle=${(event) => this.setState({ table: event.target.open })}><summary>As a table</summary>
        ${table && html`<${Table} timeline=${timeline} history=${history} />`}</details>
    </section>`;
  }
}
