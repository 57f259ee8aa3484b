// The text of a response: rendered Markdown or the raw text, in both every character tinted by its token.
import { MarkdownView } from "./markdown_view.js";
import { paint } from "./tokens.js";

export class AnswerText {
  /** `isRendered()` returns whether Markdown is rendered. */
  constructor(element, drafters, isRendered) {
    this.element = element;
    this.drafters = drafters;
    this.isRendered = isRendered;
    this.content = "";
    this.tokens = []; // of each character; null if it is unknown
    this.view = new MarkdownView(element, (into, text, offsets) => paint(into, this.spans(text, offsets), this.drafters));
    this.frame = null;
  }

  /** Add spans of text, each with its token. Raw text is appended; Markdown is rendered at most once per frame. */
  add(spans) {
    for (const { text, token } of spans) {
      this.content += text;
      for (let i = 0; i < text.length; i += 1) this.tokens.push(token);
    }
    if (this.isRendered()) this.frame ??= requestAnimationFrame(() => this.flush());
    else paint(this.element, spans, this.drafters);
  }

  /** Render what has been added since. A focused token keeps the focus. */
  flush() {
    if (this.frame === null) return;
    cancelAnimationFrame(this.frame);
    this.frame = null;
    const active = document.activeElement;
    const focused = this.element.contains(active) ? active.dataset.token : undefined;
    this.view.draw(this.content);
    if (focused !== undefined && !active.isConnected) this.element.querySelector(`[data-token="${focused}"]`)?.focus();
  }

  /** Draw everything again, in the mode that is chosen now. */
  redraw() {
    this.view.clear();
    this.element.classList.toggle("rendered", this.isRendered());
    if (this.isRendered()) this.view.draw(this.content);
    else paint(this.element, this.spans(this.content, this.tokens.keys()), this.drafters);
  }

  /** Split a text into spans of one token each; `offsets` has the position of each character. */
  spans(text, offsets) {
    const found = [];
    let next = 0;
    for (const offset of offsets) {
      const token = this.tokens[offset] ?? null;
      if (found.length && found.at(-1).token === token) found.at(-1).text += text[next];
      else found.push({ text: text[next], token });
      next += 1;
    }
    return found;
  }
}
