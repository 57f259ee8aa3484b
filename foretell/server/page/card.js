// The details of a token, shown next to it on hover or focus.
import { bar } from "./charts.js";
import { make, part } from "./dom.js";
import { TARGET } from "./drafters.js";
import { chance, fixed, reasonText, visible } from "./format.js";

const GAP = 8; // pixels between a token and its card
const MAX_REJECTED = 6;

/** `find(element)` returns the token and the round that an element shows, or null. */
export class Card {
  constructor(drafters, find) {
    this.drafters = drafters;
    this.find = find;
    this.element = part("card");
    this.owner = null;
    document.addEventListener("pointerover", (event) => this.point(event.target));
    document.addEventListener("focusin", (event) => this.point(event.target));
    document.addEventListener("click", (event) => this.point(event.target));
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.hide());
    addEventListener("scroll", () => this.scrolled(), { capture: true, passive: true });
  }

  point(target) {
    if (this.element.contains(target)) return;
    const owner = target instanceof Element ? target.closest(".token[data-token], .round") : null;
    const found = owner && this.find(owner);
    if (!found) this.hide();
    else if (owner !== this.owner) this.show(owner, found);
  }

  show(owner, found) {
    this.hide();
    this.owner = owner;
    owner.setAttribute("aria-describedby", "card");
    const parts = found.token ? this.tokenParts(found) : [];
    this.element.replaceChildren(...parts.filter(Boolean), this.roundLine(found));
    this.element.hidden = false;
    this.highlight(owner, found.index, true);
    this.unhighlight = () => this.highlight(owner, found.index, false);
    this.position(owner.getBoundingClientRect());
  }

  hide() {
    if (!this.owner) return;
    this.owner.removeAttribute("aria-describedby");
    this.unhighlight();
    this.owner = null;
    this.element.hidden = true;
  }

  /** Follow a token that has the focus; hide the card of one that was only hovered. */
  scrolled() {
    if (this.owner && this.owner === document.activeElement) this.position(this.owner.getBoundingClientRect());
    else this.hide();
  }

  /** Highlight the tokens and the column of one round. */
  highlight(owner, index, on) {
    const message = owner.closest("[data-answer]");
    for (const each of message?.querySelectorAll(`[data-round="${index}"]`) ?? []) each.classList.toggle("lit", on);
  }

  /** Position the card above the token if there is space, else below, inside the window. */
  position(at) {
    const { width, height } = this.element.getBoundingClientRect();
    const left = Math.min(Math.max(GAP, at.left), innerWidth - width - GAP);
    const above = at.top - height - GAP;
    this.element.style.setProperty("left", `${left}px`);
    this.element.style.setProperty("top", `${above > GAP ? above : at.bottom + GAP}px`);
  }

  tokenParts({ token, round }) {
    const drafted = token.origin !== TARGET;
    const kind = this.drafters.kind(token.origin);
    const parts = [
      make("p", { class: "card-token" }, visible(token.text)),
      make("p", { class: "card-who" }, make("span", { class: `dot ${kind}` }), drafted ? `drafted by ${token.origin}, accepted` : targetText(token, round)),
    ];
    if (token.probability === undefined) return parts; // not requested in a race, where it would cost time
    if (drafted) parts.push(row(confidenceLabel(token), token.draft_confidence, kind));
    parts.push(row("target probability", token.probability, "by-target"));
    return [...parts, ...this.rejectedParts(token, round)];
  }

  rejectedParts(token, round) {
    if (!token.rejected.length) return [];
    const kind = this.drafters.kind(round?.drafter);
    const shown = token.rejected.slice(0, MAX_REJECTED).map((rejected) =>
      make(
        "li",
        {},
        make("p", { class: "card-token" }, visible(rejected.text)),
        row(confidenceLabel(rejected), rejected.draft_confidence, kind),
        row("target probability", rejected.probability, "by-target"),
      ),
    );
    const more = token.rejected.length - shown.length;
    return [
      make("p", { class: "card-head" }, `drafted here by ${round?.drafter ?? "a drafter"}, rejected`),
      make("ul", { class: "card-rejected" }, ...shown),
      more > 0 ? make("p", { class: "hint" }, `and ${more} more`) : null,
    ];
  }

  roundLine({ round, index }) {
    if (!round) return make("p", { class: "card-round" }, "");
    const what = round.drafted ? `${round.drafted} drafted, ${round.accepted} accepted` : reasonText(round.skipped);
    const time = round.step_ms ? ` · ${fixed(round.step_ms)} ms, ${fixed(round.drafting_ms)} of it drafting` : "";
    return make("p", { class: "card-round" }, `step ${index + 1}: ${what}${time}`);
  }
}

function targetText(token, round) {
  if (token.rejected?.length) return "sampled by the target after a rejected draft token";
  return round?.accepted ? "sampled by the target after the accepted draft tokens" : "sampled by the target";
}

/** Draft models have probabilities; other drafters have a confidence from what they have seen. */
const confidenceLabel = (rejected) => (rejected.draft_probability === null ? "draft confidence" : "draft probability");

function row(label, probability, kind) {
  return make(
    "p",
    { class: "card-row" },
    make("span", {}, label),
    bar(probability ?? 0, kind),
    make("span", { class: "number" }, chance(probability)),
  );
}
