// Token spans: tinted by origin, with hover and keyboard navigation.
import { make } from "./dom.js";

/** Append spans of text, each with its token. */
export function paint(into, spans, drafters) {
  into.append(
    ...spans.map(({ text, token }) => {
      if (token === null) return text;
      const known = { "data-token": token.position, "data-round": token.round, tabindex: -1 };
      return make("span", { class: `token ${drafters.kind(token.origin)}`, ...known }, text);
    }),
  );
}

/** Move between the tokens of an element with arrow keys, Home and End. */
export function roam(element) {
  element.addEventListener("keydown", (event) => {
    const tokens = [...element.querySelectorAll(".token[data-token]")];
    const now = tokens.indexOf(document.activeElement);
    const goals = { ArrowRight: now + 1, ArrowLeft: now < 0 ? -1 : now - 1, Home: 0, End: tokens.length - 1 };
    const goal = tokens[goals[event.key] ?? -1];
    if (!goal || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    goal.focus();
  });
}
