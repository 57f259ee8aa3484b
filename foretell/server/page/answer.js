// One answer of the model: its words, its rounds, and what became of it.
import { make } from "./dom.js";
import { Ledger } from "./ledger.js";
import { Strip } from "./strip.js";
import { Tally } from "./tally.js";
import { paint, roam } from "./tokens.js";
import { fixed, times, whole } from "./words.js";

export class Answer {
  constructor(drafters) {
    this.drafters = drafters;
    this.tokens = [];
    this.content = "";
    this.tally = new Tally();
    this.ledger = new Ledger();
    this.strip = new Strip(drafters);
    this.thoughts = make("div", { class: "text" });
    this.thinking = make("details", { class: "thoughts", hidden: true }, make("summary", {}, "Thoughts"), this.thoughts);
    this.text = make("div", { class: "text", tabindex: 0, role: "group", "aria-label": "Answer; arrow keys go through its tokens" });
    this.foot = make("p", { class: "foot" });
    this.note = make("p", { class: "note", hidden: true });
    roam(this.text);
    this.element = make(
      "article",
      { class: "message answer writing", "data-answer": true, "aria-label": "The model’s answer" },
      this.thinking,
      this.text,
      this.note,
      this.strip.element,
      this.foot,
    );
  }

  /** Take in a choice of a chunk. Its tokens are those of one round. */
  add(choice) {
    const round = this.tally.rounds.length;
    for (const detail of choice.token_details ?? []) {
      const token = { ...detail, place: this.tokens.length, round };
      this.tokens.push(token);
      this.ledger.push(token);
    }
    this.tally.add(choice.rounds);
    this.strip.add(choice.rounds);
    const { reasoning_content: thought, content } = choice.delta ?? { content: choice.text };
    if (thought) this.think(thought);
    if (content) {
      this.content += content;
      paint(this.text, this.ledger.take(content), this.drafters);
    }
    this.foot.textContent = this.footWords();
  }

  think(thought) {
    this.thinking.hidden = false;
    paint(this.thoughts, this.ledger.take(thought), this.drafters);
  }

  /** What an element of the message shows: a token and its round, or a round. */
  find(element) {
    const token = this.tokens[element.dataset.token] ?? null;
    const place = token ? token.round : Number(element.dataset.round);
    return { token, place, round: this.tally.rounds[place] };
  }

  /** What the last chunk says of the whole. */
  close(account) {
    const { rule, lossless } = account.speculation;
    const mark = lossless ? `rule ${rule}, lossless` : `rule ${rule}, lossy`;
    this.foot.replaceChildren(this.footWords(), " · ", make("span", { class: lossless ? "lossless" : "lossy" }, mark));
  }

  /** It is over, well or not. */
  end(words = "") {
    this.element.classList.remove("writing");
    this.note.textContent = words;
    this.note.hidden = !words;
  }

  footWords() {
    const { tokens, rounds, perStep, speed, ratio } = this.tally;
    const counts = `${whole(tokens)} tokens in ${whole(rounds.length)} rounds, ${fixed(perStep, 2)} each`;
    const pace = Number.isFinite(speed) ? ` · ${fixed(speed)} tokens/s` : "";
    return `${counts}${pace}${Number.isFinite(ratio) ? ` · about ${times(ratio)} plain` : ""}`;
  }
}
