// Race: the same prompt without guesses and with them. The arms take turns; then both clocks are replayed.
import { isStop, Lost } from "./api.js";
import { announce, make, part } from "./dom.js";
import { exampleButtons, FIRST } from "./examples.js";
import { Lane, replay } from "./replay.js";
import { Tally } from "./tally.js";
import { fixed, times } from "./words.js";

const WARM = 4; // tokens of a first run that does not count, so that neither arm pays for a cold start
const ARMS = ["off", "on"];

/** A fresh name for a run: it shares no cache with the runs before it, or a drafter would copy their answer. */
const salt = () => `race-${crypto.getRandomValues(new Uint32Array(4)).join("-")}`;

export class Race {
  constructor({ api, settings, drafters, shown, told, chat }) {
    Object.assign(this, { api, settings, drafters, told, chat });
    this.lanes = { off: new Lane(part("lane-off"), drafters), on: new Lane(part("lane-on"), drafters) };
    for (const name of ARMS) shown.set(this.lanes[name].element, this.lanes[name]);
    this.stopper = null;
    this.lap = null; // the one that is shown
    part("race-prompt").value = FIRST;
    part("race-examples").replaceChildren(...exampleButtons((text) => (part("race-prompt").value = text)));
    part("race-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.start();
    });
    part("race-stop").addEventListener("click", () => this.stopper?.abort());
    part("race-replay").addEventListener("click", () => this.play(true));
    document.addEventListener("keydown", (event) => event.key === "Escape" && part("card").hidden && this.stopper?.abort());
  }

  get busy() {
    return this.stopper !== null;
  }

  say(words) {
    part("race-state").textContent = words;
  }

  async start() {
    const text = part("race-prompt").value.trim();
    if (this.busy || !text || !this.settings.info) return;
    if (this.chat.busy) {
      this.say("The chat is still writing; a race needs the machine for itself.");
      return;
    }
    try {
      const request = this.settings.request([{ role: "user", content: text }]);
      if (request.body.speculative === false) throw new Error("The drafter is none; choose one to race against plain decoding");
      request.body.seed ??= crypto.getRandomValues(new Uint32Array(1))[0]; // the arms draw alike
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
    this.say(isStop(error) ? "Stopped." : error instanceof Lost ? "Broken off: the server went away." : "");
    if (!isStop(error)) this.told(error);
  }

  drawState() {
    part("race-go").hidden = this.busy;
    part("race-stop").hidden = !this.busy;
  }

  async run(request, laps) {
    part("verdict").hidden = true;
    part("lanes").hidden = true;
    this.say("Warming up, so that neither arm pays for a cold start…");
    await this.write(request, "on", () => {}, WARM);
    const told = [];
    for (let lap = 0; lap < laps; lap += 1) {
      const found = {};
      for (const arm of lap % 2 ? [...ARMS].reverse() : ARMS) {
        const name = arm === "off" ? "without guesses" : "with guesses";
        const say = (tokens) => this.say(`Lap ${lap + 1} of ${laps}, ${name}: ${tokens} tokens. Measured now, replayed afterwards.`);
        found[arm] = await this.write(request, arm, say);
      }
      told.push(found);
    }
    this.judge(told, request);
  }

  /** One run of one arm. Nothing is drawn meanwhile but a count: the page runs on the same machine, perhaps. */
  async write({ path, body }, arm, say, limit) {
    const speculative = arm === "off" ? false : body.speculative;
    // Who wrote what and when costs nothing to tell; how likely each token was found would be paid for in the time.
    const telling = { return_token_details: false, return_token_origin: true, return_rounds: true };
    const asked = { ...body, ...telling, speculative, cache_salt: salt(), ...(limit ? { max_tokens: limit } : {}) };
    const found = { tokens: [], tally: new Tally(), account: null };
    let told = 0;
    say(0);
    for await (const chunk of this.api.stream(path, asked, this.stopper.signal)) {
      for (const choice of chunk.choices) {
        found.tokens.push(...tokensOf(choice, found.tokens.length, found.tally.rounds.length));
        found.tally.add(choice.rounds);
      }
      if (chunk.speculation) found.account = chunk;
      if (performance.now() - told > 250) {
        told = performance.now();
        say(found.tokens.length);
      }
    }
    return found;
  }

  judge(laps, request) {
    const ratios = laps.map(({ off, on }) => on.tally.speed / off.tally.speed);
    const order = ratios.map((_, i) => i).sort((a, b) => ratios[a] - ratios[b]);
    const median = order[Math.floor(order.length / 2)];
    this.lap = laps[median];
    this.drawVerdict(laps, ratios, median, request);
    part("lanes").hidden = false;
    this.play(false);
  }

  drawVerdict(laps, ratios, median, request) {
    part("race-ratio").textContent = Number.isFinite(ratios[median]) ? `${times(ratios[median])} as fast` : "too short to say";
    const { same, words } = sameWords(laps, request);
    part("race-same").textContent = words;
    part("race-same").className = `same ${same ? "lossless" : "lossy"}`;
    part("race-notes").textContent = notes(laps);
    const row = ({ off, on }, i) =>
      make(
        "tr",
        i === median ? { class: "median" } : {},
        make("th", { scope: "row" }, i === median ? `${i + 1}, shown` : String(i + 1)),
        ...[off, on].map((each) => make("td", {}, fixed(each.tally.speed))),
        make("td", {}, times(ratios[i])),
      );
    part("race-laps-told").replaceChildren(...laps.map(row));
  }

  /** Replay the shown lap; at once where nothing should move, unless it was `asked` for. */
  async play(asked) {
    for (const name of ARMS) this.lanes[name].load(this.lap[name]);
    part("verdict").hidden = true;
    part("race-replay").disabled = true;
    this.say("Replaying what was measured…");
    await replay(Object.values(this.lanes), asked);
    part("verdict").hidden = false;
    part("race-replay").disabled = false;
    part("verdict").scrollIntoView({ block: "nearest" });
    this.say("");
    announce(`${part("race-ratio").textContent}. ${part("race-same").textContent}`);
  }
}

/** The tokens of a chunk, which are those of one round. */
function tokensOf({ token_ids: ids = [], token_texts: texts, token_origins: origins, rounds }, before, round) {
  return ids.map((id, i) => ({ id, text: texts[i], origin: origins[i], place: before + i, round, at: rounds[0].at_ms }));
}

/** Whether all laps of both arms wrote the same tokens, and what it means where they did not. */
function sameWords(laps, { body }) {
  const texts = laps.flatMap(({ off, on }) => [off, on].map((each) => each.tokens.map((token) => token.id)));
  const differs = texts.find((text) => text.join() !== texts[0].join());
  if (!differs) return { same: true, words: "Same text, token for token" };
  const place = texts[0].findIndex((id, i) => differs[i] !== id);
  const { rule, lossless } = laps[0].on.account.speculation;
  const where = `The texts part at token ${(place < 0 ? texts[0].length : place) + 1}`;
  if (!lossless) return { same: false, words: `${where}: the rule ${rule} is lossy` };
  const drawn = rule !== "match" && body.temperature !== 0;
  return { same: false, words: drawn ? `${where}: ${rule} draws anew from the same distribution` : where };
}

function notes(laps) {
  const runs = laps.flatMap(({ off, on }) => [off, on]);
  const shared = runs.some((run) => run.tally.rounds.some((round) => round.texts > 1));
  const company = shared ? " Other texts ran on the server meanwhile, so the ratio is not clean." : "";
  return `Tokens a second from the first token on, by the server’s clock, each run with fresh caches; the ratio is the median of the laps.${company}`;
}
