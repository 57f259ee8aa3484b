// Creates elements. Strings become text nodes: model output is never parsed as HTML.

/** Return the element with this id. */
export const part = (id) => document.getElementById(id);

/** Create an element with attributes and children; strings become text nodes. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Announce a message to screen readers. */
export function announce(words) {
  part("status").textContent = words;
}

/** Return whether the user prefers reduced motion. */
export const prefersReducedMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
