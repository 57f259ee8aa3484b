// Replays two measured runs.
import { paint, roam } from "./tokens.js";
import { count, fixed, seconds } from "./format.js";

const REPLAY_MS = 4000; // of the slower lane: a measured run is often over before the eye sees it

export class Lane {
  constructor(element, drafters) {
    this.element = element;
    this.drafters = drafters;
    this.parts = Object.fromEntries([...element.querySelectorAll("[data-part]")].map((each) => [each.dataset.part, each]));
    element.dataset.answer = "";
    roam(this.parts.text);
  }

  /** Load a run; its clock starts with its first token. */
  load(run) {
    this.run = run;
    this.begin = run.tokens[0]?.at ?? 0;
    this.end = (run.tokens.at(-1)?.at ?? 0) - this.begin;
    this.next = 0;
    this.parts.text.replaceChildren();
    this.parts.figures.textContent = "";
    this.show(0);
  }

  /** Show all tokens up to `ms` on the clock. */
  show(ms) {
    const { tokens } = this.run;
    const fresh = [];
    while (this.next < tokens.length && tokens[this.next].at - this.begin <= ms) {
      const token = tokens[this.next];
      if (token.text) fresh.push({ text: token.text, token });
      this.next += 1;
    }
    paint(this.parts.text, fresh, this.drafters);
    if (fresh.length) this.parts.text.scrollTop = this.parts.text.scrollHeight;
    this.parts.clock.textContent = seconds(Math.min(ms, this.end));
    this.parts.runner.style.setProperty("--share", tokens.length ? this.next / tokens.length : 0);
    this.element.classList.toggle("done", ms >= this.end);
    if (ms >= this.end) this.finish();
  }

  finish() {
    const { tokens, perStep, speed } = this.run.stats;
    const first = this.run.stats.rounds[0]?.at_ms ?? 0;
    this.parts.figures.textContent = `${count(tokens, "token")} · ${fixed(speed)}/s · ${fixed(perStep, 2)} tokens/step · TTFT ${fixed(first, 0)} ms`;
  }

  find(element) {
    const token = this.run.tokens[element.dataset.token] ?? null;
    return token && { token, index: token.round, round: this.run.stats.rounds[token.round] };
  }
}

/** Return how many times slower to replay, so that the slower lane takes about four seconds; never faster than measured. */
export function slowMotion(lanes) {
  return Math.max(1, Math.round(REPLAY_MS / Math.max(1, longest(lanes))));
}

const longest = (lanes) => Math.max(...lanes.map((lane) => lane.end));

/** Run all lanes by one clock, `slower` times slower than measured; once not `isAnimated()`, show the end. */
export function replay(lanes, slower, isAnimated) {
  const end = longest(lanes);
  return new Promise((resolve) => {
    const began = performance.now();
    const frame = (now) => {
      const ms = isAnimated() ? Math.max(0, now - began) / slower : end;
      for (const lane of lanes) lane.show(Math.min(ms, end));
      if (ms < end) requestAnimationFrame(frame);
      else resolve();
    };
    frame(began);
  });
}
