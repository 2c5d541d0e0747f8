/** The page: it combines the panels, and handles the keys. */

import { note } from "./canvas.js";
import { plain } from "./format.js";
import { Banner, staleness } from "./frame/banner.js";
import { Empty } from "./frame/empty.js";
import { Header } from "./frame/header.js";
import { Help } from "./frame/help.js";
import { Component, html, render } from "./html.js";
import { Flow } from "./panels/flow.js";
import { Matrix } from "./panels/matrix.js";
import { Memory } from "./panels/memory.js";
import { Policy } from "./panels/policy.js";
import { Sample } from "./panels/sample.js";
import { Servers } from "./panels/servers.js";
import { Steps } from "./panels/steps.js";
import { Timeline } from "./panels/timeline.js";
import { announcementOf, titleOf, Verdict } from "./panels/verdict.js";
import { Waits } from "./panels/waits.js";
import { Store } from "./store.js";
import { Stream } from "./stream.js";

const TALL = 32; // a timeline with more lines than this is next to two panels

const dark = window.matchMedia("(prefers-color-scheme: dark)");

/** The theme that the reader has chosen on this page; null if none. */
function chosenTheme() {
  try {
    return window.localStorage.getItem("theme");
  } catch {
    return null; // the browser forbids storage
  }
}

function keepTheme(theme) {
  try {
    window.localStorage.setItem("theme", theme);
  } catch {
    // the choice lasts as long as the page
  }
}

/** The width that the flow graph has, from the width of the window and the borders of style.css. */
function graphWidth() {
  const window_ = document.documentElement.clientWidth;
  if (window_ <= 560) return window_ - 12 - 20;
  if (window_ <= 1100) return window_ - 24 - 26;
  return ((window_ - 34) * 1.36) / 2.36 - 26;
}

function openingWords(store) {
  if (store.data?.state?.words) return plain(store.data.state.words);
  if (store.refusal) return `The server of this page refuses: ${plain(store.refusal).replace(/\.$/, "")}.`;
  return store.connection === "lost" ? "The server of this page does not reply. The page tries again automatically." : "Opening the live page …";
}

class Page extends Component {
  constructor(props) {
    super(props);
    this.state = { frozen: null, which: null, help: false, theme: chosenTheme() ?? (dark.matches ? "dark" : "light"), width: graphWidth() };
    this.open = (which) => this.setState({ which });
    this.pause = () => this.setState(({ frozen }) => ({ frozen: frozen ? null : props.store.data }));
    this.help = () => this.setState({ help: true });
    this.theme = () => this.setState(({ theme }) => {
      const other = theme === "dark" ? "light" : "dark";
      keepTheme(other);
      return { theme: other };
    });
  }

  componentDidMount() {
    this.props.store.subscribe(() => this.forceUpdate());
    dark.addEventListener("change", () => chosenTheme() ?? this.setState({ theme: dark.matches ? "dark" : "light" }));
    window.addEventListener("resize", () => this.setState({ width: graphWidth() }));
    document.addEventListener("keydown", (event) => this.press(event));
    document.addEventListener("click", (event) => this.click(event));
  }

  componentDidUpdate() {
    performance.clearMeasures("page");
    performance.measure("page", { start: this.renderedAt }); // with the canvases, which were drawn before
    const data = this.state.frozen ?? this.props.store.data;
    if (!data?.verdict) return;
    document.title = titleOf(data.verdict, data.system, data.state.state);
    this.announce(data);
  }

  /** Announce the state and the slowest stage when one of them has changed, but not every number. */
  announce(data) {
    const why = staleness(data, this.props.store.connection);
    const words = { lost: "The server of this page does not reply.", restarting: "The controller does not reply.", ended: "The system has ended." }[why]
      ?? announcementOf(data.verdict);
    const element = document.getElementById("announcement");
    if (element.textContent !== words) element.textContent = words;
  }

  click(event) {
    const link = event.target.closest?.("[data-index]");
    if (link) this.open({ partition: link.dataset.partition, index: Number(link.dataset.index) });
  }

  press(event) {
    if (event.key === "Escape") note("");
    if (this.state.which || this.state.help || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.matches("input, select, textarea, button, summary")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const act = {
      "/": () => document.getElementById("find")?.focus(),
      " ": this.pause,
      "?": this.help,
      m: () => document.getElementById("matrix")?.focus(),
      t: () => document.getElementById("timeline")?.focus(),
      w: () => document.querySelector(".waits [data-index]")?.focus(),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  render({ store }, { frozen, which, help, theme, width }) {
    this.renderedAt = performance.now();
    document.documentElement.dataset.theme = theme;
    const data = frozen ?? store.data;
    if (!data?.verdict) return html`<p class="loading">${openingWords(store)}</p>`;
    const why = staleness(data, store.connection);
    const stale = why !== null && why !== "snapshot";
    const empty = data.state.state === "empty" || (why === "snapshot" && !data.tasks.length && !data.partitions.count);
    const tasks = data.tasks.filter((task) => task.takes.length).map((task) => task.name);
    return html`<div class=${stale ? "stale" : ""}>
      <a class="skip" href="#content">Skip to the content</a>
      <${Header} data=${data} connection=${store.connection} paused=${frozen !== null} dark=${theme === "dark"} open=${this.open} pause=${this.pause} theme=${this.theme} help=${this.help} />
      <${Banner} data=${data} why=${why} age=${store.age()} refusal=${store.refusal} />
      ${empty ? html`<${Empty} data=${data} />` : html`<${Panels} data=${data} theme=${theme} width=${width} active=${!frozen && !stale} stale=${stale} open=${this.open} />`}
      <footer><span>Shares and rates are of the last ${data.system.window} s. transfer_queue ${plain(data.system.version)}; ${plain(data.system.describe)}</span>
        <span class="wide"><kbd>/</kbd> sample <kbd>space</kbd> pause <kbd>w</kbd> first wait <kbd>m</kbd> matrix <kbd>t</kbd> timeline <kbd>?</kbd> help</span></footer>
      ${which && html`<${Sample} which=${which} tasks=${tasks.length ? tasks : [data.verdict.last]} last=${data.verdict.last || tasks[tasks.length - 1]} open=${this.open} close=${() => this.setState({ which: null })} />`}
      ${help && html`<${Help} close=${() => this.setState({ help: false })} />`}
    </div>`;
  }
}

function Panels({ data, theme, width, active, stale, open }) {
  const { now, verdict, tasks, memory, partitions, policy, system } = data;
  const { window: seconds, history } = system;
  const lanes = data.timeline.lanes.length;
  return html`<main id="content" tabindex="-1" class=${lanes > TALL ? "tall" : lanes ? "" : "flat"}>
    <${Verdict} verdict=${verdict} rates=${data.rates} step=${data.step} tasks=${tasks} servers=${data.servers} memory=${memory} queues=${data.queues} />
    <${Flow} tasks=${tasks} fields=${data.fields} queues=${data.queues} life=${data.life} verdict=${verdict} policy=${policy} now=${now} window=${seconds} width=${width} />
    <${Matrix} partitions=${partitions} fields=${data.fields} tasks=${tasks} last=${verdict.last} active=${active} stale=${stale} open=${open} theme=${theme} width=${width} />
    <div class="side">
      <${Waits} waits=${data.waits} verdict=${verdict} memory=${memory} now=${now} window=${seconds} />
      <${Steps} steps=${data.steps} now=${now} />
    </div>
    <${Timeline} timeline=${data.timeline} history=${history} active=${active} theme=${theme} width=${width} />
    <div class="bottom">
      <${Policy} policy=${policy} ages=${data.ages} last=${verdict.last} groups=${data.groups} now=${now} />
      <${Memory} memory=${memory} partitions=${partitions} />
      <${Servers} servers=${data.servers} />
    </div>
  </main>`;
}

const store = new Store();
render(html`<${Page} store=${store} />`, document.getElementById("page"));
new Stream(store).start();
