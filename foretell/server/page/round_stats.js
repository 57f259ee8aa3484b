// Speculation statistics of one response, computed from its rounds.

const MIN_ROUNDS = 12; // with a known plain step time, before a speedup is shown

export class RoundStats {
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

  /** Decode tokens per second; the first round, which is prefill, does not count. */
  get speed() {
    return this.decodeMs > 0 ? ((this.tokens - this.rounds[0].tokens) / this.decodeMs) * 1000 : NaN;
  }

  /** Mean tokens per step, including the target's own; 1 is plain decoding. */
  get perStep() {
    return this.rounds.length ? this.tokens / this.rounds.length : NaN;
  }

  /** Estimated speedup: tokens times the plain step time, over the time taken. */
  get ratio() {
    const known = this.rounds.filter((round) => round.plain_ms);
    const taken = known.reduce((sum, round) => sum + round.step_ms, 0);
    if (known.length < MIN_ROUNDS || !taken) return NaN;
    return known.reduce((sum, round) => sum + round.tokens * round.plain_ms, 0) / taken;
  }

  /** Fraction of drafts accepted up to each position. */
  get positions() {
    const drafts = this.rounds.filter((round) => round.drafted > 0);
    const longest = Math.max(0, ...drafts.map((round) => round.accepted));
    return Array.from({ length: longest }, (_, i) => drafts.filter((each) => each.accepted > i).length / drafts.length);
  }

  /** Milliseconds of all steps: drafting, target forward and other. */
  get split() {
    const [drafting, model, all] = ["drafting_ms", "target_ms", "step_ms"].map((name) => this.sum(name));
    return { drafting, model, other: Math.max(0, all - drafting - model) };
  }
}
