/** What stands above all panels when the data is not of now. */

import { Name, Words } from "../elements.js";
import { clock, duration } from "../format.js";
import { html } from "../html.js";

/** @returns {"lost" | "restarting" | "ended" | null} Why the data is old. */
export function staleness(data, connection) {
  const { state } = data.state;
  if (state === "ended" || state === "restarting") return state;
  return connection === "lost" ? "lost" : null;
}

const TEXTS = {
  restarting: ({ data, age }) => html`<b>The controller does not answer</b>, and is being restarted from its journal. What you see
    is of ${clock(data.now)}, ${duration(age)} ago. Calls of your ranks only take longer; you need to do nothing. If it is not back after 30 s, its log
    says why: <code>tq status</code> names it.${data.state.words && html` <${Words} text=${data.state.words} />`}`,
  ended: ({ data }) => html`<b>The system <${Name} of=${data.system.name} /> has ended</b> at ${clock(data.state.since)}${data.state.words && html`: <${Words} text=${data.state.words} />`}${" "}
    Below is its last state. This page goes on by itself if a system takes its place.`,
  lost: ({ data, age }) => html`<b>The server of this page does not answer.</b> What you see is of ${clock(data.now)}, ${duration(age)} ago. The page
    tries again by itself; if <code>tq live</code> has ended, start it again and open the address that it prints.`,
};

/** `age`: the seconds since the data was of now. */
export function Banner({ data, why, age }) {
  if (why === null) return null;
  return html`<div class=${why === "ended" ? "banner bad" : "banner"} role="region" aria-label="State of the data">${TEXTS[why]({ data, age })}</div>`;
}
