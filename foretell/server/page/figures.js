// The panel of live figures.
import { drawPlaces, drawSplit } from "./charts.js";
import { part } from "./dom.js";
import { fixed, times } from "./words.js";

export class Figures {
  constructor() {
    this.tally = null;
    this.due = false;
  }

  /** Show a tally, at most once a frame. */
  show(tally) {
    this.tally = tally;
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.due = false;
    const { speed, perStep, ratio, places, split } = this.tally;
    part("figure-speed").textContent = fixed(speed);
    part("figure-step").textContent = fixed(perStep, 2);
    part("figure-ratio").textContent = times(ratio);
    drawPlaces(part("figure-places"), places);
    drawSplit(part("figure-split"), split);
  }
}
