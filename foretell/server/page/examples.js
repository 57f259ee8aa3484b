// Example prompts with low, high and medium acceptance rates.
import { make } from "./dom.js";

const LETTER = `Rewrite this letter word for word, only change the day from Tuesday to Thursday.

Dear Anna,

The meeting of the garden club takes place on Tuesday at seven in the town library. Please bring the list of plants that \
we ordered last month, the receipts of the hardware store, and the keys of the tool shed. Martin will show his \
photographs of the botanical garden, and Elena will report on the new watering system.

Best wishes,
Paul`;

const EXAMPLES = [
  ["A question", "Why is the sky blue during the day and red in the evening?"],
  ["A letter to copy", LETTER],
  ["A little code", "Write a Python function that returns the first n Fibonacci numbers as a list, and show how it is called."],
];

export const FIRST = LETTER;

/** Return a button for each; `take` receives the prompt. */
export function exampleButtons(take) {
  return EXAMPLES.map(([name, text]) => {
    const found = make("button", { type: "button", class: "example" }, make("strong", {}, name), make("span", {}, text));
    found.addEventListener("click", () => take(text));
    return found;
  });
}
