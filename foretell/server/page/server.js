// The server as it is now: who runs and waits, pages, what the controller decides and why.
import { drawPlaces, drawSplit } from "./charts.js";
import { make, part } from "./dom.js";
import { bytes, fixed, percent, reasonWords, times, whole } from "./words.js";

const EVERY = 1000; // milliseconds

export class ServerView {
  constructor({ api, told }) {
    this.api = api;
    this.told = told;
    this.before = null;
    this.timer = null;
  }

  /** Look at it again and again while it is shown. */
  watch(shown) {
    clearTimeout(this.timer);
    if (shown) this.look();
    else this.timer = null;
  }

  async look() {
    try {
      this.draw(await this.api.get("server_info"), performance.now());
    } catch (error) {
      this.told(error);
    }
    if (!part("view-server").hidden) this.timer = setTimeout(() => this.look(), EVERY);
  }

  draw(info, now) {
    const state = info.internal_states[0];
    this.drawTiles(info, state, now);
    this.drawDecisions(info.speculation);
    this.drawDrafters(info);
    drawPlaces(part("server-places"), state.accepted_per_position.map((count) => count / state.drafts));
    const { drafting_seconds: guessing, target_seconds: model, step_seconds: all } = state;
    drawSplit(part("server-split"), { guessing, model, beside: Math.max(0, all - guessing - model) });
    drawFacts(part("server-memory"), memoryFacts(info));
    drawFacts(part("server-facts"), servedFacts(info, state));
    this.before = { info, now };
  }

  drawTiles(info, state, now) {
    const pages = info.memory.pages;
    const before = this.before;
    const tokens = before ? state.tokens - before.info.internal_states[0].tokens : 0;
    const speed = before ? (tokens / (now - before.now)) * 1000 : 0;
    const tile = (name, value, more) =>
      make("div", { class: "tile" }, make("p", { class: "tile-name" }, name), make("p", { class: "tile-value" }, value), more ?? null);
    const meter = make("meter", { min: 0, max: pages, value: state.pages_held, "aria-label": "Pages in use" });
    part("server-tiles").replaceChildren(
      tile("running", whole(state.running)),
      tile("waiting", whole(state.waiting)),
      tile(`of ${whole(pages)} pages in use`, whole(state.pages_held), meter),
      tile("tokens a second", fixed(speed)),
      tile("against plain", state.speedup === null ? "–" : times(state.speedup)),
      tile("tokens a guessed step", fixed(state.avg_spec_accept_length, 2)),
    );
  }

  drawDecisions({ on, reason, decisions }) {
    const why = reason ? `, last switched because ${reason}` : ", and it has not been switched since the start";
    part("server-standing").textContent = `Guessing is ${on ? "on" : "off"}${why}.`;
    const known = new Map((this.before?.info.speculation.decisions ?? []).map((each) => [name(each), each.steps]));
    const rows = [...decisions].sort((a, b) => a.drafter.localeCompare(b.drafter) || a.decision.localeCompare(b.decision) || b.steps - a.steps).map((each) => {
      const fresh = known.has(name(each)) || this.before ? each.steps - (known.get(name(each)) ?? 0) : 0;
      return make(
        "tr",
        fresh ? { class: "fresh" } : {},
        make("th", { scope: "row" }, each.drafter),
        make("td", {}, make("b", {}, each.decision), `: ${reasonWords(each.reason)}`),
        make("td", { class: "number" }, fresh ? `+${whole(fresh)}` : ""),
        make("td", { class: "number" }, whole(each.steps)),
      );
    });
    part("server-decisions").replaceChildren(...(rows.length ? rows : [emptyRow(4, "nothing was decided yet")]));
  }

  drawDrafters({ speculation }) {
    const rows = Object.entries(speculation.drafters).map(([drafter, { drafted, accepted }]) =>
      make(
        "tr",
        {},
        make("th", { scope: "row" }, drafter),
        ...[whole(drafted), whole(accepted), percent(accepted / drafted)].map((each) => make("td", { class: "number" }, each)),
      ),
    );
    part("server-drafters").replaceChildren(...(rows.length ? rows : [emptyRow(4, "nobody has guessed yet")]));
  }
}

const name = ({ drafter, decision, reason }) => `${drafter} ${decision} ${reason}`;

const emptyRow = (columns, words) => make("tr", {}, make("td", { colspan: columns, class: "hint" }, words));

function drawFacts(into, facts) {
  into.replaceChildren(...facts.flatMap(([term, value]) => [make("dt", {}, term), make("dd", {}, value)]));
}

function memoryFacts({ memory }) {
  const names = { weights: "weights", drafter: "drafters", cache: "cache", step: "a step", program: "the program", total: "together" };
  return Object.entries(names).map(([key, words]) => [words, bytes(memory[key])]);
}

function servedFacts(info, state) {
  return [
    ["model", info.model],
    ["names", info.served_model_names.join(", ")],
    ["context", `${whole(info.max_model_len)} tokens`],
    ["drafters", info.drafters.join(", ") || "none"],
    ["guesses a step, at most", whole(info.max_draft)],
    ["rule", info.rule],
    ["texts finished", whole(state.texts)],
    ["tokens written", whole(state.tokens)],
    ["pre-emptions", whole(state.preemptions)],
    ["version", info.version],
  ];
}
