// What is known of one token, shown beside it while it is pointed at or focused.
import { bar } from "./charts.js";
import { make, part } from "./dom.js";
import { TARGET } from "./drafters.js";
import { chance, fixed, reasonWords, visible } from "./words.js";

const GAP = 8; // pixels between a token and its card
const MOST_FALLEN = 6;

/** `find(element)` gives the token and the round an element shows, or null. */
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
    this.light(owner, found.place, true);
    this.lit = () => this.light(owner, found.place, false);
    this.settle(owner.getBoundingClientRect());
  }

  hide() {
    if (!this.owner) return;
    this.owner.removeAttribute("aria-describedby");
    this.lit();
    this.owner = null;
    this.element.hidden = true;
  }

  /** Go along with a token that has the focus; leave one that was only pointed at. */
  scrolled() {
    if (this.owner && this.owner === document.activeElement) this.settle(this.owner.getBoundingClientRect());
    else this.hide();
  }

  /** Mark the tokens and the column of one round. */
  light(owner, place, on) {
    const message = owner.closest("[data-answer]");
    for (const each of message?.querySelectorAll(`[data-round="${place}"]`) ?? []) each.classList.toggle("lit", on);
  }

  /** Above the token where there is room, else below, and never over the edge. */
  settle(at) {
    const { width, height } = this.element.getBoundingClientRect();
    const left = Math.min(Math.max(GAP, at.left), innerWidth - width - GAP);
    const above = at.top - height - GAP;
    this.element.style.setProperty("left", `${left}px`);
    this.element.style.setProperty("top", `${above > GAP ? above : at.bottom + GAP}px`);
  }

  tokenParts({ token, round }) {
    const guessed = token.origin !== TARGET;
    const kind = this.drafters.kind(token.origin);
    const parts = [
      make("p", { class: "card-token" }, visible(token.text)),
      make("p", { class: "card-who" }, make("span", { class: `dot ${kind}` }), guessed ? `guessed by ${token.origin}, and stood` : ownWords(token, round)),
    ];
    if (token.probability === undefined) return parts; // a race does not pay for it
    if (guessed) parts.push(row(drafterWords(token), token.draft_confidence, kind));
    parts.push(row("model’s probability", token.probability, "by-target"));
    return [...parts, ...this.fallenParts(token, round)];
  }

  fallenParts(token, round) {
    if (!token.rejected.length) return [];
    const kind = this.drafters.kind(round?.drafter);
    const shown = token.rejected.slice(0, MOST_FALLEN).map((guess) =>
      make(
        "li",
        {},
        make("p", { class: "card-token" }, visible(guess.text)),
        row(drafterWords(guess), guess.draft_confidence, kind),
        row("model’s probability", guess.probability, "by-target"),
      ),
    );
    const more = token.rejected.length - shown.length;
    return [
      make("p", { class: "card-head" }, `guessed here by ${round?.drafter ?? "a drafter"}, and rejected`),
      make("ul", { class: "card-fallen" }, ...shown),
      more > 0 ? make("p", { class: "hint" }, `and ${more} more`) : null,
    ];
  }

  roundLine({ round, place }) {
    if (!round) return make("p", { class: "card-round" }, "");
    const what = round.drafted ? `${round.drafted} guessed, ${round.accepted} stood` : reasonWords(round.skipped);
    const time = round.step_ms ? ` · ${fixed(round.step_ms)} ms, ${fixed(round.drafting_ms)} of it guessing` : "";
    return make("p", { class: "card-round" }, `round ${place + 1}: ${what}${time}`);
  }
}

function ownWords(token, round) {
  if (token.rejected?.length) return "the model’s own, where a guess fell";
  return round?.accepted ? "the model’s own, behind the guesses that stood" : "the model’s own";
}

/** A model drafts with probabilities; what others say of themselves is a share of what they have seen. */
const drafterWords = (guess) => (guess.draft_probability === null ? "drafter’s confidence" : "drafter’s probability");

function row(words, share, kind) {
  return make(
    "p",
    { class: "card-row" },
    make("span", {}, words),
    bar(share ?? 0, kind),
    make("span", { class: "number" }, chance(share)),
  );
}
