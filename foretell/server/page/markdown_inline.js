// Parses the inline elements of Markdown: code, emphasis, links and escapes. HTML stays text.

const DEEPEST = 6; // nested elements; marks that are nested deeper are shown as text
const MARKS = ["***", "___", "**", "__", "~~", "*", "_"]; // the longest first
const TAGS = { "***": ["strong", "em"], ___: ["strong", "em"], "**": ["strong"], __: ["strong"], "~~": ["s"], "*": ["em"], _: ["em"] };
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;
const TARGET = /\]\(<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?: +"[^"]*")?\)/y;

/** Return the inline elements of a leaf: text with `from` and `to`, or a tag with children. */
export function parseInline(leaf, depth = 0) {
  return new InlineParser(leaf.text, depth).range(0, leaf.text.length);
}

/** Return the address of a link if it is safe to follow, else null. A relative one would lead to this server. */
export function safeAddress(address) {
  try {
    const url = new URL(address);
    return SCHEMES.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

class InlineParser {
  constructor(text, depth) {
    this.text = text;
    this.depth = depth;
    this.missing = new Set(); // marks without a closing one, each with the end of the range: searched once
  }

  range(from, to) {
    const found = [];
    let plain = from;
    let next = from;
    const flush = () => next > plain && found.push({ from: plain, to: next });
    while (next < to) {
      const element = this.element(next, to);
      if (!element) {
        next += 1;
        continue;
      }
      flush();
      found.push(...element.nodes);
      next = plain = element.end;
    }
    flush();
    return found;
  }

  /** Return the element that starts at a position, or null. */
  element(at, to) {
    const { text } = this;
    switch (text[at]) {
      case "\\":
        return at + 1 < to && ESCAPABLE.test(text[at + 1]) ? { nodes: [{ from: at + 1, to: at + 2 }], end: at + 2 } : null;
      case "`":
        return this.code(at, to);
      case "!":
        return text[at + 1] === "[" ? this.link(at + 1, to) : null; // an image is a link: nothing is loaded
      case "[":
        return this.link(at, to);
      case "*":
      case "_":
      case "~":
        return this.depth < DEEPEST ? this.emphasis(at, to) : null;
      default:
        return null;
    }
  }

  code(at, to) {
    const ticks = this.run(at, to);
    const end = this.search(`${"`".repeat(ticks)} `, at + ticks, to, (i) => this.text[i] === "`" && this.run(i, to) === ticks);
    if (end < 0) return { nodes: [{ from: at, to: at + ticks }], end: at + ticks };
    return { nodes: [{ tag: "code", children: [{ from: at + ticks, to: end }] }], end: end + ticks };
  }

  /** Return the length of the run of equal characters at a position. */
  run(at, to) {
    let end = at;
    while (end < to && this.text[end] === this.text[at]) end += 1;
    return end - at;
  }

  emphasis(at, to) {
    const mark = MARKS.find((each) => this.text.startsWith(each, at));
    if (!mark || !this.opens(mark, at, to)) return null;
    const inside = at + mark.length;
    const end = this.search(mark, inside + 1, to, (i) => this.closes(mark, i, to));
    if (end < 0) return { nodes: [{ from: at, to: inside }], end: inside };
    const children = this.within(inside, end);
    const nodes = TAGS[mark].reduceRight((inner, tag) => [{ tag, children: inner }], children);
    return { nodes, end: end + mark.length };
  }

  opens(mark, at, to) {
    const after = at + mark.length;
    if (after >= to || /\s/.test(this.text[after])) return false;
    return mark[0] !== "_" || !WORD.test(this.text[at - 1] ?? " ");
  }

  closes(mark, at, to) {
    const length = this.text[at] === mark[0] ? this.run(at, to) : 0;
    if (length < mark.length || (mark.length === 1 && length === 2) || /\s/.test(this.text[at - 1])) return false;
    return mark[0] !== "_" || !WORD.test(this.text[at + length] ?? " ");
  }

  link(at, to) {
    const end = this.search("](", at + 1, to, (i) => this.text.startsWith("](", i));
    const inner = this.text.indexOf("[", at + 1);
    if (end < 0 || (inner >= 0 && inner < end)) return null;
    TARGET.lastIndex = end;
    const target = TARGET.exec(this.text);
    const after = TARGET.lastIndex;
    if (!target || after > to) return null;
    const href = safeAddress(target[1]);
    if (!href) return null; // shown as it is
    const children = end > at + 1 ? this.within(at + 1, end) : [{ from: end + 2, to: after - 1 }];
    return { nodes: [{ tag: "a", href, children }], end: after };
  }

  within(from, to) {
    this.depth += 1;
    const found = this.range(from, to);
    this.depth -= 1;
    return found;
  }

  /** Return the first position in a range at which `isEnd` holds, or -1; escapes, code and runs of the mark are skipped. */
  search(mark, from, to, isEnd) {
    const searched = `${mark}${to}`;
    if (this.missing.has(searched)) return -1;
    const inCode = mark.startsWith("`");
    for (let i = from; i < to; i += 1) {
      if (isEnd(i)) return i;
      if (this.text[i] === "\\" && !inCode) i += 1;
      else if (this.text[i] === "`" && !inCode) i = this.code(i, to).end - 1;
      else if (this.text[i] === mark[0]) i += this.run(i, to) - 1;
    }
    this.missing.add(searched);
    return -1;
  }
}
