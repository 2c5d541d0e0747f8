/** What each rank did in the last minutes: works, waits, is held back, is gone. */

import { measured, note } from "../canvas.js";
import { Key, Name, STATES_KEY } from "../elements.js";
import { clock, counted, duration, plain, share } from "../format.js";
import { html, Panel } from "../html.js";
import { draw, GONE, HELD, IDLE, secondsIn, spanAt, timeAt, WAITS, WORKS, xOf } from "./timeline_drawing.js";
import { clickWords, isBand, Joined, OpenedRanks, withRanks } from "./timeline_ranks.js";

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
  return `${task}${lane.rank < 0 ? "," : ""} ${plain(lane.label)}`;
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
  if (lane.gone_at !== null && timeline.origin + time >= lane.gone_at) return `${name}\nis gone since ${clock(lane.gone_at)}`;
  const span = spanAt(lane, time);
  if (!span) return `${name}\n${at}: nothing is known`;
  const end = span[1] >= timeline.until - 0.05 ? "now" : clock(timeline.origin + span[1]);
  return `${name}\n${STATES[span[2]]}${reasonOf(span, lane.why ?? timeline.why)}, ${clock(timeline.origin + span[0])} to ${end}, ${duration(span[1] - span[0])}`;
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
    this.state = { table: false, opened: null, trouble: "" };
    this.cursor = null;
    this.visible = true;
    this.busy = false;
    this.toggle = (task) => this.show(this.state.opened?.task === task ? null : new OpenedRanks(task));
    this.turn = (opened) => this.show(opened);
  }

  componentDidMount() {
    this.observer = new IntersectionObserver(([entry]) => {
      this.visible = entry.isIntersecting;
      if (this.visible) this.draw();
    }, { rootMargin: "100px" });
    this.observer.observe(this.section);
    this.timer = window.setInterval(() => this.refresh(), 1000);
    this.draw();
  }

  componentDidUpdate() {
    const { opened } = this.state;
    const joined = this.props.timeline.lanes.some((lane) => isBand(lane) && lane.task === opened?.task);
    if (opened && !joined) this.setState({ opened: null, trouble: "" }); // so few are left that each has a line
    this.draw();
  }

  componentWillUnmount() {
    this.observer.disconnect();
    window.clearInterval(this.timer);
  }

  /** The timeline as it is drawn. */
  timeline() {
    return withRanks(this.props.timeline, this.state.opened);
  }

  /** Show single ranks, or join them again (null). The cursor stays on its line. */
  show(opened) {
    const at = this.cursor && this.plan.rows[this.cursor.row]?.lane.id;
    this.setState({ opened, trouble: "" }, () => {
      const row = this.plan.rows.findIndex((each) => each.lane.id === at);
      if (this.cursor) this.cursor = row < 0 ? null : { ...this.cursor, row };
      if (opened) this.fetch(opened);
      else this.say("The ranks are joined again.");
    });
  }

  /** Fetch what is new of the single ranks: while they are seen, and as long as the data is of now. */
  refresh() {
    const { opened } = this.state;
    if (opened && this.props.active && this.visible && !document.hidden && !this.busy) this.fetch(opened);
  }

  async fetch(opened) {
    this.busy = true;
    try {
      const others = await opened.fetch(this.props.history);
      if (this.state.opened !== opened) return;
      if (others || this.state.trouble) this.setState({ trouble: "" }); // otherwise the next event of the stream draws them
      if (others) this.say(`${plain(opened.task) || "no task"}: ${opened.words()}`);
    } catch (error) {
      if (this.state.opened !== opened) return;
      this.setState({ trouble: error.name === "TypeError" ? "The server of this page does not reply." : error.message });
    } finally {
      this.busy = false;
    }
  }

  say(words) {
    this.spoken.textContent = words;
  }

  draw() {
    if (!this.visible) return;
    const [timeline, { history }] = [this.timeline(), this.props];
    if (this.cursor && this.cursor.row >= timeline.lanes.length) this.cursor = null;
    const cursor = document.activeElement === this.canvas ? this.cursor : null;
    this.plan = measured("timeline", () => draw(this.canvas, timeline, history, cursor, this.state.opened?.task));
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const y = event.clientY - box.top;
    return { x: event.clientX - box.left, lane: this.plan.rows.find((each) => y >= each.y - 1 && y < each.y + each.height - 1)?.lane };
  }

  point(event) {
    const { x, lane } = this.at(event);
    this.canvas.style.cursor = lane && isBand(lane) ? "pointer" : "";
    const more = lane && isBand(lane) ? `\n${clickWords(lane, this.state.opened, "Click")}` : "";
    note(lane && x >= this.plan.label ? laneWords(this.props.timeline, lane, timeAt(this.plan, x)) + more : more.trim(), event.clientX, event.clientY);
  }

  click(event) {
    const { lane } = this.at(event);
    if (lane && isBand(lane)) this.toggle(lane.task);
  }

  press(event) {
    if (event.key === "Enter" && this.cursor) {
      const { lane } = this.plan.rows[this.cursor.row];
      if (isBand(lane)) this.toggle(lane.task);
      return;
    }
    const step = { ArrowRight: [STEP, 0], ArrowLeft: [-STEP, 0], PageDown: [60, 0], PageUp: [-60, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!step || !this.plan.rows.length) return;
    event.preventDefault();
    const { begin, end, rows } = this.plan;
    const { row, time } = this.cursor ?? { row: 0, time: end };
    this.cursor = { row: Math.max(0, Math.min(rows.length - 1, row + step[1])), time: Math.max(begin + 0.1, Math.min(end - 0.1, time + step[0])) };
    this.draw();
    const { lane } = rows[this.cursor.row];
    const words = laneWords(this.props.timeline, lane, this.cursor.time) + (isBand(lane) ? `\n${clickWords(lane, this.state.opened, "Enter")}` : "");
    const box = this.canvas.getBoundingClientRect();
    note(words, box.left + xOf(this.plan, this.cursor.time), box.top + rows[this.cursor.row].y);
    this.say(words.replaceAll("\n", ", "));
  }

  leave() {
    note("");
    this.draw();
  }

  render({ timeline, history }, { table, opened, trouble }) {
    const bands = timeline.lanes.some(isBand);
    const key = timeline.gaps.length ? [...KEY, ["gap", "not known"]] : KEY;
    return html`<section class="panel timeline" aria-label="Timeline" ref=${(section) => (this.section = section)}>
      <h2>Last ${Math.round(history / 60)} minutes <small>a line for each rank${bands ? ", or for many" : ""}</small>${timeline.lanes.length > 0 && html`<${Key} items=${key} />`}</h2>
      <canvas id="timeline" hidden=${!timeline.lanes.length} tabindex="0" role="application" aria-label=${`Working and waiting of each rank. Arrow keys move${bands ? ", Enter shows the ranks of a line of many" : ""}.`} ref=${(canvas) => (this.canvas = canvas)}
        onMouseMove=${(event) => this.point(event)} onMouseLeave=${() => note("")} onClick=${(event) => this.click(event)} onKeyDown=${(event) => this.press(event)}
        onFocus=${() => this.draw()} onBlur=${() => this.leave()}></canvas>
      <div class="hidden" role="status" ref=${(spoken) => (this.spoken = spoken)}></div>
      <${Joined} lanes=${timeline.lanes} opened=${opened} trouble=${trouble} toggle=${this.toggle} turn=${this.turn} />
      ${!timeline.lanes.length && html`<p class="nothing">No rank has put or claimed anything.</p>`}
      <details class="others" hidden=${!timeline.lanes.length} onToggle=${(event) => this.setState({ table: event.target.open })}><summary>As a table</summary>
        ${table && html`<${Table} timeline=${this.timeline()} history=${history} />`}</details>
    </section>`;
  }
}
