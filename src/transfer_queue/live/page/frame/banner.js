/** The message above all panels when the data is not up to date. */

import { Name, Words } from "../elements.js";
import { clock, dayAndClock, duration, plain } from "../format.js";
import { html } from "../html.js";

/** @returns {"lost" | "restarting" | "ended" | "snapshot" | null} Why the data does not change. */
export function staleness(data, connection) {
  const { state } = data.state;
  if (["ended", "restarting", "snapshot"].includes(state)) return state;
  return connection === "lost" ? "lost" : null;
}

const TEXTS = {
  restarting: ({ data, age }) => html`<b><${Words} text=${data.state.words || "The controller does not reply."} /></b> The page shows
    the state of ${clock(data.now)}, ${duration(age)} ago. The calls of your ranks take longer, and you need to do nothing. If the controller is not back after 30 s,
    its log says why: <code>tq status</code> prints the path of the log.`,
  ended: ({ data }) => html`<b>Ended at ${clock(data.state.since)}. </b><${Words} text=${data.state.words || "The system has ended. Below is its last state."} />${" "}
    This page continues automatically if a new system takes its place.`,
  snapshot: ({ data }) => html`<b>Snapshot of the system <${Name} of=${data.system.name} />, saved on ${dayAndClock(data.state.since)}.</b> Nothing changes here. A sample can
    be opened if the page named it; values of samples are not saved.${data.state.words && html` <${Words} text=${data.state.words} />`}`,
  lost: ({ data, age, refusal }) => html`<b>${refusal ? `The server of this page refuses: ${plain(refusal).replace(/\.$/, "")}.` : "The server of this page does not reply."}</b> The page shows the state of ${clock(data.now)}, ${duration(age)} ago. The page tries
    again automatically; if <code>tq live</code> has ended, start it again and open the address that it prints.`,
};

/** `age`: the seconds since the data was up to date. */
export function Banner({ data, why, age, refusal }) {
  if (why === null) return null;
  return html`<div class=${why === "ended" ? "banner bad" : "banner"} role="region" aria-label="State of the data">${TEXTS[why]({ data, age, refusal })}</div>`;
}
