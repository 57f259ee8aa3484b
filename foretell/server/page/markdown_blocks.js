// Parses the blocks of Markdown: paragraphs, headings, lists, quotes, tables and code.
// Every character of the result knows its position in the source, so that it can be tinted by its token.

const DEEPEST = 8; // nested quotes and lists; what is nested deeper is shown as a paragraph
const FENCE = /^( {0,3})(`{3,}|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6}) +/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?: +(?=\S)|(?= *$))/;
const INDENT = /^ */;
const DELIMITER_ROW = /^ *\|?(?: *:?-+:? *\|)+(?: *:?-+:?)? *$/;

/** A part of the source. `offsets` has the position of each character. */
export class Leaf {
  constructor(text = "", offsets = []) {
    this.text = text;
    this.offsets = offsets;
  }

  /** Return the leaf of some lines, with the line breaks between them. */
  static of(lines) {
    const leaf = new Leaf(lines.map((line) => line.text).join("\n"));
    lines.forEach((line, i) => {
      const breaks = i < lines.length - 1 ? 1 : 0;
      for (let k = 0; k < line.text.length + breaks; k += 1) leaf.offsets.push(line.at + k);
    });
    return leaf;
  }

  slice(from, to) {
    return new Leaf(this.text.slice(from, to), this.offsets.slice(from, to));
  }
}

/** Return the blocks of a source from one of its positions on. Each has the position at which it starts. */
export function parse(source, from = 0) {
  const lines = [];
  let at = from;
  for (const text of source.slice(from).split("\n")) {
    lines.push({ text, at });
    at += text.length + 1;
  }
  return parseBlocks(lines, 0);
}

function parseBlocks(lines, depth) {
  const blocks = [];
  let next = 0;
  while (next < lines.length) {
    if (isBlank(lines[next])) {
      next += 1;
      continue;
    }
    const [block, after] = parseBlock(lines, next, depth);
    blocks.push({ ...block, start: lines[next].at });
    next = after;
  }
  return blocks;
}

/** Return the block that starts at a line, and the line after it. */
function parseBlock(lines, first, depth) {
  const { text } = lines[first];
  const nested = depth < DEEPEST;
  if (isFence(text)) return parseCode(lines, first);
  if (HEADING.test(text)) return [parseHeading(lines[first]), first + 1];
  if (RULE.test(text)) return [{ kind: "rule" }, first + 1];
  if (nested && QUOTE.test(text)) return parseQuote(lines, first, depth);
  if (nested && ITEM.test(text)) return parseList(lines, first, depth);
  if (isTable(lines, first)) return parseTable(lines, first);
  return parseParagraph(lines, first);
}

const isFence = (text) => !(FENCE.exec(text)?.[3] ?? "`").includes("`"); // else it is inline code
const isBlank = (line) => !line.text.trim();
const indent = (line) => INDENT.exec(line.text)[0].length;
const cut = (line, width) => ({ text: line.text.slice(width), at: line.at + Math.min(width, line.text.length) });

/** Return whether a line cannot continue a paragraph. Only a list from 1 on interrupts one, as "2026." may be prose. */
function interrupts({ text }) {
  const item = ITEM.exec(text);
  return isFence(text) || HEADING.test(text) || RULE.test(text) || QUOTE.test(text) || (item !== null && !/^(?!1[.)])\d/.test(item[2]));
}

function parseParagraph(lines, first) {
  let end = first + 1;
  while (end < lines.length && !isBlank(lines[end]) && !interrupts(lines[end]) && !isTable(lines, end)) end += 1;
  return [{ kind: "paragraph", leaf: Leaf.of(lines.slice(first, end)) }, end];
}

function parseHeading(line) {
  const [mark, hashes] = HEADING.exec(line.text);
  return { kind: "heading", level: hashes.length, leaf: Leaf.of([cut(line, mark.length)]) };
}

/** Parse fenced code. Without a closing fence, as during a stream, it lasts to the end. */
function parseCode(lines, first) {
  const [, margin, fence, info] = FENCE.exec(lines[first].text);
  const isEnd = ({ text }) => text.trim().length >= fence.length && text.trim() === fence[0].repeat(text.trim().length);
  let end = first + 1;
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  const code = lines.slice(first + 1, end).map((line) => cut(line, Math.min(margin.length, indent(line))));
  return [{ kind: "code", language: info.trim().split(/\s/)[0], leaf: Leaf.of(code) }, Math.min(end + 1, lines.length)];
}

function parseQuote(lines, first, depth) {
  let end = first;
  const inner = [];
  for (; end < lines.length && QUOTE.test(lines[end].text); end += 1) {
    inner.push(cut(lines[end], QUOTE.exec(lines[end].text)[0].length));
  }
  return [{ kind: "quote", blocks: parseBlocks(inner, depth + 1) }, end];
}

/** Return the type of a list: its bullet, or the character after its numbers. */
const listType = (item) => item[2].at(-1);

function parseList(lines, first, depth) {
  const opening = ITEM.exec(lines[first].text);
  const items = [];
  let end = first;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end].text);
    if (!item || listType(item) !== listType(opening) || RULE.test(lines[end].text)) break;
    const inner = [cut(lines[end], item[0].length)];
    end = takeItem(lines, end + 1, item[0].length, inner);
    items.push(parseBlocks(inner, depth + 1));
  }
  const number = Number.parseInt(opening[2], 10);
  return [{ kind: "list", ordered: !Number.isNaN(number), number, items }, end];
}

/** Collect the lines of an item after its first. Two spaces suffice: models rarely indent as far as the marker. */
function takeItem(lines, next, width, inner) {
  while (next < lines.length) {
    const line = lines[next];
    if (isBlank(line)) {
      let following = next + 1;
      while (following < lines.length && isBlank(lines[following])) following += 1;
      if (following === lines.length) return following;
      if (indent(lines[following]) < 2) return ITEM.test(lines[following].text) ? following : next;
      inner.push(...lines.slice(next, following).map((each) => cut(each, width)));
      next = following;
    } else if (indent(line) >= 2) {
      inner.push(cut(line, Math.min(width, indent(line))));
      next += 1;
    } else if (!interrupts(line) && !ITEM.test(line.text) && !isBlank(lines[next - 1])) {
      inner.push(line);
      next += 1;
    } else return next;
  }
  return next;
}

function isTable(lines, first) {
  const [head, row] = [lines[first], lines[first + 1]];
  return Boolean(row) && head.text.includes("|") && row.text.includes("-") && DELIMITER_ROW.test(row.text);
}

function parseTable(lines, first) {
  const head = cells(lines[first]);
  const align = cells(lines[first + 1]).map(({ text }) => (text.endsWith(":") ? (text.startsWith(":") ? "center" : "right") : null));
  let end = first + 2;
  const rows = [];
  for (; end < lines.length && lines[end].text.includes("|"); end += 1) rows.push(cells(lines[end]).slice(0, head.length));
  return [{ kind: "table", head, align, rows }, end];
}

/** Split a row at its bars; one after a backslash is text. */
function cells(line) {
  const bars = [-1];
  for (let i = 0; i < line.text.length; i += 1) if (line.text[i] === "|" && line.text[i - 1] !== "\\") bars.push(i);
  bars.push(line.text.length);
  const found = bars.slice(1).map((bar, i) => trimmed(cut({ ...line, text: line.text.slice(0, bar) }, bars[i] + 1)));
  if (!found[0].text) found.shift();
  if (found.length && !found.at(-1).text) found.pop();
  return found;
}

function trimmed(line) {
  const start = indent(line);
  return Leaf.of([{ text: line.text.trim(), at: line.at + start }]);
}
