/** Memory of the storage units, leases, and what was lost or delivered again. */

import { Bar, Key, Name } from "../elements.js";
import { bytes, bytesOf, count, counted, duration } from "../format.js";
import { html, Panel } from "../html.js";

const SHOWN = 8; // units with a bar of their own

/** The units beyond the first ones, as one. */
function joined(units) {
  if (units.length <= SHOWN + 1) return units;
  const rest = units.slice(SHOWN);
  const sum = (name) => rest.reduce((total, each) => total + Math.max(0, each[name]), 0);
  const worst = Math.max(...rest.map((each) => each.longest_wait));
  return [...units.slice(0, SHOWN), {
    unit: null, node: `${rest.length} more units`, tier: "", drained: false, capacity: sum("capacity"), held: sum("held"),
    leased: sum("leased"), live: rest.some((each) => each.live < 0) ? -1 : sum("live"), waiting: sum("waiting"), longest_wait: worst,
  }];
}

function Unit({ unit }) {
  const capacity = unit.capacity || Math.max(unit.held, unit.leased, unit.live, 1);
  const needed = unit.live >= 0 ? unit.live : unit.leased;
  const free = Math.max(0, Math.max(unit.held, unit.leased) - needed);
  const size = unit.capacity ? bytesOf(needed, unit.capacity) : bytes(needed);
  const where = [unit.node, unit.tier !== "memory" && unit.tier, unit.drained && "drained"].filter(Boolean).join(", ");
  return html`<span>${unit.unit === null ? "" : `unit ${unit.unit} `}<span class="where">${where}</span></span>
    <${Bar} parts=${[["work", needed / capacity], ["m1", free / capacity]]} label=${`${size}, and ${bytes(free)} held free`} />
    <span>${size}</span>`;
}

function WaitingWriters({ units }) {
  const waiting = units.reduce((sum, each) => sum + each.waiting, 0);
  if (!waiting) return "No writer waits for space. ";
  const longest = Math.max(...units.map((each) => each.longest_wait));
  return html`<b>${counted(waiting, "writer")}</b> ${waiting === 1 ? "waits" : "wait"} for space, the first for ${duration(longest)}. `;
}

function Leases({ leases }) {
  const held = leases.filter((each) => each.count || each.rows);
  if (!held.length) return "No lease is in force. ";
  return html`Leases: ${held.map((each, at) => html`${at ? ", " : ""}<${Name} of=${each.task || "no task"} /> <b>${each.count < 0 ? counted(each.rows, "sample") : count(each.count)}</b>${
    each.oldest === null ? "" : ` (oldest ${duration(each.oldest)})`}`)}. `;
}

export class Memory extends Panel {
  render({ memory, partitions }) {
    const { units, leases, redelivered, lost, poison } = memory;
    return html`<section class="panel memory" aria-label="Memory">
      <h2>Memory <small>${bytes(partitions.bytes)} of values, ${counted(partitions.rows, "sample")}</small></h2>
      ${units.length
        ? html`<div class="bars">${joined(units).map((unit) => html`<${Unit} key=${`${unit.unit} ${unit.tier}`} unit=${unit} />`)}</div>
            <${Key} items=${[["work", "needed"], ["m1", "held, free"], ["m0", "not used yet"]]} />`
        : html`<p class="nothing">No storage unit has replied yet.</p>`}
      <p class="remark"><${WaitingWriters} units=${units} /><${Leases} leases=${leases} />Delivered again: <b>${count(redelivered)}</b>.
        Lost values: <b>${count(lost)}</b>. Poison: <b>${count(poison)}</b>.</p>
    </section>`;
  }
}
