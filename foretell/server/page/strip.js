// A strip of steps: the drafted and accepted tokens of each.
import { make } from "./dom.js";
import { count } from "./format.js";

const TALLEST = 16; // draft tokens; columns are not drawn higher

export class Strip {
  constructor(drafters) {
    this.drafters = drafters;
    this.drafted = 0;
    this.accepted = 0;
    this.element = make("div", { class: "strip", role: "img" });
    this.describe();
  }

  add(rounds) {
    for (const round of rounds ?? []) {
      this.drafted += round.drafted;
      this.accepted += round.accepted;
      this.element.append(this.column(round));
    }
    this.describe();
    this.element.scrollLeft = this.element.scrollWidth;
  }

  column(round) {
    const index = this.element.childElementCount;
    const found = make("i", { class: `round ${this.drafters.kind(round.drafter)}`, "data-round": index });
    found.style.setProperty("--drafted", Math.min(TALLEST, round.drafted));
    found.style.setProperty("--accepted", round.drafted ? round.accepted / round.drafted : 0);
    return found;
  }

  describe() {
    const rounds = this.element.childElementCount;
    this.element.setAttribute("aria-label", `${count(rounds, "step")}, ${count(this.drafted, "draft token")}, ${this.accepted} accepted`);
  }
}
