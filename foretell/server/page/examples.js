// Example prompts with low, high and medium acceptance rates.
import { make } from "./dom.js";

const LETTER = `Dear Anna,

The meeting of the garden club takes place on Tuesday at seven in the town library. Please bring the list of plants that \
we ordered last month, the receipts of the hardware store, and the keys of the tool shed. Martin will show his \
photographs of the botanical garden, and Elena will report on the new watering system. The garden club thanks all \
members who helped to repair the greenhouse after the storm.

Best wishes,
Paul`;
// The instruction comes last: so even the small built-in model changes the day and copies the rest.
const EDIT = `${LETTER}\n\nRepeat the letter above, but with Thursday instead of Tuesday.`;

const EXAMPLES = [
  ["A question", "What is photosynthesis?"],
  ["A letter to change", EDIT],
  ["A little code", "Write a Python function that reverses a string, and show how it is called."],
];

export const FIRST = EDIT;

/** Return a button for each; `take` receives the prompt. */
export function exampleButtons(take) {
  return EXAMPLES.map(([name, text]) => {
    const found = make("button", { type: "button", class: "example" }, make("strong", {}, name), make("span", {}, text));
    found.addEventListener("click", () => take(text));
    return found;
  });
}
