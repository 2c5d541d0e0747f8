/** The stream of the server: open while the tab is visible, and opened again when it breaks. */

import { fetchRefusal } from "./api.js";
import { measured } from "./canvas.js";

const SILENT = 12; // seconds without a message until a connection counts as lost; the server sends at least each 5 s
const PAUSES = [500, 1000, 2000, 3000, 5000]; // milliseconds before an attempt to connect

export class Stream {
  /** @param {import("./store.js").Store} store */
  constructor(store, url = "api/live") {
    this.store = store;
    this.url = url;
    this.source = null;
    this.failures = 0;
    this.timer = 0;
    this.heardAt = 0;
  }

  start() {
    document.addEventListener("visibilitychange", () => (document.hidden ? this.close() : this.open()));
    window.addEventListener("pagehide", () => this.close());
    window.addEventListener("pageshow", () => this.open());
    window.setInterval(() => this.watch(), 1000);
    this.open();
  }

  open() {
    if (this.source || document.hidden) return;
    window.clearTimeout(this.timer);
    this.heard();
    const source = (this.source = new EventSource(this.url));
    source.addEventListener("full", (event) => this.take(source, event, "takeFull"));
    source.addEventListener("delta", (event) => this.take(source, event, "takeDelta"));
    source.addEventListener("bye", (event) => this.take(source, event, "takeBye"));
    source.addEventListener("error", () => this.failed(source));
  }

  close() {
    window.clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }

  take(source, event, method) {
    if (source !== this.source) return;
    this.failures = 0;
    this.heard();
    measured("event", () => this.store[method](JSON.parse(event.data)));
  }

  heard() {
    this.heardAt = performance.now();
  }

  /** An EventSource stops permanently after an answer such as 503, so a new one is needed. */
  failed(source) {
    if (source !== this.source) return;
    const refused = source.readyState === EventSource.CLOSED; // by an answer, and not because nothing answers
    this.close();
    this.store.setConnection("lost");
    if (refused) fetchRefusal(this.url).then((words) => this.store.setRefusal(words), () => this.store.setRefusal(""));
    const pause = PAUSES[Math.min(this.failures, PAUSES.length - 1)];
    this.failures += 1;
    this.timer = window.setTimeout(() => this.open(), pause);
  }

  watch() {
    if (this.source && performance.now() - this.heardAt > 1000 * SILENT) this.failed(this.source);
    else if (this.store.connection === "lost") this.store.tell(); // the age of the data grows
  }
}
