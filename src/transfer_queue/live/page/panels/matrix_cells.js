/** The cells of the matrix: run-length bytes of the server as runs of columns, and their meaning in words. */

import { count, plain } from "../format.js";

/** @returns {number[][]} [first column, number of columns, value 0 to 255] of base64 of (count, value) pairs. */
function runsOf(encoded) {
  if (!encoded) return [];
  const bytes = atob(encoded);
  const runs = [];
  let at = 0;
  for (let place = 0; place + 1 < bytes.length; place += 2) {
    const [length, value] = [bytes.charCodeAt(place), bytes.charCodeAt(place + 1)];
    const last = runs[runs.length - 1];
    if (last && last[2] === value) last[1] += length;
    else runs.push([at, length, value]);
    at += length;
  }
  return runs;
}

/** @returns {number} The value of a column, 0 to 255. */
function valueAt(runs, column) {
  const run = runs.find((each) => column >= each[0] && column < each[0] + each[1]);
  return run ? run[2] : 0;
}

/** @returns {object} The answer of the server with its runs decoded. */
export function decoded(answer) {
  const field = ({ name, rows, share, lost }) => ({ name, rows, share: runsOf(share), lost: runsOf(lost) });
  const task = ({ name, ...runs }) => ({ name, ready: runsOf(runs.ready), claimed: runsOf(runs.claimed), consumed: runsOf(runs.consumed), passed: runsOf(runs.passed) });
  return { ...answer, fields: answer.fields.map(field), tasks: answer.tasks.map(task) };
}

/** @returns {number} The global index of the first row of a column. */
export function indexOf(matrix, column) {
  let entry = matrix.index[0] ?? [0, 0, matrix.column_rows];
  for (const each of matrix.index) if (each[0] <= column) entry = each;
  return entry[1] + entry[2] * (column - entry[0]);
}

/** @returns {number} The rows of a column. */
const rowsOf = (matrix, column) => Math.max(0, Math.min(matrix.column_rows, matrix.stop - matrix.start - column * matrix.column_rows));

function amount(value, rows) {
  if (value === 255) return rows === 1 ? "yes" : `all ${count(rows)}`;
  if (value === 0) return "none";
  return `${count(Math.max(1, Math.min(rows - 1, Math.round((value / 255) * rows))))} of ${count(rows)}`;
}

function taskWords(task, column, rows) {
  const states = [["consumed", task.consumed], ["claimed", task.claimed], ["ready", task.ready], ["skipped", task.passed]];
  const words = states.map(([state, runs]) => [state, valueAt(runs, column)]).filter(([, value]) => value);
  return words.map(([state, value]) => (value === 255 ? state : `${amount(value, rows)} ${state}`)).join(", ") || "not ready";
}

/** @returns {string} What a column says, line by line; the line of `row` is first. */
export function columnWords(matrix, column, row) {
  const rows = rowsOf(matrix, column);
  const first = indexOf(matrix, column);
  const which = rows === 1 ? `sample ${count(first)}` : `${count(rows)} samples from ${count(first)} on`;
  const lines = matrix.fields.map((field) => {
    const lost = valueAt(field.lost, column);
    return [field.name, `${plain(field.name)}: ${amount(valueAt(field.share, column), rows)}${lost ? `, lost: ${amount(lost, rows)}` : ""}`];
  });
  for (const task of matrix.tasks) lines.push([`task ${task.name}`, `${plain(task.name) || "no task"}: ${taskWords(task, column, rows)}`]);
  const chosen = lines.filter(([name]) => name === row);
  const others = lines.filter(([name]) => name !== row).slice(0, 12);
  return [`${plain(matrix.partition)}, ${which}`, ...[...chosen, ...others].map(([, words]) => words)].join("\n");
}
