// One response of the model: its text, its rounds and its statistics.
import { make } from "./dom.js";
import { TokenSpans } from "./token_spans.js";
import { Strip } from "./strip.js";
import { RoundStats } from "./round_stats.js";
import { paint, roam } from "./tokens.js";
import { fixed, times, whole } from "./format.js";

export class Answer {
  constructor(drafters) {
    this.drafters = drafters;
    this.tokens = [];
    this.content = "";
    this.stats = new RoundStats();
    this.spans = new TokenSpans();
    this.strip = new Strip(drafters);
    this.reasoning = make("div", { class: "text" });
    this.reasoningBlock = make("details", { class: "reasoning", hidden: true }, make("summary", {}, "Reasoning"), this.reasoning);
    this.text = make("div", { class: "text", tabindex: 0, role: "group", "aria-label": "Response; arrow keys move between its tokens" });
    this.foot = make("p", { class: "foot" });
    this.note = make("p", { class: "note", hidden: true });
    roam(this.text);
    this.element = make(
      "article",
      { class: "message answer writing", "data-answer": true, "aria-label": "The model’s response" },
      this.reasoningBlock,
      this.text,
      this.note,
      this.strip.element,
      this.foot,
    );
  }

  /** Add a choice of a chunk. Its tokens are those of one round. */
  add(choice) {
    const round = this.stats.rounds.length;
    for (const detail of choice.token_details ?? []) {
      const token = { ...detail, position: this.tokens.length, round };
      this.tokens.push(token);
      this.spans.push(token);
    }
    this.stats.add(choice.rounds);
    this.strip.add(choice.rounds);
    const { reasoning_content: reasoning, content } = choice.delta ?? { content: choice.text };
    if (reasoning) this.addReasoning(reasoning);
    if (content) {
      this.content += content;
      paint(this.text, this.spans.take(content), this.drafters);
    }
    this.foot.textContent = this.footText();
  }

  addReasoning(reasoning) {
    this.reasoningBlock.hidden = false;
    paint(this.reasoning, this.spans.take(reasoning), this.drafters);
  }

  /** Return the token and round that an element of the message shows, or the round alone. */
  find(element) {
    const token = this.tokens[element.dataset.token] ?? null;
    const index = token ? token.round : Number(element.dataset.round);
    return { token, index, round: this.stats.rounds[index] };
  }

  /** Show the rule of the last chunk's speculation statistics. */
  close(account) {
    const { rule, lossless } = account.speculation;
    const mark = lossless ? `rule ${rule}, lossless` : `rule ${rule}, lossy`;
    this.foot.replaceChildren(this.footText(), " · ", make("span", { class: lossless ? "lossless" : "lossy" }, mark));
  }

  /** End the response, with a note if it failed. */
  end(words = "") {
    this.element.classList.remove("writing");
    this.note.textContent = words;
    this.note.hidden = !words;
  }

  footText() {
    const { tokens, rounds, perStep, speed, ratio } = this.stats;
    const counts = `${whole(tokens)} tokens in ${whole(rounds.length)} steps, ${fixed(perStep, 2)} tokens/step`;
    const rate = Number.isFinite(speed) ? ` · ${fixed(speed)} tokens/s` : "";
    return `${counts}${rate}${Number.isFinite(ratio) ? ` · estimated speedup ${times(ratio)}` : ""}`;
  }
}
