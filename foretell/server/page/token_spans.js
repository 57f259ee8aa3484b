// Maps shown text to its tokens. Text can arrive later than its tokens, and without the tags around it.

export class TokenSpans {
  constructor() {
    this.pending = []; // text of received tokens that is not shown yet
  }

  push(token) {
    if (token.text) this.pending.push({ text: token.text, token });
  }

  /** Split a shown text into spans, each with its token; null if it is unknown. */
  take(shown) {
    const start = this.pending.map((each) => each.text).join("").indexOf(shown);
    if (start < 0) return [{ text: shown, token: null }];
    this.drop(start); // tags and whitespace that are not shown
    return this.drop(shown.length);
  }

  /** Remove and return the next `length` characters. */
  drop(length) {
    const spans = [];
    while (length > 0) {
      const first = this.pending[0];
      const text = first.text.slice(0, length);
      spans.push({ text, token: first.token });
      length -= text.length;
      first.text = first.text.slice(text.length);
      if (!first.text) this.pending.shift();
    }
    return spans;
  }
}
