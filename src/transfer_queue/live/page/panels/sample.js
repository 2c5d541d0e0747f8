/** The inspector of one sample: why it is not where it should be, its fields, tags, group and history. */

import { fetchExplanation, fetchSample } from "../api.js";
import { Name, SampleLink, Words } from "../elements.js";
import { bytes, clock, count, counted, plain, plainLines } from "../format.js";
import { html, Panel } from "../html.js";

const capital = (text) => text && text[0].toUpperCase() + text.slice(1);
const shapeOf = (field) => (field.shape === null ? "–" : `[${field.shape.map(count).join(", ")}]`);

/** A rank without its process: "rollout rank 3" of "rollout rank 3, pid 17, node-1". */
const shortOf = (who) => plain(who).split(", ")[0];

function Field({ field, values }) {
  if (!field.present) {
    return html`<tr><td><${Name} of=${field.name} /></td><td colspan=${values ? 5 : 4} class="missing">${field.lost ? "✕ lost" : "missing"}${field.note && `: ${plain(field.note)}`}</td></tr>`;
  }
  return html`<tr>
    <td><${Name} of=${field.name} /></td><td>${plain(field.type)}</td><td class="mono">${shapeOf(field)}</td>
    ${values && html`<td class="mono head" title=${field.head === null ? undefined : plain(field.head)}>${field.head === null ? html`<span class="muted">${plain(field.note) || "–"}</span>` : plain(field.head)}${field.decoded && html`<div class="decoded">${plain(field.decoded)}</div>`}</td>`}
    <td>${shortOf(field.put_by) || "–"}</td><td>${field.put_at === null ? "–" : clock(field.put_at)}</td>
  </tr>`;
}

function Fields({ fields }) {
  const values = fields.some((field) => field.head !== null);
  const writers = [...new Set(fields.map((field) => plain(field.put_by)).filter((who) => who !== shortOf(who)))];
  const notes = [...new Set(fields.filter((field) => field.present && field.note && field.head === null && field.text === null).map((field) => capital(plain(field.note))))];
  return html`<h3>Fields</h3>
    <div class="scroll" tabindex="0" role="group" aria-label="Fields of the sample"><table>
      <thead><tr><th scope="col">field</th><th scope="col">type</th><th scope="col">shape</th>${values && html`<th scope="col">first values</th>`}<th scope="col">put by</th><th scope="col">at</th></tr></thead>
      <tbody>${fields.map((field) => html`<${Field} key=${field.name} field=${field} values=${values} />`)}</tbody>
    </table></div>
    ${writers.length > 0 && html`<p class="remark">${writers.map((who) => who.replace(", ", ": ")).join("; ")}.</p>`}
    ${!values && notes.length > 0 && html`<p class="remark">${notes.slice(0, 2).map((note) => html`<${Words} text=${note.endsWith(".") ? note : `${note}.`} /> `)}</p>`}`;
}

/** What the inspector asks about a task that has the sample, or had it; about any other one, why it has not. */
const QUESTIONS = { claimed: "Is it at", consumed: "Has it been at" };
const SIGNS = { consumed: "✓", claimed: "●", ready: "○", waiting: "…", skipped: "✕" };

function taskWords({ state, lacks, who, reason }) {
  const by = who ? ` by ${plain(who)}` : "";
  if (state === "waiting") return lacks.length ? `lacks ${lacks.map(plain).join(", ")}` : "waits";
  if (state === "skipped") return `skipped${reason ? `: ${plain(reason)}` : ""}`;
  return state === "ready" ? "ready, and not claimed yet" : `${state}${by}`;
}

function Tasks({ tasks }) {
  if (!tasks.length) return null;
  return html`<h3>Tasks</h3><ul class="history">${tasks.map((each) => html`<li key=${each.task}><span><${Name} of=${each.task || "no task"} /></span>
    <span>${SIGNS[each.state] ?? ""} ${taskWords(each)}</span></li>`)}</ul>`;
}

/** The other samples of its group. */
function Group({ sample }) {
  const others = sample.samples.filter((index) => index !== sample.index);
  if (!others.length) return null;
  return html`<h3>Other samples of its group</h3><p class="others-of-group">${others.map((index) => html`<${SampleLink} key=${index} sample=${{ partition: sample.partition, index }}>${count(index)}<//> `)}</p>`;
}

function Texts({ fields }) {
  const texts = fields.map((field) => ({ name: field.name, text: field.text ?? field.decoded, decoded: field.text === null })).filter((each) => each.text);
  if (!texts.length) return null;
  return html`<h3>Text <span class="muted">the first 2,000 characters</span></h3>
    ${texts.map((field) => html`<pre key=${field.name} tabindex="0"><b>${plain(field.name)}</b>${field.decoded && html` <span class="muted">decoded from its token ids</span>`}${"\n"}${plainLines(field.text)}</pre>`)}`;
}

function Tags({ tags }) {
  if (!tags.length) return html`<h3>Tags</h3><p class="nothing">The sample has no tags.</p>`;
  return html`<h3>Tags</h3><pre tabindex="0">${tags.map((tag) => (tag.value === null ? `${plain(tag.name)} (hidden)` : `${plain(tag.name)}: ${plainLines(tag.value)}`)).join("\n")}</pre>`;
}

function History({ history, note }) {
  return html`<h3>History</h3>
    <ul class="history">${history.map((event, at) => html`<li key=${at}><span class="mono">${clock(event.t)}</span><span>${plain(event.what)}${event.who && ` by ${plain(event.who)}`}</span></li>`)}</ul>
    ${note && html`<p class="remark">${plain(note)}</p>`}
    ${!history.length && !note && html`<p class="nothing">No events of it are kept.</p>`}`;
}

function facts(sample) {
  const size = sample.fields.reduce((sum, field) => sum + (field.bytes ?? 0), 0);
  const group = sample.group && [html`group <${Name} of=${sample.group.id} />`, sample.group.member >= 0 && `, member ${sample.group.member + 1}`, sample.group.size > 0 && ` of ${sample.group.size}`];
  const units = [...new Set(sample.fields.filter((field) => field.unit !== null).map((field) => `unit ${field.unit}, ${plain(field.tier)}`))];
  return html`partition <${Name} of=${sample.partition} />${sample.key !== null && html` · key <${Name} of=${sample.key} />`}${group && html` · ${group}`} ${["reserved", "cleared"].includes(sample.state) && ` · ${sample.state}`} · ${bytes(size)}${units.length > 0 && ` · ${units.join("; ")}`}`;
}

export class Sample extends Panel {
  constructor() {
    super();
    this.state = { sample: null, error: "", words: null, task: "" };
    this.asked = 0;
  }

  shouldComponentUpdate(next, state) {
    return state !== this.state || next.which !== this.props.which;
  }

  componentDidMount() {
    this.returnTo = document.activeElement;
    this.dialog.showModal();
    this.fetch();
  }

  componentDidUpdate(before) {
    if (before.which !== this.props.which) this.fetch();
  }

  componentWillUnmount() {
    this.asked += 1;
    this.returnTo?.focus?.();
  }

  async fetch() {
    const { partition, index, key } = this.props.which;
    const asked = (this.asked += 1);
    try {
      const sample = await fetchSample(partition, index === undefined ? { key } : { index });
      if (asked === this.asked) this.setState({ sample, error: "", words: null, task: "" });
    } catch (error) {
      if (asked === this.asked) this.setState({ sample: null, error: error.name === "TypeError" ? "The server of this page does not reply." : error.message });
    }
    if (asked === this.asked) this.inside.scrollTop = 0;
  }

  async explain(task) {
    const { partition, index } = this.state.sample;
    const asked = (this.asked += 1);
    this.setState({ task });
    try {
      const { words } = await fetchExplanation(partition, { index }, task);
      if (asked === this.asked) this.setState({ words });
    } catch (error) {
      if (asked === this.asked) this.setState({ words: error.message });
    }
  }

  move(by) {
    const { partition, index } = this.state.sample ?? this.props.which;
    if (index !== undefined && index + by >= 0) this.props.open({ partition, index: index + by });
  }

  press(event) {
    if (event.target.matches("select, pre, .scroll")) return;
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") this.move(event.key === "ArrowLeft" ? -1 : 1);
  }

  Why({ sample, words, task, tasks, last }) {
    const choice = task || last;
    const state = sample.tasks.find((each) => each.task === choice)?.state;
    return html`<h3><label>${QUESTIONS[state] ?? "Why is it not at"} <select value=${choice} onChange=${(event) => this.explain(event.target.value)}>
        ${tasks.map((each) => html`<option key=${each} value=${each}>${plain(each)}</option>`)}</select> ?</label></h3>
      <div class=${state === "consumed" ? "why done" : "why"}><${Words} text=${words ?? sample.words} /></div>
      ${sample.command && html`<p class="remark">The same in a terminal: <code>${plain(sample.command)}</code></p>`}`;
  }

  render({ which, tasks, last }, { sample, error, words, task }) {
    const index = sample ? sample.index : which.index;
    const title = index === undefined ? plain(which.key) : `Sample ${count(index)}`;
    return html`<dialog aria-label=${title} ref=${(dialog) => (this.dialog = dialog)} onClose=${() => this.props.close()} onKeyDown=${(event) => this.press(event)}
        onClick=${(event) => { if (event.target === this.dialog) this.dialog.close(); }}>
      <div class="inside" tabindex="-1" ref=${(inside) => (this.inside = inside)}>
        <div class="top"><h2>${title}</h2>
          <button type="button" onClick=${() => this.move(-1)} aria-label="Previous sample">← previous</button>
          <button type="button" onClick=${() => this.move(1)} aria-label="Next sample">next →</button>
          <button type="button" onClick=${() => this.dialog.close()}>Close <kbd>Esc</kbd></button></div>
        ${error && html`<p role="alert">${plain(error)}</p>`}
        ${!sample && !error && html`<p class="nothing">Asking the controller …</p>`}
        ${sample && html`<div class="muted">${facts(sample)}</div>
          ${this.Why({ sample, words, task, tasks, last })}
          <${Tasks} tasks=${sample.tasks} /><${Fields} fields=${sample.fields} /><${Texts} fields=${sample.fields} /><${Tags} tags=${sample.tags} />
          <${Group} sample=${sample} /><${History} history=${sample.history} note=${sample.history_note} />
          <p class="remark">As of ${clock(sample.now)}; ${counted(sample.fields.filter((field) => field.present).length, "field")} of ${count(sample.fields.length)} put.</p>`}
      </div></dialog>`;
  }
}
