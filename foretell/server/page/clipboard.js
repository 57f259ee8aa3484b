// Copies text to the clipboard.
import { announce, make } from "./dom.js";

const SHOWN_MS = 1500; // of the result on the button

/** Copy a text. Browsers have `navigator.clipboard` only over HTTPS or on localhost, so a selection is the fallback. */
async function copy(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const focused = document.activeElement;
  const field = make("textarea", { class: "unseen", readonly: true });
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  focused?.focus();
  if (!done) throw new Error("the browser refused");
}

/** Return a button that copies what `text()` returns. */
export function copyButton(label, text, name) {
  const button = make("button", { type: "button", class: "quiet small", "aria-label": name }, label);
  button.addEventListener("click", async () => {
    const [words, spoken] = await copy(text()).then(
      () => ["Copied", "Copied"],
      (error) => ["Failed", `Not copied: ${error.message}`],
    );
    button.textContent = words;
    announce(spoken);
    setTimeout(() => (button.textContent = label), SHOWN_MS);
  });
  return button;
}
