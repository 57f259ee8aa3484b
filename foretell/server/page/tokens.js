// Tokens on the page: spans that are tinted by who wrote them, to be pointed at and walked through by keys.
import { make } from "./dom.js";

/** Append pieces of text, each as a span of the token that wrote it. */
export function paint(into, pieces, drafters) {
  into.append(
    ...pieces.map(({ text, token }) => {
      if (token === null) return text;
      const known = { "data-token": token.place, "data-round": token.round, tabindex: -1 };
      return make("span", { class: `token ${drafters.kind(token.origin)}`, ...known }, text);
    }),
  );
}

/** Let arrow keys, Home and End go from token to token inside an element. */
export function roam(element) {
  element.addEventListener("keydown", (event) => {
    const spans = [...element.querySelectorAll(".token[data-token]")];
    const now = spans.indexOf(document.activeElement);
    const goals = { ArrowRight: now + 1, ArrowLeft: now < 0 ? -1 : now - 1, Home: 0, End: spans.length - 1 };
    const goal = spans[goals[event.key] ?? -1];
    if (!goal || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    goal.focus();
  });
}
