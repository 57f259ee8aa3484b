// Elements are made here, and of texts only text nodes: nothing a model writes is ever read as HTML.

/** The element of this id. */
export const part = (id) => document.getElementById(id);

/** An element with attributes and children; a text among them becomes a text node. */
export function make(tag, attributes = {}, ...children) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) found.setAttribute(name, value === true ? "" : value);
  }
  found.append(...children.filter((child) => child !== null && child !== undefined));
  return found;
}

/** Say something to those who listen rather than look. */
export function announce(words) {
  part("status").textContent = words;
}

/** Whether things should not move. */
export const wantsStillness = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
