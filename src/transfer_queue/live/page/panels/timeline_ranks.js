/** The single ranks of one line of joined ranks: a page of them is fetched while it is shown. */

import { fetchLanes } from "../api.js";
import { Name } from "../elements.js";
import { count, counted, plain } from "../format.js";
import { html } from "../html.js";
import { continueTimeline } from "../store.js";

const PAGE = 64; // ranks that are shown at a time

export const isBand = (lane) => lane.ranks > 1;

/** @returns {object} The timeline with the single ranks below the line that joins them. */
export function withRanks(timeline, opened) {
  if (!opened?.lanes || opened.origin !== timeline.origin) return timeline;
  const at = timeline.lanes.findIndex((lane) => isBand(lane) && lane.task === opened.task);
  if (at < 0) return timeline;
  return { ...timeline, lanes: [...timeline.lanes.slice(0, at + 1), ...opened.lanes, ...timeline.lanes.slice(at + 1)] };
}

/** The ranks of one task that are shown singly: which page of them, and what is known of them. */
export class OpenedRanks {
  constructor(task, first = 0) {
    this.task = task;
    /** The position of the first rank in the line that joins them. */
    this.first = first;
    /** How many ranks the line joins; null until the server has answered. */
    this.ranks = null;
    /** @type {object[] | null} */
    this.lanes = null;
    this.origin = 0;
    this.epoch = "";
    this.timeline = null;
  }

  /** Fetch what is new. @returns {Promise<boolean>} Whether other ranks than before are shown. */
  async fetch(history) {
    const answer = await fetchLanes(this.task, this.first, PAGE, this.epoch);
    const others = this.lanes === null || answer.timeline.since === 0 || answer.ranks !== this.ranks;
    this.timeline = continueTimeline(answer.timeline.since === 0 ? null : this.timeline, answer.timeline, history);
    [this.epoch, this.first, this.ranks, this.origin] = [answer.epoch, answer.first, answer.ranks, answer.timeline.origin];
    this.lanes = this.timeline.lanes.map((lane) => ({ ...lane, id: `single ${lane.id}`, why: this.timeline.why, single: true }));
    return others;
  }

  /** @returns {string} Which ranks are shown, for a reader and a screen reader. */
  words() {
    if (this.ranks === null) return "asking for its ranks …";
    if (!this.lanes.length) return "none of its ranks is known";
    const [first, last] = [this.lanes[0], this.lanes[this.lanes.length - 1]];
    const named = first.rank >= 0 && last.rank >= 0 && first.task === last.task ? `ranks ${first.rank} to ${last.rank}, ` : "";
    return `${named}${count(this.first + 1)} to ${count(this.first + this.lanes.length)} of ${count(this.ranks)} joined ones`;
  }

  /** @returns {OpenedRanks | null} The page before or after this one; null if there is none. */
  turned(pages) {
    const first = this.first + pages * PAGE;
    return this.ranks === null || first <= -PAGE || first >= this.ranks ? null : new OpenedRanks(this.task, Math.max(0, first));
  }
}

/** The buttons that show the single ranks of a line, turn their pages, and join them again. */
export function Joined({ lanes, opened, trouble, toggle, turn }) {
  const bands = lanes.filter(isBand);
  if (!bands.length) return null;
  const turning = (pages, words, label) => {
    const page = opened.turned(pages);
    return html`<button type="button" class="small" aria-disabled=${page === null} aria-label=${label} onClick=${() => page && turn(page)}>${words}</button> `;
  };
  return html`<div class="remark joined" role="group" aria-label="Lines of many ranks">Show the single ranks of ${bands.map((lane) => html`<span key=${lane.id}>
      <button type="button" class="link" aria-expanded=${opened?.task === lane.task} onClick=${() => toggle(lane.task)}
        title=${opened?.task === lane.task ? "Joins them again" : undefined}><${Name} of=${lane.task || "no task"} /> ×${count(lane.ranks)}</button> </span>`)}
    ${opened && html`<p><b><${Name} of=${opened.task || "no task"} /></b>: ${trouble ? plain(trouble) : opened.words()}
      ${" "}${opened.ranks > PAGE && html`${turning(-1, "← before", "Ranks before")}${turning(1, "next →", "Next ranks")}`}
      <button type="button" class="small" onClick=${() => toggle(opened.task)}>Join again</button></p>`}</div>`;
}

/** @returns {string} What a click on a line of many ranks does. */
export const clickWords = (lane, opened, act) => (opened?.task === lane.task ? `${act} joins them again.` : `${act} shows ${counted(lane.ranks, "single rank")}.`);
