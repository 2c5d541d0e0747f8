/** The canvas of the timeline: a line for each rank, or for a band of ranks, over the last five minutes. */

import { channels, colors, fitted, prepare, SANS } from "../canvas.js";
import { hourAndMinute, plain, share } from "../format.js";

export const [IDLE, WORKS, HELD, WAITS, GONE] = [0, 1, 2, 3, 4];
const THIN = 2.6; // the height of waiting, in pixels
const HEAD = 14;
const BAND = 22; // the height of a band
const GAP = 7; // between tasks
const VERSIONS = 15; // the height of the line of policy versions
const LEVELS = 5;

/** @returns {object} The place of each lane. `ratio`: pixels of the screen in one of the canvas. */
export function planOf(width, timeline, history) {
  const row = timeline.lanes.length > 40 ? 6 : 8;
  const rows = [];
  const head = HEAD + (timeline.versions.length ? VERSIONS : 0);
  let y = head;
  let last = null;
  timeline.lanes.forEach((lane, at) => {
    if (last !== null && last !== lane.task) {
      const used = y - rows.find((each) => each.lane.task === last).y;
      y += GAP + Math.max(0, 24 - used); // space for the name of a task with one rank
    }
    const height = lane.ranks > 1 ? BAND : row;
    rows.push({ lane, at, y, height, first: last !== lane.task });
    last = lane.task;
    y += height;
  });
  const label = width < 560 ? 92 : 108;
  return { rows, head, label, width, history, ratio: window.devicePixelRatio || 1, height: Math.max(y + 10, 60), begin: timeline.until - history, end: timeline.until };
}

export const xOf = (plan, time) => plan.label + ((time - plan.begin) / plan.history) * (plan.width - plan.label);
export const timeAt = (plan, x) => plan.begin + ((x - plan.label) / (plan.width - plan.label)) * plan.history;

/** @returns {object | undefined} The span of a lane at a time. */
export function spanAt(lane, time) {
  let [low, high] = [0, lane.spans.length];
  while (low < high) {
    const half = (low + high) >> 1;
    if (lane.spans[half][1] <= time) low = half + 1;
    else high = half;
  }
  const span = lane.spans[low];
  return span && span[0] <= time ? span : undefined;
}

/** @returns {number[]} How many of the seconds between two times a lane was in each state. */
export function secondsIn(lane, begin, end) {
  const seconds = [0, 0, 0, 0, 0];
  const { spans } = lane;
  for (let at = 0; at < spans.length; at += 1) {
    const span = spans[at];
    const long = (span[1] < end ? span[1] : end) - (span[0] > begin ? span[0] : begin);
    if (long > 0) seconds[span[2]] += long;
  }
  for (const [, works, waits, held, gone] of lane.band) {
    seconds[WORKS] += (works / 100) * lane.ranks;
    seconds[WAITS] += (waits / 100) * lane.ranks;
    seconds[HELD] += (held / 100) * lane.ranks;
    seconds[GONE] += (gone / 100) * lane.ranks;
  }
  return seconds;
}

/** @returns {number} How much of a pixel is covered, as one of a few levels, so that neighbors are drawn together. */
const levelOf = (part) => (part < 0.02 ? 0 : Math.min(LEVELS, Math.ceil((part + 0.1) * LEVELS)));

/** @returns {Uint32Array} The pixel of each level of a color. */
function shadesOf(fill) {
  const shades = new Uint32Array(LEVELS + 1);
  const bytes = new Uint8ClampedArray(shades.buffer);
  for (let level = 1; level <= LEVELS; level += 1) bytes.set([...channels(fill), (255 * level) / LEVELS], 4 * level);
  return shades;
}

const strip = document.createElement("canvas");

/** Draw a row of pixels, each as far as it is covered, as one image: a rectangle for each span takes several times as long. */
function drawPixels(pen, pixels, fill, plan, y, height) {
  if (strip.width !== pixels.length) [strip.width, strip.height] = [pixels.length, 1];
  const image = new ImageData(pixels.length, 1);
  const dots = new Uint32Array(image.data.buffer);
  const shades = shadesOf(fill);
  for (let at = 0; at < pixels.length; at += 1) dots[at] = shades[levelOf(pixels[at])];
  strip.getContext("2d").putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(strip, plan.label, y, pixels.length / plan.ratio, height);
}

/** Cover the pixels from one place of a row to another. Spans do not overlap. */
function cover(pixels, left, right) {
  const [first, last] = [Math.floor(left), Math.floor(right)];
  if (first === last) {
    pixels[first] += right - left;
    return;
  }
  pixels[first] += first + 1 - left;
  for (let at = first + 1; at < last; at += 1) pixels[at] = 1;
  if (last < pixels.length) pixels[last] += right - last;
}

/** Draw the spans of a rank. A pixel may have many of them, so how much of it each state covers is added up. @returns what `secondsIn` does. */
function drawSpans(pen, plan, { lane, y, height }, color) {
  const fills = [null, color.work, color.held, color.wait, null];
  const covered = [null, null, null, null, null];
  const seconds = [0, 0, 0, 0, 0];
  const scale = ((plan.width - plan.label) * plan.ratio) / plan.history;
  for (let place = 0; place < lane.spans.length; place += 1) {
    const span = lane.spans[place];
    const state = span[2];
    const begin = span[0] > plan.begin ? span[0] : plan.begin;
    const end = span[1] < plan.end ? span[1] : plan.end;
    if (end <= begin) continue;
    seconds[state] += end - begin;
    if (!fills[state]) continue;
    covered[state] ??= new Float32Array(Math.ceil((plan.width - plan.label) * plan.ratio));
    cover(covered[state], (begin - plan.begin) * scale, (end - plan.begin) * scale);
  }
  covered.forEach((pixels, state) => {
    if (!pixels) return;
    const high = state === WORKS ? height - 2 : THIN;
    drawPixels(pen, pixels, fills[state], plan, y + (height - 2 - high) / 2, high);
  });
  return seconds;
}

/** A band: by the second, the share of its ranks in each state, stacked. @returns what `secondsIn` does. */
function drawBand(pen, plan, { lane, y, height }, color) {
  const kinds = [[1, color.work], [3, color.held], [2, color.wait]];
  const high = height - 2;
  pen.fillStyle = color.m0;
  pen.fillRect(Math.max(plan.label, xOf(plan, plan.begin)), y, plan.width - plan.label, high);
  const floors = lane.band.map(() => y + high);
  for (const [kind, fill] of kinds) {
    pen.fillStyle = fill;
    lane.band.forEach((point, at) => {
      const part = (high * point[kind]) / 100;
      if (part < 0.1) return;
      const left = Math.max(plan.label, xOf(plan, point[0] - 1));
      pen.fillRect(left, (floors[at] -= part), Math.min(plan.width, xOf(plan, point[0])) - left + 0.3, part);
    });
  }
  return secondsIn(lane, plan.begin, plan.end);
}

/** The names and shares of the tasks, on the left. */
function drawTasks(pen, plan, color) {
  for (const row of plan.rows.filter((each) => each.first)) {
    const all = plan.rows.filter((each) => each.lane.task === row.lane.task);
    const own = row.lane.single ? all : all.filter((each) => !each.lane.single); // the line above joins them already
    const sums = own.map((each) => each.seconds).reduce((a, b) => a.map((value, at) => value + b[at]));
    const lived = sums[IDLE] + sums[WORKS] + sums[HELD] + sums[WAITS] || 1;
    const label = plan.label - 26;
    pen.fillStyle = color.ink;
    pen.font = `600 12px ${SANS}`;
    pen.fillText(fitted(pen, plain(row.lane.task) || "no task", label), 0, row.y + 4);
    pen.fillStyle = color.muted;
    pen.font = `11px ${SANS}`;
    const part = (sums[WAITS] + sums[HELD]) / lived;
    const gone = own.filter((each) => each.lane.gone_at !== null).length;
    if (gone) pen.fillStyle = color.bad;
    pen.fillText(fitted(pen, gone ? `✕ ${gone} gone` : `${sums[HELD] > sums[WAITS] ? "held" : "waits"} ${share(part)}`, label), 0, row.y + 18);
  }
}

/** The ranks, on the left of their lanes; of crowded ones each second. */
function drawRanks(pen, plan, color, opened) {
  pen.fillStyle = color.muted;
  pen.font = `9px ${SANS}`;
  pen.textAlign = "right";
  let place = 0;
  for (const { lane, y, height, first } of plan.rows) {
    place = first ? 0 : place + 1;
    const words = lane.ranks > 1 ? `×${lane.ranks}` : lane.rank >= 0 ? String(lane.rank) : "";
    if (lane.ranks > 1) {
      pen.fillText(words, plan.label - 5, y + 6);
      pen.fillText(lane.task === opened ? "▾" : "▸", plan.label - 5, y + 16);
    } else if (place % 2 === 0) pen.fillText(words, plan.label - 5, y + height / 2);
    if (lane.single) pen.fillRect(plan.label - 3, y, 1, height);
  }
  pen.textAlign = "left";
}

function drawMinutes(pen, plan, timeline, color) {
  pen.font = `11.5px ${SANS}`;
  pen.lineWidth = 1;
  const now = timeline.origin + plan.end;
  for (let time = Math.ceil((now - plan.history) / 60) * 60; time < now; time += 60) {
    const x = Math.round(xOf(plan, time - timeline.origin)) + 0.5;
    pen.strokeStyle = color.line;
    pen.beginPath();
    pen.moveTo(x, plan.head);
    pen.lineTo(x, plan.height - 4);
    pen.stroke();
    pen.fillStyle = color.muted;
    if (x < plan.width - 18 && x > plan.label + 14) pen.fillText(hourAndMinute(time), x - 15, 6);
  }
}

/** A time of which nothing is known is hatched. */
function drawGaps(pen, plan, timeline, color) {
  for (const { start, end } of timeline.gaps) {
    const [left, right] = [Math.max(plan.label, xOf(plan, start - timeline.origin)), Math.min(plan.width, xOf(plan, end - timeline.origin))];
    if (right <= left) continue;
    pen.save();
    pen.beginPath();
    pen.rect(left, plan.head, Math.max(2, right - left), plan.height - plan.head - 8);
    pen.clip();
    pen.fillStyle = color.panel;
    pen.fill();
    pen.strokeStyle = color.muted;
    pen.lineWidth = 1;
    pen.beginPath();
    for (let x = left - plan.height; x < right; x += 6) {
      pen.moveTo(x, plan.height);
      pen.lineTo(x + plan.height, 0);
    }
    pen.stroke();
    pen.restore();
  }
}

/** A cross where a rank is gone. */
function drawGone(pen, plan, timeline, color) {
  for (const { lane, y, height } of plan.rows) {
    if (lane.gone_at === null || lane.ranks > 1) continue;
    const x = Math.max(plan.label + 1, Math.min(plan.width - 9, xOf(plan, lane.gone_at - timeline.origin)));
    const size = height - 2;
    pen.strokeStyle = color.bad;
    pen.lineWidth = 2;
    pen.beginPath();
    pen.moveTo(x + 1, y);
    pen.lineTo(x + 1 + size, y + size);
    pen.moveTo(x + 1 + size, y);
    pen.lineTo(x + 1, y + size);
    pen.stroke();
  }
}

/** When the policy version was set: ticks in a line of their own, above the lanes. */
function drawVersions(pen, plan, timeline, color) {
  if (!timeline.versions.length) return;
  pen.fillStyle = color.muted;
  pen.font = `11px ${SANS}`;
  pen.fillText("policy version", 0, HEAD + 4);
  pen.fillStyle = color.ink;
  let free = plan.label;
  for (const { t, version } of timeline.versions) {
    const x = xOf(plan, t - timeline.origin);
    if (x < plan.label) continue;
    pen.fillRect(x - 0.7, HEAD - 1, 1.4, 10);
    const words = `v${version}`;
    if (x < free || x + 3 + pen.measureText(words).width > plan.width) continue;
    pen.fillText(words, x + 3, HEAD + 4);
    free = x + pen.measureText(words).width + 7;
  }
}

/** Draw the timeline. `cursor`: {row, time} that the keyboard is at, or null. `opened`: the task whose single ranks are shown. */
export function draw(canvas, timeline, history, cursor, opened) {
  const plan = planOf(canvas.clientWidth, timeline, history);
  const { pen } = prepare(canvas, plan.height);
  const color = colors();
  if (!plan.rows.length || plan.width < plan.label + 20) return plan; // too narrow to be visible
  drawMinutes(pen, plan, timeline, color);
  for (const row of plan.rows) row.seconds = (row.lane.ranks > 1 ? drawBand : drawSpans)(pen, plan, row, color);
  drawGaps(pen, plan, timeline, color);
  drawTasks(pen, plan, color);
  drawRanks(pen, plan, color, opened);
  drawVersions(pen, plan, timeline, color);
  drawGone(pen, plan, timeline, color);
  if (cursor) {
    const { y, height } = plan.rows[cursor.row];
    pen.strokeStyle = color.focus;
    pen.lineWidth = 2;
    pen.strokeRect(xOf(plan, cursor.time) - 3, y - 2, 6, height + 2);
  }
  return plan;
}
