// Small charts of plain elements: each number also stands there as text.
import { make } from "./dom.js";
import { percent } from "./words.js";

const MOST_PLACES = 8;
const PARTS = { guessing: "guessing", model: "the model", beside: "beside both" };

/** A bar that is filled by a share. */
export function bar(share, kind = "") {
  const fill = make("span", { class: "bar-fill" });
  fill.style.setProperty("--share", Math.min(1, Math.max(0, share)));
  return make("span", { class: `bar-track ${kind}`, "aria-hidden": "true" }, fill);
}

/** Shares by place, the first place first. */
export function drawPlaces(into, shares) {
  if (!shares.length) {
    into.replaceChildren(make("p", { class: "hint" }, "no guess has stood yet"));
    return;
  }
  const rows = shares.slice(0, MOST_PLACES).map((share, i) =>
    make("li", {}, make("span", { class: "place" }, String(i + 1)), bar(share), make("span", { class: "number" }, percent(share))),
  );
  into.replaceChildren(make("ol", { class: "places" }, ...rows));
}

/** How something divides into guessing, the model and the rest. */
export function drawSplit(into, split) {
  const total = Object.values(split).reduce((sum, value) => sum + value, 0);
  if (!(total > 0)) {
    into.replaceChildren(make("p", { class: "hint" }, "nothing was written yet"));
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
