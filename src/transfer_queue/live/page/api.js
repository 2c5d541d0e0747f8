/** Requests to the server of the page, except the stream. */

/** An answer other than 200 or 304, with the reason that the server gave. */
class RequestError extends Error {}

function address(path, parameters) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== undefined && value !== null && value !== "") search.set(name, value);
  }
  return `${path}?${search}`;
}

async function failed(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return new RequestError(error || `the server answered ${response.status}`);
  } catch {
    return new RequestError(text.slice(0, 300) || `the server answered ${response.status}`);
  }
}

async function answerOf(url) {
  const response = await fetch(url, { headers: { Accept: "application/json" } });
  if (!response.ok) throw await failed(response);
  return response.json();
}

const fetchJson = (path, parameters) => answerOf(address(path, parameters));

/** Single ranks of a line that joins many. `after`: the `epoch` of the previous answer, "" to get everything. */
export const fetchLanes = (task, from, count, after) => answerOf(`api/lanes?${new URLSearchParams({ task, from, count, after })}`);

/** One sample: its fields, tags, group and history. `which` has an index or a key. */
export const fetchSample = (partition, which) => fetchJson("api/sample", { partition, ...which });

/** Why a sample is not where it should be, in words. */
export const fetchExplanation = (partition, which, task) => fetchJson("api/explain", { partition, ...which, task });

/** @returns {Promise<string>} Why the server refuses the stream, in its words; "" if it does not any more. */
export async function fetchRefusal(url) {
  const stop = new AbortController();
  const response = await fetch(url, { signal: stop.signal });
  if (!response.ok) return (await failed(response)).message;
  stop.abort();
  return "";
}

/** The cells of a partition, fetched again only if they have changed. */
export class MatrixRequest {
  constructor() {
    this.etag = null;
    this.address = null;
  }

  /** @returns {Promise<object | null>} The matrix; null if it is the one that was fetched before. */
  async fetch(parameters) {
    const url = address("api/matrix", parameters);
    const known = url === this.address && this.etag;
    const response = await fetch(url, { headers: known ? { "If-None-Match": this.etag } : {}, cache: "no-store" });
    if (response.status === 304) return null;
    if (!response.ok) throw await failed(response);
    [this.address, this.etag] = [url, response.headers.get("ETag")];
    return response.json();
  }
}
