/** The message above all panels when the data is not up to date. */

import { Words } from "../elements.js";
import { clock, duration, plain } from "../format.js";
import { html } from "../html.js";

/** @returns {"lost" | "restarting" | "ended" | null} Why the data is old. */
export function staleness(data, connection) {
  const { state } = data.state;
  if (state === "ended" || state === "restarting") return state;
  return connection === "lost" ? "lost" : null;
}

const TEXTS = {
  restarting: ({ data, age }) => html`<b><${Words} text=${data.state.words || "The controller does not reply."} /></b> The page shows
    the state of ${clock(data.now)}, ${duration(age)} ago. The calls of your ranks take longer, and you need to do nothing. If the controller is not back after 30 s,
    its log says why: <code>tq status</code> prints the path of the log.`,
  ended: ({ data }) => html`<b>Ended at ${clock(data.state.since)}. </b><${Words} text=${data.state.words || "The system has ended. Below is its last state."} />${" "}
    This page continues automatically if a new system takes its place.`,
  lost: ({ data, age, refusal }) => html`<b>${refusal ? `The server of this page refuses: ${plain(refusal).replace(/\.$/, "")}.` : "The server of this page does not reply."}</b> The page shows the state of ${clock(data.now)}, ${duration(age)} ago. The page tries
    again automatically; if <code>tq live</code> has ended, start it again and open the address that it prints.`,
};

/** `age`: the seconds since the data was up to date. */
export function Banner({ data, why, age, refusal }) {
  if (why === null) return null;
  return html`<div class=${why === "ended" ? "banner bad" : "banner"} role="region" aria-label="State of the data">${TEXTS[why]({ data, age, refusal })}</div>`;
}
