/** The canvas of the matrix: partitions beside each other; rows are fields, then tasks; a column is one or more samples. */

import { colors, fitted, MONO, prepare, SANS } from "../canvas.js";
import { count, plain } from "../format.js";

const TOP = 20;
const BETWEEN = 7; // partitions
const SEPARATION = 9; // of fields and tasks

/** The rows of the matrix: the fields of all partitions in the order of the flow, then the tasks. */
export function rowsOfAll(matrices, fieldOrder) {
  const fields = new Set(fieldOrder.filter((name) => matrices.some((each) => each.fields.some((field) => field.name === name))));
  const tasks = new Set();
  for (const matrix of matrices) {
    for (const field of matrix.fields) fields.add(field.name);
    for (const task of matrix.tasks) tasks.add(task.name);
  }
  return { fields: [...fields].slice(0, 50), tasks: [...tasks].slice(0, 16) };
}

/** Where everything stands, for the pointer and for the drawing. */
export function planOf(width, partitions, rows) {
  const narrow = width < 560;
  const label = narrow ? 88 : 108;
  const part = (width - label - BETWEEN * (partitions - 1)) / Math.max(1, partitions);
  const row = narrow ? 17 : 15;
  const number = rows.fields.length + rows.tasks.length;
  return { label, part, row, number, split: rows.fields.length, narrow, height: TOP + number * row + SEPARATION + 4 };
}

const topOf = (plan, row) => TOP + row * plan.row + (row >= plan.split ? SEPARATION : 0);
const leftOf = (plan, partition) => plan.label + partition * (plan.part + BETWEEN);

/** The number of columns that a partition has room for. */
export const columnsFor = (plan) => Math.max(16, Math.min(1024, Math.floor(plan.part * Math.min(2, window.devicePixelRatio || 1))));

/** @returns {{partition: number, column: number, row: number} | null} What is under a point of the canvas. */
export function hit(plan, matrices, x, y) {
  const partition = Math.floor((x - plan.label) / (plan.part + BETWEEN));
  const matrix = matrices[partition];
  if (x < plan.label || !matrix) return null;
  const column = Math.floor(((x - leftOf(plan, partition)) / plan.part) * matrix.columns);
  if (column < 0 || column >= matrix.columns) return null;
  const below = y - TOP - (y >= topOf(plan, plan.split) ? SEPARATION : 0);
  return { partition, column, row: Math.max(0, Math.min(plan.number - 1, Math.floor(below / plan.row))) };
}

/** The middle of a cell. */
export function middle(plan, matrices, { partition, column, row }) {
  const width = plan.part / matrices[partition].columns;
  return { x: leftOf(plan, partition) + (column + 0.5) * width, y: topOf(plan, row) + plan.row / 2 };
}

/** Stack the shares of each column from the bottom of its cell, the first kind lowest. */
function drawCells(pen, kinds, left, top, height, columnWidth, columns) {
  const filled = new Float32Array(columns);
  for (const [color, runs] of kinds) {
    pen.fillStyle = color;
    for (const [first, length, value] of runs) {
      if (!value) continue;
      if (value === 255) {
        pen.fillRect(left + first * columnWidth, top, length * columnWidth + 0.35, height);
        continue;
      }
      const part = Math.max(0.18, value / 255); // so that one of many is seen
      for (let column = first; column < Math.min(first + length, columns); column += 1) {
        const share = Math.min(part, 1 - filled[column]);
        pen.fillRect(left + column * columnWidth, top + height * (1 - filled[column] - share), columnWidth + 0.35, height * share);
        filled[column] += share;
      }
    }
  }
}

function drawPartition(pen, plan, matrix, rows, left, color) {
  pen.font = `600 12px ${SANS}`;
  pen.fillStyle = color.ink;
  const name = fitted(pen, plain(matrix.partition), plan.part);
  const width = pen.measureText(name).width;
  pen.fillText(name, left, 8);
  pen.font = `11.5px ${SANS}`;
  pen.fillStyle = color.muted;
  const all = matrix.rows + matrix.reserved;
  pen.fillText(fitted(pen, matrix.reserved ? `${count(matrix.rows)} of ${count(all)} put` : `${count(matrix.rows)} put`, plan.part - width - 8), left + width + 7, 8);
  const fields = new Map(matrix.fields.map((each) => [each.name, each]));
  const tasks = new Map(matrix.tasks.map((each) => [each.name, each]));
  const columnWidth = plan.part / Math.max(1, matrix.columns);
  const height = plan.row - 2;
  rows.fields.forEach((each, at) => {
    const field = fields.get(each);
    pen.fillStyle = color.m0;
    pen.fillRect(left, topOf(plan, at), plan.part, height);
    if (field) drawCells(pen, [[color.m4, field.lost], [color.m1, field.share]], left, topOf(plan, at), height, columnWidth, matrix.columns);
  });
  rows.tasks.forEach((each, place) => {
    const task = tasks.get(each);
    const top = topOf(plan, rows.fields.length + place);
    pen.fillStyle = color.m0;
    pen.fillRect(left, top, plan.part, height);
    if (task) drawCells(pen, [[color.m3, task.consumed], [color.m2, task.claimed], [color.m1, task.ready], [color.m5, task.passed]], left, top, height, columnWidth, matrix.columns);
  });
}

/** Draw the matrix. `cursor`: the cell that the keyboard is at, or null. */
export function draw(canvas, matrices, rows, cursor) {
  const plan = planOf(canvas.clientWidth, matrices.length, rows);
  const { pen, width } = prepare(canvas, plan.height);
  const color = colors();
  matrices.forEach((matrix, at) => drawPartition(pen, plan, matrix, rows, leftOf(plan, at), color));
  pen.font = `11.5px ${MONO}`;
  pen.fillStyle = color.ink;
  pen.textAlign = "right";
  [...rows.fields, ...rows.tasks].forEach((name, at) => pen.fillText(fitted(pen, plain(name) || "no task", plan.label - 8), plan.label - 7, topOf(plan, at) + plan.row / 2 - 1));
  pen.textAlign = "left";
  if (rows.fields.length && rows.tasks.length) {
    const line = Math.round(TOP + plan.split * plan.row + SEPARATION / 2 - 1) + 0.5;
    pen.strokeStyle = color.line;
    pen.beginPath();
    pen.moveTo(0, line);
    pen.lineTo(width, line);
    pen.stroke();
  }
  if (cursor) {
    const { x, y } = middle(plan, matrices, cursor);
    const wide = Math.max(3, plan.part / matrices[cursor.partition].columns);
    pen.strokeStyle = color.focus;
    pen.lineWidth = 2;
    pen.strokeRect(x - wide / 2 - 1, TOP - 2, wide + 2, plan.height - TOP);
    pen.strokeRect(x - wide / 2 - 4, y - plan.row / 2 - 1, wide + 8, plan.row);
  }
  return plan;
}
