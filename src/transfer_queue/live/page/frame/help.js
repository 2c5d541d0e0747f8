/** The keys of the page. */

import { Component, html } from "../html.js";

const KEYS = [
  ["/", "search a sample by index or key"], ["space", "pause or continue"], ["w", "go to the first wait"], ["m", "go to the matrix"], ["t", "go to the timeline"],
  ["arrow keys", "move in the matrix and the timeline; in a sample: go to the previous or the next sample"], ["Enter", "open the sample; in the timeline: open the ranks of a band"], ["Esc", "close"], ["?", "this help"],
];
const WORDS = [
  ["works", "A claim was answered, and the rank has not asked for more yet. A rank that only puts works unless it is held back."],
  ["waits", "A claim is open: samples are missing."], ["held back", "A put waits for space, or for a newer policy version."],
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
