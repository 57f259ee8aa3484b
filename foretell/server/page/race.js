// Race: the same prompt with plain and with speculative decoding. The runs alternate; then both are replayed.
import { isStop, ConnectionLost } from "./api.js";
import { announce, make, part, prefersReducedMotion } from "./dom.js";
import { exampleButtons, FIRST } from "./examples.js";
import { Lane, replay, slowMotion } from "./replay.js";
import { RoundStats } from "./round_stats.js";
import { fixed, times } from "./format.js";

const WARMUP_TOKENS = 4; // of a warm-up run that is not measured
const MODES = ["off", "on"];

/** Return a new cache salt: a run must not share caches with earlier ones, or a drafter would copy their output. */
const salt = () => `race-${crypto.getRandomValues(new Uint32Array(4)).join("-")}`;

export class Race {
  constructor({ api, settings, drafters, shown, showError, chat }) {
    Object.assign(this, { api, settings, drafters, showError, chat });
    this.lanes = { off: new Lane(part("lane-off"), drafters), on: new Lane(part("lane-on"), drafters) };
    for (const name of MODES) shown.set(this.lanes[name].element, this.lanes[name]);
    this.stopper = null;
    this.lap = null; // the lap that is shown
    this.replayed = 0; // replays so far
    part("race-prompt").value = FIRST;
    part("race-examples").replaceChildren(...exampleButtons((text) => (part("race-prompt").value = text)));
    part("race-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.start();
    });
    part("race-stop").addEventListener("click", () => this.stopper?.abort());
    part("race-replay").addEventListener("click", () => this.play(true));
    part("race-slower").addEventListener("change", () => this.play(true));
    document.addEventListener("keydown", (event) => event.key === "Escape" && part("card").hidden && this.stopper?.abort());
  }

  get busy() {
    return this.stopper !== null;
  }

  setState(message) {
    part("race-state").textContent = message;
  }

  async start() {
    const text = part("race-prompt").value.trim();
    if (this.busy || !text || !this.settings.info) return;
    if (this.chat.busy) {
      this.setState("The chat is still generating; a race needs the machine to itself.");
      return;
    }
    try {
      const request = this.settings.request([{ role: "user", content: text }]);
      if (request.body.speculative === false) throw new Error("The drafter is none; choose one to race against plain decoding");
      request.body.seed ??= crypto.getRandomValues(new Uint32Array(1))[0]; // both runs use the same seed
      this.stopper = new AbortController();
      this.drawState();
      await this.run(request, Number(part("race-laps").value));
    } catch (error) {
      this.failed(error);
    } finally {
      this.stopper = null;
      this.drawState();
    }
  }

  failed(error) {
    this.setState(isStop(error) ? "Stopped." : error instanceof ConnectionLost ? "Interrupted: the connection to the server broke." : "");
    if (!isStop(error)) this.showError(error);
  }

  drawState() {
    part("race-go").hidden = this.busy;
    part("race-stop").hidden = !this.busy;
  }

  async run(request, laps) {
    this.replayed += 1;
    part("race-result").hidden = true;
    part("lanes").hidden = true;
    this.setState("Warming up…");
    await this.write(request, "on", () => {}, WARMUP_TOKENS);
    const results = [];
    for (let lap = 0; lap < laps; lap += 1) {
      const runs = {};
      for (const mode of lap % 2 ? [...MODES].reverse() : MODES) {
        const name = mode === "off" ? "plain decoding" : "speculative decoding";
        const progress = (tokens) => this.setState(`Lap ${lap + 1} of ${laps}, ${name}: ${tokens} tokens. Measured now, replayed afterwards.`);
        runs[mode] = await this.write(request, mode, progress);
      }
      results.push(runs);
    }
    this.summarize(results, request);
  }

  /** Run one mode. Only a count is drawn meanwhile: the page may run on the same machine. */
  async write({ path, body }, mode, progress, limit) {
    const speculative = mode === "off" ? false : body.speculative;
    // Origins and rounds cost no time; token probabilities would.
    const details = { return_token_details: false, return_token_origin: true, return_rounds: true };
    const asked = { ...body, ...details, speculative, cache_salt: salt(), ...(limit ? { max_tokens: limit } : {}) };
    const found = { tokens: [], stats: new RoundStats(), account: null };
    let updated = 0;
    progress(0);
    for await (const chunk of this.api.stream(path, asked, this.stopper.signal)) {
      for (const choice of chunk.choices) {
        found.tokens.push(...tokensOf(choice, found.tokens.length, found.stats.rounds.length));
        found.stats.add(choice.rounds);
      }
      if (chunk.speculation) found.account = chunk;
      if (performance.now() - updated > 250) {
        updated = performance.now();
        progress(found.tokens.length);
      }
    }
    return found;
  }

  summarize(laps, request) {
    const ratios = laps.map(({ off, on }) => on.stats.speed / off.stats.speed);
    const order = ratios.map((_, i) => i).sort((a, b) => ratios[a] - ratios[b]);
    const median = order[Math.floor(order.length / 2)];
    this.lap = laps[median];
    this.drawResult(laps, ratios, median, request);
    part("lanes").hidden = false;
    this.play(false);
  }

  drawResult(laps, ratios, median, request) {
    part("race-ratio").textContent = Number.isFinite(ratios[median]) ? `${times(ratios[median])} speedup` : "too short to measure";
    const { same, message } = compareOutputs(laps, request);
    part("race-same").textContent = message;
    part("race-same").className = `same ${same ? "lossless" : "lossy"}`;
    part("race-notes").textContent = notes(laps);
    const row = ({ off, on }, i) =>
      make(
        "tr",
        i === median ? { class: "median" } : {},
        make("th", { scope: "row" }, i === median ? `${i + 1}, shown` : String(i + 1)),
        ...[off, on].map((each) => make("td", {}, fixed(each.stats.speed))),
        make("td", {}, times(ratios[i])),
      );
    part("race-laps-rows").replaceChildren(...laps.map(row));
  }

  /** Replay the shown lap; without animation if reduced motion is preferred, unless `asked` for. */
  async play(asked) {
    const lanes = MODES.map((name) => this.lanes[name]);
    const current = (this.replayed += 1);
    const isCurrent = () => current === this.replayed; // a new race or replay ends this one
    for (const name of MODES) this.lanes[name].load(this.lap[name]);
    const slower = Number(part("race-slower").value) || slowMotion(lanes);
    const speed = slower === 1 ? "Replayed in real time" : `Replayed ${slower} times slower; the clocks show measured time`;
    const animated = asked || !prefersReducedMotion();
    part("race-result").hidden = true;
    this.setState(animated ? `${speed}.` : "");
    await replay(lanes, slower, () => animated && isCurrent() && !part("view-race").hidden);
    if (!isCurrent()) return;
    part("race-result").hidden = false;
    part("race-result").scrollIntoView({ block: "nearest" });
    announce(`${part("race-ratio").textContent}. ${part("race-same").textContent}`);
  }
}

/** Return the tokens of a chunk, which are those of one round. */
function tokensOf({ token_ids: ids = [], token_texts: texts, token_origins: origins, rounds }, before, round) {
  return ids.map((id, i) => ({ id, text: texts[i], origin: origins[i], position: before + i, round, at: rounds[0].at_ms }));
}

/** Compare the tokens of all runs; return whether they are the same, with a message. */
function compareOutputs(laps, { body }) {
  const outputs = laps.flatMap(({ off, on }) => [off, on].map((each) => each.tokens.map((token) => token.id)));
  const differs = outputs.find((tokens) => tokens.join() !== outputs[0].join());
  if (!differs) return { same: true, message: "Same output, token for token" };
  const position = outputs[0].findIndex((id, i) => differs[i] !== id);
  const { rule, lossless } = laps[0].on.account.speculation;
  const where = `The outputs differ from token ${(position < 0 ? outputs[0].length : position) + 1}`;
  if (!lossless) return { same: false, message: `${where}: the rule ${rule} is lossy` };
  const resampled = rule !== "match" && body.temperature !== 0;
  return { same: false, message: resampled ? `${where}: ${rule} samples differently from the same distribution` : where };
}

function notes(laps) {
  const runs = laps.flatMap(({ off, on }) => [off, on]);
  const shared = runs.some((run) => run.stats.rounds.some((round) => round.texts > 1));
  const warning = shared ? " Other requests ran on the server meanwhile, which distorts the speedup." : "";
  return `Decode tokens/s by the server’s clock, without prefix cache; the speedup is the median of the laps.${warning}`;
}
