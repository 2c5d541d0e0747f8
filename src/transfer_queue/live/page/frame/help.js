/** The keys of the page. */

import { Component, html } from "../html.js";

const KEYS = [
  ["/", "search a sample by index or key"], ["space", "pause, go on"], ["w", "to the first wait"], ["m", "to the matrix"], ["t", "to the timeline"],
  ["arrow keys", "move in the matrix and the timeline; in a sample: the one before, the next one"], ["Enter", "open the sample; in the timeline: the ranks of a line of many"], ["Esc", "close"], ["?", "this help"],
];
const WORDS = [
  ["works", "A claim was answered, and the rank has not asked for more yet. A rank that only puts works unless it is held back."],
  ["waits", "A claim is open: samples are missing."], ["held back", "A put waits for room, or for a newer policy version."],
  ["gone", "The connection ended, and the client had not closed it."],
];

export class Help extends Component {
  componentDidMount() {
    this.returnTo = document.activeElement;
    this.dialog.showModal();
  }

  componentWillUnmount() {
    this.returnTo?.focus?.();
  }

  render({ close }) {
    return html`<dialog class="help" aria-label="Help" ref=${(dialog) => (this.dialog = dialog)} onClose=${close}
        onClick=${(event) => { if (event.target === this.dialog) this.dialog.close(); }}>
      <div class="inside" tabindex="-1">
        <div class="top"><h2>Help</h2><button type="button" onClick=${() => this.dialog.close()}>Close <kbd>Esc</kbd></button></div>
        <dl>${KEYS.map(([key, words]) => html`<dt key=${key}><kbd>${key}</kbd></dt><dd>${words}</dd>`)}</dl>
        <dl>${WORDS.map(([word, words]) => html`<dt key=${word}><b>${word}</b></dt><dd>${words}</dd>`)}</dl>
      </div></dialog>`;
  }
}
