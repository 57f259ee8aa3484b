// Who wrote a token: a colour and an underline for each drafter, so that neither is needed alone.
import { make, part } from "./dom.js";

export const TARGET = "target";
const COLOURS = 7;

export class Drafters {
  constructor() {
    this.places = new Map();
  }

  /** The class of a drafter's tokens; one that was never met gets the next colour. */
  kind(name) {
    if (name === TARGET || !name) return "by-target";
    if (!this.places.has(name)) {
      this.places.set(name, this.places.size % COLOURS);
      this.drawLegend();
    }
    return `by-${this.places.get(name)}`;
  }

  meet(names) {
    for (const name of names) this.kind(name);
    this.drawLegend();
  }

  drawLegend() {
    const entry = (kind, sample, words) =>
      make("li", {}, make("span", { class: `token ${kind}`, "aria-hidden": "true" }, sample), words);
    const rows = [...this.places.keys()].map((name) => entry(this.kind(name), "abc", name));
    part("legend").replaceChildren(entry("by-target", "abc", "the model itself"), ...rows);
  }
}
