/** Preact and htm, bound to each other: `html` makes the elements of every panel. */

import { Component, createElement, render } from "./vendor/preact.mjs";
import htm from "./vendor/htm.mjs";

export const html = htm.bind(createElement);
export { Component, render };

/** A component that is drawn again only when its state or one of its properties is another object or value. */
export class Panel extends Component {
  shouldComponentUpdate(next, state) {
    const before = this.props;
    return state !== this.state || Object.keys(next).some((key) => next[key] !== before[key]) || Object.keys(before).some((key) => !(key in next));
  }
}
