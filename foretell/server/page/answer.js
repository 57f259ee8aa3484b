// One response of the model: its text, its rounds and its statistics.
import { AnswerText } from "./answer_text.js";
import { copyButton } from "./clipboard.js";
import { make, part } from "./dom.js";
import { TokenSpans } from "./token_spans.js";
import { Strip } from "./strip.js";
import { RoundStats } from "./round_stats.js";
import { roam } from "./tokens.js";
import { count, fixed, times } from "./format.js";

const isRendered = () => part("markdown").checked;

export class Answer {
  /** `regenerate()` is called when the user asks for another response. */
  constructor(drafters, regenerate) {
    this.tokens = [];
    this.chunks = []; // what a reload needs to show the response again
    this.stats = new RoundStats();
    this.spans = new TokenSpans();
    this.strip = new Strip(drafters);
    this.finishReason = null;
    this.words = "";
    this.rule = null;
    this.reasoningBlock = make("details", { class: "reasoning", hidden: true }, make("summary", {}, "Reasoning"), make("div", { class: "text" }));
    this.reasoning = new AnswerText(this.reasoningBlock.lastElementChild, drafters, isRendered);
    const body = make("div", { class: "text", tabindex: 0, role: "group", "aria-label": "Response; arrow keys move between its tokens" });
    this.body = new AnswerText(body, drafters, isRendered);
    this.foot = make("p", { class: "foot" });
    this.note = make("p", { class: "note", hidden: true });
    roam(body);
    this.element = make(
      "article",
      { class: "message answer writing", "data-answer": true, "aria-label": "The model’s response" },
      this.reasoningBlock,
      body,
      this.note,
      this.strip.element,
      make("div", { class: "foot-row" }, this.foot, this.actions(regenerate)),
    );
    this.redraw();
  }

  get content() {
    return this.body.content;
  }

  actions(regenerate) {
    const again = make("button", { type: "button", class: "quiet small regenerate", title: "With the present settings; at temperature 0 the output stays the same" }, "Regenerate");
    again.addEventListener("click", regenerate);
    return make("div", { class: "actions" }, copyButton("Copy", () => this.content, "Copy the response"), again);
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
    if (content) this.body.add(this.spans.take(content));
    this.finishReason = choice.finish_reason ?? this.finishReason;
    this.chunks.push(compact(choice));
    this.foot.textContent = this.footText();
  }

  addReasoning(reasoning) {
    this.reasoningBlock.hidden = false;
    this.reasoning.add(this.spans.take(reasoning));
  }

  /** Draw the text again, after the mode has changed. */
  redraw() {
    this.body.redraw();
    this.reasoning.redraw();
  }

  /** Return the token and round that an element of the message shows, or the round alone. */
  find(element) {
    const token = this.tokens[element.dataset.token] ?? null;
    const index = token ? token.round : Number(element.dataset.round);
    return { token, index, round: this.stats.rounds[index] };
  }

  /** Show the rule of the last chunk's speculation statistics. */
  close({ rule, lossless }) {
    this.rule = { rule, lossless };
    const mark = lossless ? `rule ${rule}, lossless` : `rule ${rule}, lossy`;
    this.foot.replaceChildren(this.footText(), " · ", make("span", { class: lossless ? "lossless" : "lossy" }, mark));
  }

  /** End the response, with a note if it failed or was cut. */
  end(words = "") {
    this.body.flush();
    this.reasoning.flush();
    this.element.classList.remove("writing");
    this.element.classList.toggle("empty", !this.content);
    const cut = this.finishReason === "length" ? "Cut at the token limit; raise “Max tokens” in the settings for a longer response." : "";
    this.words = words;
    this.note.textContent = words || cut;
    this.note.hidden = !this.note.textContent;
  }

  footText() {
    const { tokens, rounds, perStep, speed, ratio } = this.stats;
    const counts = `${count(tokens, "token")} in ${count(rounds.length, "step")}, ${fixed(perStep, 2)} tokens/step`;
    const rate = Number.isFinite(speed) ? ` · ${fixed(speed)} tokens/s` : "";
    return `${counts}${rate}${Number.isFinite(ratio) ? ` · estimated speedup ${times(ratio)}` : ""}`;
  }

  /** Return what `restore` needs. Probabilities and rejected draft tokens are left out: they are most of it. */
  saved() {
    return { chunks: this.chunks, rule: this.rule, words: this.words };
  }

  /** Show a saved response. */
  restore({ chunks, rule, words }) {
    for (const chunk of chunks) this.add(chunk);
    if (rule) this.close(rule);
    this.end(words);
  }
}

function compact({ token_details: details, rounds, delta, text, finish_reason }) {
  const { content, reasoning_content } = delta ?? { content: text };
  return { token_details: details?.map(({ text, origin }) => ({ text, origin })), rounds, delta: { content, reasoning_content }, finish_reason };
}
