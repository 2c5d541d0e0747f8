/** Samples by fields and tasks: what each one has, and how far it is. */

import { MatrixRequest } from "../api.js";
import { measured, note } from "../canvas.js";
import { Key, Name, SampleLink } from "../elements.js";
import { count, counted, plain, share } from "../format.js";
import { html, Panel } from "../html.js";
import { columnWords, decoded, indexOf } from "./matrix_cells.js";
import { columnsFor, draw, hit, middle, planOf, rowsOfAll } from "./matrix_drawing.js";

const KEY = [["m0", "missing"], ["m1", "put, or ready for the task"], ["m2", "claimed"], ["m3", "consumed"]];

/** The colors that are on the canvas. Samples are rarely skipped, and values are rarely lost. */
function keyOf(matrices) {
  const passed = matrices.some((matrix) => matrix.tasks.some((task) => task.passed.some((run) => run[2])));
  const lost = matrices.some((matrix) => matrix.fields.some((field) => field.lost.some((run) => run[2])));
  return [...KEY, ...(passed ? [["m5", "skipped"]] : []), ...(lost ? [["m4", "lost"]] : [])];
}
const STEPS = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], PageDown: [16, 0], PageUp: [-16, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

function Lacking({ partition, last }) {
  if (!partition.missing || !partition.field) return null;
  const sample = partition.sample === null ? null : { partition: partition.name, index: partition.sample };
  return html`${counted(partition.missing, "sample")} of <b><${Name} of=${partition.name} /></b> ${partition.missing === 1 ? "lacks" : "lack"} <${Name} of=${partition.field} />${last && html`, for which <${Name} of=${last} /> waits`}.
    ${sample && html` The first one: <${SampleLink} sample=${sample} />. `} `;
}

function nothingWords(partitions, stale) {
  if (stale) return "The cells were not fetched before the data became old.";
  if (!partitions.count) return "The system has no partition.";
  return partitions.list.some((each) => each.shown) ? "Asking the controller …" : "No task claims from a partition. Choose a partition below.";
}

/** The partitions that have no matrix, to choose one. */
class Others extends Panel {
  constructor() {
    super();
    this.state = { filter: "" };
  }

  render({ partitions, chosen, choose }, { filter }) {
    const others = partitions.list.filter((each) => !each.shown);
    if (!others.length && !partitions.rest) return null;
    const found = others.filter((each) => plain(each.name).includes(filter));
    return html`<details class="others">
      <summary>${counted(partitions.count - partitions.list.length + others.length, "other partition")} of ${count(partitions.count)}, with ${counted(
        others.reduce((sum, each) => sum + each.rows, partitions.rest_rows), "sample")}</summary>
      <input type="search" aria-label="Partitions whose names contain" placeholder="name contains" value=${filter}
        onInput=${(event) => this.setState({ filter: event.target.value })} />
      <div class="rows" tabindex="0" role="group" aria-label="Other partitions"><table>
        <thead><tr><th scope="col">partition</th><th scope="col" class="right">samples</th><th scope="col">state</th><th scope="col"><span class="hidden">action</span></th></tr></thead>
        <tbody>${found.map((each) => html`<tr key=${each.name}><td><${Name} of=${each.name} /></td><td class="right">${count(each.rows)}</td><td>${each.sealed ? "sealed" : "open"}</td>
          <td><button type="button" class="link" aria-pressed=${chosen === each.name} onClick=${() => choose(chosen === each.name ? null : each.name)}>${chosen === each.name ? "hide" : "show"}<span class="hidden"> ${plain(each.name)}</span></button></td></tr>`)}</tbody>
      </table></div>
      ${partitions.rest > 0 && html`<p class="remark">${counted(partitions.rest, "older partition")} with ${counted(partitions.rest_rows, "sample")} not listed.</p>`}
    </details>`;
  }
}

/** The same as the canvas, in numbers. */
function Table({ matrices, rows }) {
  const filled = (runs, matrix) => runs.reduce((sum, [, length, value]) => sum + (length * value) / 255, 0) / Math.max(1, matrix.columns);
  const field = (matrix, name) => matrix.fields.find((each) => each.name === name);
  const task = (matrix, name) => matrix.tasks.find((each) => each.name === name);
  return html`<div class="scroll" tabindex="0" role="group" aria-label="The matrix as a table"><table>
    <thead><tr><th scope="col">field or task</th>${matrices.map((each) => html`<th scope="col" key=${each.partition}>${plain(each.partition)}</th>`)}</tr></thead>
    <tbody>
      ${rows.fields.map((name) => html`<tr key=${name}><th scope="row"><${Name} of=${name} /></th>${matrices.map((each) => html`<td key=${each.partition}>${count(field(each, name)?.rows ?? 0)} of ${count(each.rows)} put</td>`)}</tr>`)}
      ${rows.tasks.map((name) => html`<tr key=${`task ${name}`}><th scope="row">task <${Name} of=${name} /></th>${matrices.map((each) => {
        const runs = task(each, name);
        return html`<td key=${each.partition}>${runs ? ["consumed", "claimed", "ready", "passed"].map((state) => `${share(filled(runs[state], each))} ${state === "passed" ? "skipped" : state}`).join(", ") : "–"}</td>`;
      })}</tr>`)}
    </tbody></table></div>`;
}

export class Matrix extends Panel {
  constructor() {
    super();
    this.state = { matrices: [], chosen: null, trouble: "", table: false };
    this.requests = new Map();
    this.cursor = null;
    this.visible = true;
    this.busy = false;
  }

  componentDidMount() {
    this.observer = new IntersectionObserver(([entry]) => {
      this.visible = entry.isIntersecting;
      if (this.visible) this.refresh();
    }, { rootMargin: "100px" });
    this.observer.observe(this.section);
    this.timer = window.setInterval(() => this.refresh(), 1000);
    this.refresh();
  }

  componentWillUnmount() {
    this.observer.disconnect();
    window.clearInterval(this.timer);
  }

  componentDidUpdate(before) {
    const names = (props) => props.partitions.list.filter((each) => each.shown).map((each) => each.name).join("\u0000");
    if (names(before) !== names(this.props)) this.refresh();
    this.draw();
  }

  names() {
    const shown = this.props.partitions.list.filter((each) => each.shown).map((each) => each.name);
    return this.state.chosen === null ? shown : [this.state.chosen];
  }

  async refresh() {
    const { active, stale } = this.props;
    if (this.busy || !this.visible || document.hidden || !(active || (stale && !this.state.matrices.length))) return;
    this.busy = true;
    try {
      await this.fetchAll(this.names());
    } finally {
      this.busy = false;
    }
  }

  async fetchAll(names) {
    const columns = columnsFor(planOf(this.section.clientWidth - 26, names.length, { fields: [], tasks: [] }));
    const known = new Map(this.state.matrices.map((each) => [each.partition, each]));
    let [changed, trouble] = [false, ""];
    const answers = await Promise.all(names.map(async (partition) => {
      if (!this.requests.has(partition)) this.requests.set(partition, new MatrixRequest());
      try {
        const answer = await this.requests.get(partition).fetch({ partition, columns });
        changed ||= answer !== null;
        return answer === null ? known.get(partition) : decoded(answer);
      } catch (error) {
        if (error.name !== "TypeError" && !this.props.stale) trouble = error.message; // a TypeError: no connection, which the banner says
        return known.get(partition);
      }
    }));
    for (const partition of this.requests.keys()) if (!names.includes(partition)) this.requests.delete(partition);
    const matrices = answers.filter(Boolean);
    const same = matrices.length === this.state.matrices.length && matrices.every((each, at) => each === this.state.matrices[at]);
    if (changed || !same || trouble !== this.state.trouble) this.setState({ matrices, trouble });
  }

  draw() {
    const { matrices } = this.state;
    if (this.cursor && !(this.cursor.partition < matrices.length && this.cursor.column < matrices[this.cursor.partition].columns)) this.cursor = null;
    this.rows = rowsOfAll(matrices, this.props.fields.map((each) => each.name), this.props.tasks.map((each) => each.name));
    const cursor = document.activeElement === this.canvas ? this.cursor : null;
    this.plan = measured("matrix", () => draw(this.canvas, matrices, this.rows, cursor));
  }

  words({ partition, column, row }) {
    const { fields, tasks } = this.rows;
    const name = row < fields.length ? fields[row] : `task ${tasks[row - fields.length]}`;
    return columnWords(this.state.matrices[partition], column, name);
  }

  open({ partition, column }) {
    const matrix = this.state.matrices[partition];
    this.props.open({ partition: matrix.partition, index: indexOf(matrix, column) });
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return hit(this.plan, this.state.matrices, event.clientX - box.left, event.clientY - box.top);
  }

  point(event) {
    const cell = this.at(event);
    note(cell && `${this.words(cell)}\nA click opens the first one.`, event.clientX, event.clientY);
  }

  press(event) {
    const { matrices } = this.state;
    if (event.key === "Enter" && this.cursor) return this.open(this.cursor);
    if (!matrices.length || !(event.key in STEPS)) return undefined;
    event.preventDefault();
    const [right, down] = STEPS[event.key];
    let { partition, column, row } = this.cursor ?? { partition: 0, column: -right, row: -down };
    column += right;
    row = Math.max(0, Math.min(this.plan.number - 1, row + down));
    if (column < 0 && partition > 0) column = matrices[(partition -= 1)].columns - 1;
    else if (column >= matrices[partition].columns && partition + 1 < matrices.length) [partition, column] = [partition + 1, 0];
    column = Math.max(0, Math.min(matrices[partition].columns - 1, column));
    this.cursor = { partition, column, row };
    this.draw();
    const box = this.canvas.getBoundingClientRect();
    const spot = middle(this.plan, matrices, this.cursor);
    const words = this.words(this.cursor);
    note(`${words}\nEnter opens it.`, box.left + spot.x, box.top + spot.y);
    this.spoken.textContent = words.split("\n").slice(0, 2).join(", ");
    return undefined;
  }

  leave() {
    note("");
    this.draw();
  }

  render({ partitions, last, stale }, { matrices, chosen, trouble, table }) {
    const lacking = partitions.list.filter((each) => each.shown && each.missing);
    const sizes = [...new Set(matrices.map((each) => each.column_rows))];
    const grouped = matrices.length > 0 && matrices.every((each) => each.group_size && each.column_rows === each.group_size);
    const column = !matrices.length ? "" : grouped ? `a column is a group of ${sizes[0]}` : sizes.length === 1 && sizes[0] === 1 ? "a column is a sample" : `a column is up to ${counted(Math.max(...sizes), "sample")}`;
    const label = `Samples by fields and tasks of ${matrices.map((each) => plain(each.partition)).join(", ") || "no partition"}. Arrow keys move, Enter opens a sample.`;
    return html`<section class="panel matrix" aria-label="Samples and fields" ref=${(section) => (this.section = section)}>
      <h2>Samples and fields <small>${column}</small><${Key} items=${keyOf(matrices)} /></h2>
      <canvas id="matrix" hidden=${!matrices.length} tabindex="0" role="application" aria-label=${label} ref=${(canvas) => (this.canvas = canvas)} onMouseMove=${(event) => this.point(event)}
        onMouseLeave=${() => note("")} onClick=${(event) => { const cell = this.at(event); if (cell) this.open(cell); }}
        onKeyDown=${(event) => this.press(event)} onFocus=${() => this.draw()} onBlur=${() => this.leave()}></canvas>
      <div class="hidden" role="status" ref=${(spoken) => (this.spoken = spoken)}></div>
      ${trouble && html`<p class="remark"><b>${plain(trouble)}</b></p>`}
      ${!matrices.length && !trouble && html`<p class="nothing">${nothingWords(partitions, stale)}</p>`}
      ${lacking.length > 0 && html`<p class="remark">${lacking.map((each) => html`<${Lacking} key=${each.name} partition=${each} last=${last} />`)}</p>`}
      ${matrices.length > 0 && !lacking.length && html`<p class="remark">No sample lacks a field that ${last ? html`<${Name} of=${last} />` : "the last task"} waits for.</p>`}
      <details class="others" onToggle=${(event) => this.setState({ table: event.target.open })}><summary>As a table</summary>
        ${table && html`<${Table} matrices=${matrices} rows=${this.rows ?? rowsOfAll(matrices, [], [])} />`}</details>
      <${Others} partitions=${partitions} chosen=${chosen} choose=${(name) => this.setState({ chosen: name }, () => this.refresh())} />
    </section>`;
  }
}
