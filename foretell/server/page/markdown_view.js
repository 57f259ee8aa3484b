// Builds the elements of Markdown. Model output becomes text nodes only; nothing is loaded.
import { copyButton } from "./clipboard.js";
import { make } from "./dom.js";
import { parse } from "./markdown_blocks.js";
import { parseInline } from "./markdown_inline.js";

const FIRST_LEVEL = 3; // of headings: the page has its own first two levels
const LAST_LEVEL = 6;
const OPEN_BLOCKS = 2; // at the end of a stream, which its next characters can still change

/** Shows a growing source. `paintText(into, text, offsets)` appends text, tinted by the tokens at these positions. */
export class MarkdownView {
  constructor(element, paintText) {
    this.element = element;
    this.paintText = paintText;
    this.starts = []; // of the blocks shown, one for each child of the element
  }

  clear() {
    this.starts = [];
    this.element.replaceChildren();
  }

  /** Show the source, which begins with what was shown before: only the last blocks are parsed again. */
  draw(source) {
    const kept = Math.max(0, this.starts.length - OPEN_BLOCKS);
    const blocks = parse(source, kept ? this.starts[kept] : 0);
    for (const old of [...this.element.children].slice(kept)) old.remove();
    this.starts = [...this.starts.slice(0, kept), ...blocks.map((block) => block.start)];
    this.element.append(...blocks.map((block) => this.block(block)));
  }

  block(block) {
    switch (block.kind) {
      case "heading":
        return this.leaf(`h${Math.min(LAST_LEVEL, FIRST_LEVEL - 1 + block.level)}`, block.leaf);
      case "rule":
        return make("hr");
      case "quote":
        return make("blockquote", {}, ...this.blocks(block.blocks));
      case "list":
        return this.list(block);
      case "table":
        return this.table(block);
      case "code":
        return this.code(block);
      default:
        return this.leaf("p", block.leaf);
    }
  }

  blocks(blocks) {
    return blocks.map((block) => this.block(block));
  }

  /** Build a list. An item of one paragraph is set tight. */
  list({ ordered, number, items }) {
    const item = (blocks) =>
      make("li", {}, ...blocks.flatMap((block, i) => (i === 0 && block.kind === "paragraph" ? this.inline(block.leaf) : [this.block(block)])));
    return make(ordered ? "ol" : "ul", ordered && number !== 1 ? { start: number } : {}, ...items.map(item));
  }

  table({ head, align, rows }) {
    const cell = (tag, leaf, i) => {
      const found = this.leaf(tag, leaf);
      if (align[i]) found.dataset.align = align[i];
      return found;
    };
    const row = (tag, leaves) => make("tr", {}, ...leaves.map((leaf, i) => cell(tag, leaf, i)));
    const body = make("tbody", {}, ...rows.map((leaves) => row("td", leaves)));
    return make("div", { class: "wide", tabindex: 0, role: "group", "aria-label": "Table" }, make("table", {}, make("thead", {}, row("th", head)), body));
  }

  code({ language, leaf }) {
    const code = make("code");
    this.paintText(code, leaf.text, leaf.offsets);
    const head = make("div", { class: "code-head" }, make("span", {}, language || "code"), copyButton("Copy", () => leaf.text, "Copy the code"));
    return make("div", { class: "code" }, head, make("pre", { tabindex: 0, role: "group", "aria-label": "Code" }, code));
  }

  leaf(tag, leaf) {
    return make(tag, {}, ...this.inline(leaf));
  }

  inline(leaf) {
    const build = ({ tag, href, children, from, to }) => {
      if (tag) return [make(tag, href ? linkAttributes(href) : {}, ...children.flatMap(build))];
      const part = leaf.slice(from, to);
      const into = make("span");
      this.paintText(into, part.text, part.offsets);
      return [...into.childNodes];
    };
    return parseInline(leaf).flatMap(build);
  }
}

/** A link of the model is followed only on a click, in a new tab that learns nothing about this one. */
const linkAttributes = (href) => ({ href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" });
