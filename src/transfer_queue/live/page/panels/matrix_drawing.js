/** The canvas of the matrix: partitions next to each other; rows are fields, then tasks; a column is one or more samples. */

import { channels, colors, fitted, MONO, prepare, SANS } from "../canvas.js";
import { count, plain } from "../format.js";

const TOP = 20;
const BETWEEN = 7; // partitions
const SEPARATION = 20; // of fields and tasks, with the heading of the tasks

/** The rows of the matrix: the fields of all partitions in the order of the flow, then the tasks. */
export function rowsOfAll(matrices, fieldOrder, taskOrder) {
  const fields = new Set(fieldOrder.filter((name) => matrices.some((each) => each.fields.some((field) => field.name === name))));
  const tasks = new Set(taskOrder.filter((name) => matrices.some((each) => each.tasks.some((task) => task.name === name))));
  for (const matrix of matrices) {
    for (const field of matrix.fields) fields.add(field.name);
    for (const task of matrix.tasks) tasks.add(task.name);
  }
  return { fields: [...fields].slice(0, 50), tasks: [...tasks].slice(0, 16) };
}

/** The places of all parts, for the pointer and for the drawing. */
export function planOf(width, partitions, rows) {
  const narrow = width < 560;
  const label = narrow ? 88 : 108;
  const part = (width - label - BETWEEN * (partitions - 1)) / Math.max(1, partitions);
  const number = rows.fields.length + rows.tasks.length;
  const row = number > 30 ? 12 : narrow ? 17 : 15;
  return { label, part, row, number, split: rows.fields.length, narrow, height: TOP + number * row + SEPARATION + 4 };
}

const topOf = (plan, row) => TOP + row * plan.row + (row >= plan.split ? SEPARATION : 0);
const leftOf = (plan, partition) => plan.label + partition * (plan.part + BETWEEN);

/** The number of columns for which a partition has space. */
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

const word = (color) => {
  const [red, green, blue] = channels(color);
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0; // as the bytes of an image stand in memory
};

/**
 * Fill the cells of one row: stack the shares of each column from the bottom of its cell, the first kind lowest.
 * `pixels`: the image of a partition; `top` and `height`: of the row, in pixels of the image.
 */
function fillRow(pixels, width, top, height, kinds, columns, empty) {
  pixels.fill(empty, top * width, (top + height) * width);
  const filled = new Uint16Array(columns);
  for (const [color, runs] of kinds) {
    for (const [first, length, value] of runs) {
      if (!value) continue;
      for (let column = first; column < Math.min(first + length, columns); column += 1) {
        // one sample of many is visible, and all samples except one differ from all samples
        const share = value === 255 ? height : Math.max(2, Math.min(height - 1, Math.round((value / 255) * height)));
        const rows = Math.min(share, height - filled[column]);
        const left = Math.floor((column * width) / columns);
        const right = Math.max(left + 1, Math.floor(((column + 1) * width) / columns));
        for (let row = 0; row < rows; row += 1) {
          const line = (top + height - filled[column] - row - 1) * width;
          for (let x = line + left; x < line + right; x += 1) pixels[x] = color;
        }
        filled[column] += rows;
      }
    }
  }
}

/** The cells of a partition, as an image in the pixels of the screen. */
function drawCells(pen, plan, matrix, rows, left, color) {
  const ratio = pen.getTransform().a;
  const width = Math.max(1, Math.round(plan.part * ratio));
  const image = pen.createImageData(width, Math.round(plan.height * ratio));
  const pixels = new Uint32Array(image.data.buffer);
  const [empty, put, claimed, consumed, lost, passed] = ["m0", "m1", "m2", "m3", "m4", "m5"].map((name) => word(color[name]));
  const height = Math.round((plan.row - 2) * ratio);
  const topAt = (row) => Math.round(topOf(plan, row) * ratio);
  const columns = Math.max(1, matrix.columns);
  const fields = new Map(matrix.fields.map((each) => [each.name, each]));
  const tasks = new Map(matrix.tasks.map((each) => [each.name, each]));
  rows.fields.forEach((name, at) => {
    const field = fields.get(name);
    fillRow(pixels, width, topAt(at), height, field ? [[lost, field.lost], [put, field.share]] : [], columns, empty);
  });
  rows.tasks.forEach((name, at) => {
    const task = tasks.get(name);
    const kinds = task ? [[consumed, task.consumed], [claimed, task.claimed], [put, task.ready], [passed, task.passed]] : [];
    fillRow(pixels, width, topAt(rows.fields.length + at), height, kinds, columns, empty);
  });
  pen.putImageData(image, Math.round(left * ratio), 0);
}

function drawTitle(pen, plan, matrix, left, color) {
  pen.font = `600 12px ${SANS}`;
  pen.fillStyle = color.ink;
  const name = fitted(pen, plain(matrix.partition), plan.part);
  const width = pen.measureText(name).width;
  pen.fillText(name, left, 8);
  pen.font = `11.5px ${SANS}`;
  pen.fillStyle = color.muted;
  const words = matrix.reserved ? `${count(matrix.rows)} of ${count(matrix.rows + matrix.reserved)} put` : `${count(matrix.rows)} put`;
  const space = plan.part - width - 8;
  if (space > 30) pen.fillText(fitted(pen, words, space), left + width + 7, 8);
}

/** Draw the matrix. `cursor`: the cell that the keyboard is at, or null. */
export function draw(canvas, matrices, rows, cursor) {
  const plan = planOf(canvas.clientWidth, matrices.length, rows);
  const { pen, width } = prepare(canvas, plan.height);
  if (plan.part < 16) return plan; // too narrow to be visible
  const color = colors();
  matrices.forEach((matrix, at) => {
    drawCells(pen, plan, matrix, rows, leftOf(plan, at), color);
    drawTitle(pen, plan, matrix, leftOf(plan, at), color);
  });
  pen.font = `${plan.row < 15 ? 10 : 11.5}px ${MONO}`;
  pen.fillStyle = color.ink;
  pen.textAlign = "right";
  [...rows.fields, ...rows.tasks].forEach((name, at) => pen.fillText(fitted(pen, plain(name) || "no task", plan.label - 8), plan.label - 7, topOf(plan, at) + plan.row / 2 - 1));
  pen.font = `11px ${SANS}`;
  pen.fillStyle = color.muted;
  pen.textAlign = "left";
  if (rows.fields.length) pen.fillText("Fields", 0, 8);
  if (rows.tasks.length) pen.fillText("Tasks", 0, topOf(plan, plan.split) - 8);
  if (rows.fields.length && rows.tasks.length) {
    const line = Math.round(TOP + plan.split * plan.row + 2) + 0.5;
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
