// The origin of a token: a colour and an underline for each drafter, so that colour is not needed alone.
import { make, part } from "./dom.js";

export const TARGET = "target";
const COLOURS = 7;

export class Drafters {
  constructor() {
    this.colours = new Map();
  }

  /** Return the CSS class of a drafter's tokens; a new drafter gets the next colour. */
  kind(name) {
    if (name === TARGET || !name) return "by-target";
    if (!this.colours.has(name)) {
      this.colours.set(name, this.colours.size % COLOURS);
      this.drawLegend();
    }
    return `by-${this.colours.get(name)}`;
  }

  register(names) {
    for (const name of names) this.kind(name);
    this.drawLegend();
  }

  drawLegend() {
    const entry = (kind, sample, words) =>
      make("li", {}, make("span", { class: `token ${kind}`, "aria-hidden": "true" }, sample), words);
    const rows = [...this.colours.keys()].map((name) => entry(this.kind(name), "abc", name));
    part("legend").replaceChildren(entry("by-target", "abc", "target model"), ...rows);
  }
}
