/** The page before any sample was put: which clients are connected, what waits, and which call puts samples. */

import { Name, Words } from "../elements.js";
import { clock, count, counted, duration } from "../format.js";
import { html } from "../html.js";

function Connected({ data }) {
  const { servers, clients } = data;
  const up = servers.answered === servers.count ? `all ${counted(servers.count, "server")} reply` : `${count(servers.answered)} of ${counted(servers.count, "server")} reply`;
  return html`<p>The system <${Name} of=${data.system.name} /> has been up since ${clock(data.system.started)} (${duration(data.now - data.system.started)}): ${up}, and ${clients.connected
    ? html`<b>${counted(clients.connected, "client")}</b> ${clients.connected === 1 ? "is" : "are"} connected.` : html`no client is connected.`}</p>`;
}

export function Empty({ data }) {
  const { waiting } = data.clients;
  return html`<main id="content" tabindex="-1" class="empty">
    <h1>Nothing has been put yet</h1>
    <${Connected} data=${data} />
    ${waiting.length > 0
      ? html`<p>Already waiting:</p><ul>${waiting.map((words, at) => html`<li key=${at}><${Words} text=${words} /></li>`)}</ul>`
      : html`<p>No claim waits.</p>`}
    <p>Samples appear here after a put:</p>
    <pre tabindex="0">import transfer_queue as tq

tq.init()
client = tq.get_client()
data = {"prompt": ..., "tokens": ...}
rows = TensorDict(data, batch_size=[8])
client.put(rows, partition_id="train_0")</pre>
    <p class="muted">If your producer should have put by now, check whether it is attached to this system: <code>tq doctor</code>, and <code>TQ_SYSTEM</code> in its environment.</p>
  </main>`;
}
