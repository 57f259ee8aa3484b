// A strip of rounds: how many tokens were guessed in each, and how many stood.
import { make } from "./dom.js";

const TALLEST = 16; // guesses; what is more is drawn no higher

export class Strip {
  constructor(drafters) {
    this.drafters = drafters;
    this.guessed = 0;
    this.stood = 0;
    this.element = make("div", { class: "strip", role: "img" });
    this.describe();
  }

  add(rounds) {
    for (const round of rounds ?? []) {
      this.guessed += round.drafted;
      this.stood += round.accepted;
      this.element.append(this.column(round));
    }
    this.describe();
    this.element.scrollLeft = this.element.scrollWidth;
  }

  column(round) {
    const place = this.element.childElementCount;
    const found = make("i", { class: `round ${this.drafters.kind(round.drafter)}`, "data-round": place });
    found.style.setProperty("--guessed", Math.min(TALLEST, round.drafted));
    found.style.setProperty("--stood", round.drafted ? round.accepted / round.drafted : 0);
    return found;
  }

  describe() {
    const rounds = this.element.childElementCount;
    this.element.setAttribute("aria-label", `${rounds} rounds, ${this.guessed} tokens guessed, ${this.stood} stood`);
  }
}
