/** The controller and the storage units: whether they reply, and how fast. */

import { count, counted, duration, plain, share } from "../format.js";
import { html, Panel } from "../html.js";

const SHOWN = 8;

/** Times of requests are far below a second. */
const milliseconds = (seconds) => (seconds === null ? "–" : seconds >= 1 ? duration(seconds) : `${(1000 * seconds).toFixed(seconds < 0.00095 ? 2 : 1)} ms`);

const connectionsOf = (server) => `${count(server.connections)}${server.ended ? `, ${count(server.ended)} ended` : ""}`;

function journalWords(journal) {
  if (!journal) return "The controller keeps no journal.";
  return `Last snapshot of the journal ${duration(journal.lag)} ago, ${counted(journal.records, "record")} since.`;
}

/** The servers that do not reply come first, then the controller, then the others in their order. */
function ordered(servers) {
  const rank = (each) => (each.up ? (each.name === "controller" ? 1 : 2) : 0);
  return [...servers].sort((a, b) => rank(a) - rank(b));
}

function Row({ server }) {
  return html`<tr>
    <td>${plain(server.name)}</td>
    <td class=${server.up ? "up" : "down"}>${server.up ? "✓ up" : "✕ no reply"}</td>
    <td class="right">${server.cpu === null ? "–" : share(server.cpu)}</td>
    <td class="right">${milliseconds(server.p99)}</td>
    <td class="right">${milliseconds(server.longest)}</td>
    <td class="muted">${connectionsOf(server)}</td>
  </tr>`;
}

export class Servers extends Panel {
  render({ servers: { servers, answered, count: all, journal, failed, logs } }) {
    const shown = ordered(servers).slice(0, SHOWN);
    const hidden = servers.length - shown.length;
    return html`<section class="panel servers" aria-label="Servers">
      <h2>Servers <small>${count(answered)} of ${count(all)} replied within 1 s</small></h2>
      <div class="scroll" tabindex="0" role="group" aria-label="Table of servers"><table>
        <thead><tr><th scope="col">server</th><th scope="col">state</th><th scope="col" class="right">CPU</th>
          <th scope="col" class="right">99 % within</th><th scope="col" class="right">longest</th><th scope="col">connections</th></tr></thead>
        <tbody>${shown.map((server) => html`<${Row} key=${server.name} server=${server} />`)}</tbody>
      </table></div>
      ${hidden > 0 && html`<p class="remark">${counted(hidden, "more unit")} ${hidden === 1 ? "replies" : "reply"} as well.</p>`}
      ${journal?.trouble && html`<p class="remark"><b class="down">✕ The journal cannot be written: ${plain(journal.trouble)}</b></p>`}
      <p class="remark">${failed ? html`<b>${counted(failed, "request")}</b> answered with an error so far.` : "No request was answered with an error."}
        ${` ${journalWords(journal)} `}Logs: <code>${plain(logs)}</code></p>
    </section>`;
  }
}
