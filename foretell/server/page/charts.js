// Small charts of plain elements; each number is also shown as text.
import { make } from "./dom.js";
import { percent } from "./format.js";

const MAX_POSITIONS = 8;
const PARTS = { drafting: "drafting", model: "target", other: "other" };

/** Return a bar that is filled by a fraction. */
export function bar(share, kind = "") {
  const fill = make("span", { class: "bar-fill" });
  fill.style.setProperty("--share", Math.min(1, Math.max(0, share)));
  return make("span", { class: `bar-track ${kind}`, "aria-hidden": "true" }, fill);
}

/** Draw the acceptance rate by position in the draft. */
export function drawPositions(into, shares) {
  if (!shares.length) {
    into.replaceChildren(make("p", { class: "hint" }, "no draft token accepted yet"));
    return;
  }
  const rows = shares.slice(0, MAX_POSITIONS).map((share, i) =>
    make("li", {}, make("span", { class: "position" }, String(i + 1)), bar(share), make("span", { class: "number" }, percent(share))),
  );
  into.replaceChildren(make("ol", { class: "positions" }, ...rows));
}

/** Draw the parts of step time: drafting, target and other. */
export function drawSplit(into, split) {
  const total = Object.values(split).reduce((sum, value) => sum + value, 0);
  if (!(total > 0)) {
    into.replaceChildren(make("p", { class: "hint" }, "nothing generated yet"));
    return;
  }
  const bars = [];
  const words = [];
  for (const [name, value] of Object.entries(split)) {
    const each = make("span", { class: `split-${name}` });
    each.style.setProperty("--share", value / total);
    bars.push(each);
    words.push(make("li", { class: `split-${name}` }, `${PARTS[name]} ${percent(value / total)}`));
  }
  into.replaceChildren(
    make("div", { class: "split", "aria-hidden": "true" }, ...bars),
    make("ul", { class: "split-words" }, ...words),
  );
}
