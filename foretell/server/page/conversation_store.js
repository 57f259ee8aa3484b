// Keeps the conversation over a reload, in localStorage of this browser.

const KEY = "foretell.conversation";
const LIMIT = 1_000_000; // characters; browsers allow about five million for the whole page

/** Return the saved turns, each a question and a response; none if there are none or another version wrote them. */
export function loadTurns() {
  try {
    const turns = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return turns.filter(({ question, answer }) => typeof question === "string" && Array.isArray(answer.chunks));
  } catch {
    return [];
  }
}

/** Save as many of the last turns as fit. */
export function saveTurns(turns) {
  const kept = [];
  let size = 0;
  for (const turn of [...turns].reverse()) {
    const text = JSON.stringify(turn);
    size += text.length + 1;
    if (size > LIMIT) break;
    kept.unshift(text);
  }
  try {
    if (kept.length) localStorage.setItem(KEY, `[${kept}]`);
    else localStorage.removeItem(KEY);
  } catch {
    localStorage.removeItem(KEY); // no space left: a conversation that is cut anywhere else would mislead the model
  }
}
