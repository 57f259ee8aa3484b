// Numbers and reasons as people read them.

const REASONS = {
  user: "guessing is off for this request",
  off: "nobody may guess here",
  no_guess: "no drafter had a guess",
  first_token: "the first token waits for no guess",
  last_token: "the last token needs none",
  low_accept: "too few guesses should stand for what they cost",
  not_asked: "of no use for long, so looked at only now and then",
  no_costs: "what steps cost here is not known yet",
  outdone: "another drafter’s guesses should bring more",
  pays: "its guesses pay here",
  trial: "tried, to find out how good it is",
  fixed: "the length is set and not adapted",
  compared: "it would have paid, but a plain step was wanted to compare with",
  late: "it would have paid, but the step had begun",
  hurry: "the text is behind the time it asked for",
};

/** Why something was guessed or not. */
export const reasonWords = (reason) => REASONS[reason] ?? reason;

const RULES = {
  match: "Lossless: a guess stands if it is the very token the model takes. The same seed gives the same text.",
  rejection: "Lossless: a guess stands as often as the model would say it. The same distribution, drawn anew.",
  block: "Lossless: like rejection, judged as a block; more guesses stand. The same distribution, drawn anew.",
  auto: "Lossless: match where a seed is given, else block where guesses are drawn.",
  confidence: "Lossy: guesses the drafter is sure of stand unseen. The text may not be the model’s own.",
  typical: "Lossy: guesses the model finds not too unlikely stand. The text may not be the model’s own.",
  ensemble: "Lossy: the text is of a mixture of model and drafter, not of the model alone.",
};

/** What a rule does to the text. */
export const ruleWords = (rule) => RULES[rule] ?? "";

export const fixed = (value, digits = 1) => (Number.isFinite(value) ? value.toFixed(digits) : "–");
export const whole = (value) => (Number.isFinite(value) ? Math.round(value).toLocaleString("en") : "–");
export const percent = (share) => (Number.isFinite(share) ? `${Math.round(share * 100)} %` : "–");
export const seconds = (ms) => `${(ms / 1000).toFixed(2)} s`;
export const times = (ratio) => (Number.isFinite(ratio) ? `${ratio.toFixed(2)}×` : "–");

/** A probability: small ones keep a digit that says something. */
export function chance(value) {
  if (value === null || value === undefined) return "–";
  if (value > 0 && value < 0.001) return "< 0.001";
  return value.toFixed(3);
}

/** Bytes in the unit that suits them. */
export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${count < 10 && unit ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

/** A token with its blanks to be seen. */
export function visible(text) {
  if (text === "") return "(no characters of its own)";
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}
