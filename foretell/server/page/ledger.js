// Which token each shown character comes from. Text can come later than its tokens, and without marks around it.

export class Ledger {
  constructor() {
    this.owed = []; // of tokens that came: their text that is not shown yet
  }

  push(token) {
    if (token.text) this.owed.push({ text: token.text, token });
  }

  /** A shown text in pieces, each with the token that wrote it; null where nobody knows. */
  take(shown) {
    const place = this.owed.map((each) => each.text).join("").indexOf(shown);
    if (place < 0) return [{ text: shown, token: null }];
    this.drop(place); // marks and blanks that are not shown
    return this.drop(shown.length);
  }

  /** The next `length` characters. */
  drop(length) {
    const pieces = [];
    while (length > 0) {
      const first = this.owed[0];
      const text = first.text.slice(0, length);
      pieces.push({ text, token: first.token });
      length -= text.length;
      first.text = first.text.slice(text.length);
      if (!first.text) this.owed.shift();
    }
    return pieces;
  }
}
