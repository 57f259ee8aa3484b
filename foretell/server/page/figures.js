// The panel of live statistics.
import { drawPositions, drawSplit } from "./charts.js";
import { part } from "./dom.js";
import { fixed, times } from "./format.js";

export class Figures {
  constructor() {
    this.stats = null;
    this.due = false;
  }

  /** Show statistics, at most once per frame. */
  show(stats) {
    this.stats = stats;
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.due = false;
    const { speed, perStep, ratio, positions, split } = this.stats;
    part("figure-speed").textContent = fixed(speed);
    part("figure-step").textContent = fixed(perStep, 2);
    part("figure-ratio").textContent = times(ratio);
    drawPositions(part("figure-positions"), positions);
    drawSplit(part("figure-split"), split);
  }
}
