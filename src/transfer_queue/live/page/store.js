/** The newest data of the server, combined from `full` and every `delta` since then (`payload.py` says how). */

const TOUCHING = 0.002; // seconds: spans of the same state that are this close are one

/** Cut the spans of a lane at `since` and append those that came. A cut span that continues becomes one span again. */
export function continueSpans(spans, added, since) {
  let end = spans.length;
  while (end > 0 && spans[end - 1][0] >= since) end -= 1;
  const kept = spans.slice(0, end);
  if (end > 0 && kept[end - 1][1] > since) kept[end - 1] = [kept[end - 1][0], since, kept[end - 1][2], kept[end - 1][3]];
  for (const span of added) {
    const before = kept[kept.length - 1];
    const same = before && before[2] === span[2] && before[3] === span[3] && span[0] - before[1] < TOUCHING;
    if (same) kept[kept.length - 1] = [before[0], span[1], span[2], span[3]];
    else kept.push(span);
  }
  return kept;
}

function continueLane(before, lane, since, oldest) {
  const known = before?.spans ?? [];
  let old = 0;
  while (old < known.length && known[old][1] < oldest) old += 1;
  const spans = continueSpans(old ? known.slice(old) : known, lane.spans, since);
  const points = (before?.band ?? []).filter((point) => point[0] < since);
  return { ...lane, spans, band: [...points, ...lane.band].filter((point) => point[0] >= oldest) };
}

/** @returns {object} The timeline with the changes of a `delta`. `history`: how many seconds are kept. */
export function continueTimeline(before, added, history) {
  const known = new Map((before?.lanes ?? []).map((lane) => [lane.id, lane]));
  const oldest = added.until - history;
  for (const lane of added.lanes) known.set(lane.id, continueLane(known.get(lane.id), lane, added.since, oldest));
  return { ...added, lanes: added.order.map((id) => known.get(id)).filter(Boolean) };
}

/** @returns {object[]} The rates with the points of a `delta`. */
export function continueRates(before, added, history) {
  if (!added.length) return before ?? [];
  const [first, last] = [added[0].t, added[added.length - 1].t];
  return [...(before ?? []).filter((point) => point.t < first && point.t > last - history), ...added];
}

export class Store {
  constructor() {
    /** @type {object | null} The last `LiveView` with all its parts; another object after each event. */
    this.data = null;
    /** @type {"opening" | "live" | "lost"} The connection to the server of the page. */
    this.connection = "opening";
    /** Why the server refuses the stream, in its words; "" if it does not reply at all. */
    this.refusal = "";
    /** When the data was last up to date, on the clock of this page, in seconds. */
    this.currentAt = 0;
    this.listeners = new Set();
  }

  /** @returns {number} For how many seconds the data has not been up to date. It does not use the clock of the browser's machine. */
  age() {
    return performance.now() / 1000 - this.currentAt;
  }

  subscribe(listener) {
    this.listeners.add(listener);
  }

  tell() {
    for (const listener of this.listeners) listener();
  }

  setConnection(connection) {
    if (connection === this.connection) return;
    this.connection = connection;
    this.tell();
  }

  setRefusal(words) {
    this.refusal = words;
    this.tell();
  }

  /** Take a `full`, which replaces everything. */
  takeFull(full) {
    const { timeline, system } = full;
    this.replace({ ...full, timeline: timeline && continueTimeline(null, timeline, system.history) });
  }

  /** Take a `delta`: each of its parts replaces the one that was known; rates and timeline are continued. */
  takeDelta(delta) {
    if (this.data === null) return;
    const next = { ...this.data, ...delta };
    const history = next.system?.history; // absent until the server of the page has reached the system
    if (delta.rates) next.rates = continueRates(this.data.rates, delta.rates, history);
    if (delta.timeline) next.timeline = continueTimeline(this.data.timeline, delta.timeline, history);
    this.replace(next);
  }

  /** Take a `bye`: the server of the page ends. The last data of the system stays. */
  takeBye() {
    this.setConnection("lost");
  }

  replace(data) {
    const newer = this.data === null || data.now > this.data.now;
    this.data = data;
    if (newer) this.currentAt = performance.now() / 1000;
    this.connection = "live";
    this.refusal = "";
    this.tell();
  }
}
