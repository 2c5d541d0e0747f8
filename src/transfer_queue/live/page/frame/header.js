/** The head of the page: which system, how old the data is, the search for a sample, pause and colors. */

import { Name } from "../elements.js";
import { clock, counted, duration, plain } from "../format.js";
import { Component, html } from "../html.js";

/** @returns {string} "up 6 h 12 min · 22 ranks · 60 partitions" */
function factsOf({ now, system, tasks, partitions, state }) {
  const alive = tasks.reduce((sum, task) => sum + task.alive, 0);
  const up = state.state === "ended" ? `was up ${duration(Math.max(0, state.since - system.started))}` : `up ${duration(now - system.started)}`;
  return [up, counted(alive, "rank"), counted(partitions.count, "partition")].join(" · ");
}

function Age({ data, connection, paused }) {
  const { state } = data.state;
  const lost = connection === "lost" || state === "restarting" || state === "ended";
  const word = state === "snapshot" ? `snapshot of ${clock(data.now)}` : lost ? `of ${clock(data.now)}` : paused ? `${clock(data.now)}, paused` : `live, ${clock(data.now)}`;
  const slow = !lost && !paused && state !== "snapshot" && data.state.every > 1 ? `, each ${duration(data.state.every)}` : "";
  return html`<span class=${lost ? "age lost" : paused || state === "snapshot" ? "age off" : "age"}><i></i><span>${word}${slow}</span></span>`;
}

/** Opens a sample by its index or key, in a partition that the reader chooses if there are several. */
class Search extends Component {
  constructor() {
    super();
    this.state = { wrong: "" };
  }

  submit(event) {
    event.preventDefault();
    const text = this.input.value.trim();
    const { partitions } = this.props;
    if (!text) return this.setState({ wrong: "Type the index or the key of a sample." });
    const partition = this.select?.value ?? partitions[0];
    if (partition === undefined) return this.setState({ wrong: "The system has no partition yet." });
    this.setState({ wrong: "" });
    const number = text.replaceAll(",", "");
    return this.props.open(/^\d+$/.test(number) ? { partition, index: Number(number) } : { partition, key: text });
  }

  render({ partitions }, { wrong }) {
    return html`<form class="search" role="search" onSubmit=${(event) => this.submit(event)}>
      ${partitions.length > 1 && html`<select aria-label="Partition of the sample" class="wide" ref=${(select) => (this.select = select)}>
        ${partitions.map((name) => html`<option key=${name} value=${name}>${plain(name).slice(0, 40)}</option>`)}</select>`}
      <label><input id="find" type="search" placeholder="find a sample" aria-label="Open a sample by index or key"
        autocomplete="off" spellcheck="false" aria-invalid=${wrong ? "true" : undefined} ref=${(input) => (this.input = input)} onInput=${() => wrong && this.setState({ wrong: "" })} /></label>
      <kbd class="wide">/</kbd>
      <span class="wrong" role="status">${wrong}</span>
    </form>`;
  }
}

export function Header({ data, connection, paused, dark, open, pause, theme, help }) {
  const listed = data.partitions.list.map((each) => each.name);
  return html`<header>
    <b>transfer_queue</b>
    <span class="muted facts">system <${Name} of=${data.system.name} /></span>
    <span class="muted facts wide">${factsOf(data)}</span>
    <${Age} data=${data} connection=${connection} paused=${paused} />
    <span class="grow"></span>
    <${Search} partitions=${listed} open=${open} />
    ${data.state.state !== "snapshot" && html`<button type="button" class="button" aria-pressed=${String(paused)} onClick=${pause}>${paused ? "Continue" : "Pause"}</button>
      <a class="button" href="api/snapshot" download title="Save what the page shows now as a file that you can send. tq live FILE shows it.">Save</a>`}
    <button type="button" class="button" onClick=${theme}>${dark ? "Light" : "Dark"}</button>
    <button type="button" class="button" onClick=${help} aria-label="Help">?</button>
  </header>`;
}
