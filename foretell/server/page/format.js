// Formats numbers, skip reasons and rules for people.

const REASONS = {
  user: "speculation is disabled for this request",
  off: "no drafter is enabled",
  no_guess: "no drafter proposed a draft",
  first_token: "the first token comes from prefill",
  last_token: "the last token needs no draft",
  low_accept: "expected acceptance is too low for the cost",
  not_asked: "without benefit for a while, so polled only occasionally",
  no_costs: "step costs are not measured yet",
  outdone: "another drafter is expected to be faster",
  pays: "the draft is expected to save time",
  trial: "exploration, to measure its acceptance rate",
  fixed: "the draft length is fixed",
  late: "the draft came after the step had started",
  hurry: "the request is behind its SLO",
};

/** Describe why a step had a draft or none. */
export const reasonText = (reason) => REASONS[reason] ?? reason;

/** Describe why one drafter drafted or was skipped; another one may have drafted in the same step. */
export const drafterReasonText = (reason) => (reason === "no_guess" ? "it had no draft to propose" : reasonText(reason));

const RULES = {
  match: "Lossless: a draft token is accepted if it equals the target’s token. The same seed gives the same output.",
  rejection: "Lossless: rejection sampling. The same distribution, but other samples than plain decoding.",
  block: "Lossless: block verification, which accepts more than rejection sampling. The same distribution, other samples.",
  auto: "Lossless: match if a seed is given, else block for sampled drafts.",
  confidence: "Lossy: draft tokens with high confidence are accepted unverified. The output may differ from the target’s.",
  typical: "Lossy: typical acceptance of draft tokens that are likely enough. The output may differ from the target’s.",
  ensemble: "Lossy: the output follows a mixture of target and drafter.",
};

/** Describe the effect of a rule on the output. */
export const ruleText = (rule) => RULES[rule] ?? "";

export const fixed = (value, digits = 1) => (Number.isFinite(value) ? value.toFixed(digits) : "–");
export const whole = (value) => (Number.isFinite(value) ? Math.round(value).toLocaleString("en") : "–");
export const count = (value, noun) => `${whole(value)} ${noun}${value === 1 ? "" : "s"}`;
export const percent = (share) => (Number.isFinite(share) ? `${Math.round(share * 100)}%` : "–");
export const seconds = (ms) => `${(ms / 1000).toFixed(2)} s`;
export const times = (ratio) => (Number.isFinite(ratio) ? `${ratio.toFixed(2)}×` : "–");

/** Format a probability. */
export function chance(value) {
  if (value === null || value === undefined) return "–";
  if (value > 0 && value < 0.001) return "< 0.001";
  return value.toFixed(3);
}

/** Format bytes in a binary unit. */
export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${count < 10 && unit ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

/** Return a token with visible whitespace. */
export function visible(text) {
  if (text === "") return "(no characters)";
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}
