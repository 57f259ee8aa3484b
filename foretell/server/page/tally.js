// What speculation did for one answer, counted from its rounds.

const ENOUGH = 12; // rounds whose plain time is known, before a ratio says anything

export class Tally {
  constructor() {
    this.rounds = [];
    this.tokens = 0;
  }

  add(rounds) {
    for (const round of rounds ?? []) {
      this.rounds.push(round);
      this.tokens += round.tokens;
    }
  }

  sum(name) {
    return this.rounds.reduce((sum, round) => sum + (round[name] ?? 0), 0);
  }

  /** Milliseconds from the first token to the last. */
  get decodeMs() {
    return this.rounds.length ? this.rounds.at(-1).at_ms - this.rounds[0].at_ms : 0;
  }

  /** From the first token on, that round not counted. */
  get speed() {
    return this.decodeMs > 0 ? ((this.tokens - this.rounds[0].tokens) / this.decodeMs) * 1000 : NaN;
  }

  /** Mean tokens a step yields, the model's own included; 1 is plain decoding. */
  get perStep() {
    return this.rounds.length ? this.tokens / this.rounds.length : NaN;
  }

  /** Tokens times what a plain step takes here, over the time their steps took. */
  get ratio() {
    const known = this.rounds.filter((round) => round.plain_ms);
    const taken = known.reduce((sum, round) => sum + round.step_ms, 0);
    if (known.length < ENOUGH || !taken) return NaN;
    return known.reduce((sum, round) => sum + round.tokens * round.plain_ms, 0) / taken;
  }

  /** The share of drafts whose guess at each place stood, and all before it. */
  get places() {
    const drafts = this.rounds.filter((round) => round.drafted > 0);
    const longest = Math.max(0, ...drafts.map((round) => round.accepted));
    return Array.from({ length: longest }, (_, i) => drafts.filter((each) => each.accepted > i).length / drafts.length);
  }

  /** Milliseconds of all steps: for guessing, for the model, and beside them. */
  get split() {
    const [guessing, model, all] = ["drafting_ms", "target_ms", "step_ms"].map((name) => this.sum(name));
    return { guessing, model, beside: Math.max(0, all - guessing - model) };
  }
}
