/** Policy versions, the age of samples, and groups. */

import { Bar, Key, Name } from "../elements.js";
import { count, counted, duration, share } from "../format.js";
import { html, Panel } from "../html.js";

const MOST = 4; // ages that have a color of their own; the last one stands for all that are older
const OLDEST = 7; // the last age that is counted, with all that are older
const kindOf = (age) => `ages${Math.min(age, MOST)}`;

function Step({ age }) {
  const sum = age.counts.reduce((total, rows) => total + rows, 0) || 1;
  const words = age.counts.map((rows, old) => (rows ? `${share(rows / sum)} ${old} behind` : "")).filter(Boolean).join(", ");
  return html`<li title=${`version ${age.step}: ${words}`}>
    <div class="stack" role="img" aria-label=${`Version ${age.step}: ${words}`}>
      ${age.counts.map((rows, old) => rows > 0 && html`<i key=${old} class=${kindOf(old)} style=${{ height: `${(100 * rows) / sum}%` }}></i>`)}
    </div><b>${meanOf([age]).toFixed(1)}</b><br />${age.step}
  </li>`;
}

const rowsOf = (ages) => ages.reduce((sum, { counts }) => sum + counts.reduce((total, rows) => total + rows, 0), 0);

/** By how many versions claimed samples were behind, on average. */
const meanOf = (ages) => ages.reduce((sum, { counts }) => sum + counts.reduce((total, rows, old) => total + rows * old, 0), 0) / (rowsOf(ages) || 1);

/** The age of samples in numbers. */
function Behind({ policy, ages, last }) {
  const most = Math.max(...ages.map(({ counts }) => counts.findLastIndex((rows) => rows > 0)), 0);
  const [first, newest] = [ages[0].step, ages[ages.length - 1].step];
  return html`<p class="remark">The newest policy version is <b>${count(policy.version)}</b>. Samples that <${Name} of=${last || "no task"} /> claimed at
    ${first === newest ? ` version ${count(first)}` : ` versions ${count(first)} to ${count(newest)}`} were at most <b>${most}${most === OLDEST && " or more"}</b> and
    on average <b>${meanOf(ages).toFixed(1)}</b> versions behind.</p>`;
}

function Ages({ ages }) {
  const oldest = Math.max(...ages.map((each) => each.counts.length - 1), 0);
  const items = Array.from({ length: Math.min(oldest, MOST) + 1 }, (_, old) => [kindOf(old), old === MOST && oldest > MOST ? `${old} or more` : `${old}`]);
  items[items.length - 1][1] += " behind";
  return html`<div>
    <div class="caption">Versions behind: mean, by version when claimed</div>
    <ol class="columns">${ages.map((age) => html`<${Step} key=${age.step} age=${age} />`)}</ol>
    <${Key} items=${items} />
  </div>`;
}

function Groups({ groups }) {
  const sum = (name) => groups.reduce((total, each) => total + each[name], 0);
  return html`<div>
    <div class="caption">Groups of each partition${groups[0].task ? html`, with all fields for <${Name} of=${groups[0].task} />` : ""}</div>
    <div class="bars">${groups.map((each) => {
      const all = each.whole + each.lack_field + each.lack_member || 1;
      const words = `${count(each.whole)} complete, ${count(each.lack_field)} lack a field, ${count(each.lack_member)} lack members`;
      return html`<${Name} key=${each.partition} of=${each.partition} />
        <${Bar} parts=${[["m3", each.whole / all], ["wait", each.lack_field / all]]} label=${words} /><span>${count(each.whole)} of ${count(all)} complete</span>`;
    })}</div>
    <${Key} items=${[["m3", "all fields"], ["wait", "lack a field"], ["m0", "lack members"]]} />
    <p class="remark"><b>${count(sum("orphaned"))}</b> orphaned, <b>${count(sum("dropped"))}</b> dropped, <b>${count(sum("passed_over"))}</b> skipped.</p>
  </div>`;
}

function Admitted({ policy }) {
  if (policy.admit_max === null) return null;
  return html`<p class="remark"><${Name} of=${policy.partition} />: <b>${count(policy.admitted)}</b> of ${counted(policy.admit_max, "sample")} that this version admits.</p>`;
}

export class Policy extends Panel {
  render({ policy, ages, last, groups, now }) {
    const limit = policy && (policy.limit === null ? "no limit" : `limit ${policy.limit} behind`);
    const old = policy && policy.since !== null ? `, set ${duration(now - policy.since)} ago` : "";
    return html`<section class="panel policy" aria-label="Policy versions and groups">
      <h2>Policy versions and groups ${policy && html`<small>version ${count(policy.version)}${old}; ${limit}</small>`}</h2>
      ${!policy && html`<p class="nothing">No partition has a policy version: <code>set_policy_version</code> was not called, so no sample is too old.</p>`}
      ${!groups.length && html`<p class="nothing">No sample has a group.</p>`}
      <div class=${ages.length && groups.length ? "two" : ""}>
        ${ages.length > 0 && html`<${Ages} ages=${ages} />`}
        ${groups.length > 0 && html`<${Groups} groups=${groups} />`}
      </div>
      ${policy && ages.length > 0 && html`<${Behind} policy=${policy} ages=${ages} last=${last} />`}
      ${policy && !ages.length && html`<p class="remark">No sample with a policy version was claimed yet.</p>`}
      ${policy && html`<${Admitted} policy=${policy} />`}
    </section>`;
  }
}
