// The server view: load, KV cache, the controller's decisions and their reasons.
import { drawPositions, drawSplit } from "./charts.js";
import { make, part } from "./dom.js";
import { bytes, drafterReasonText, fixed, percent, times, whole } from "./format.js";

const INTERVAL_MS = 1000;

export class ServerView {
  constructor({ api, showError }) {
    this.api = api;
    this.showError = showError;
    this.before = null;
    this.timer = null;
  }

  /** Poll the server while the view is shown. */
  watch(shown) {
    clearTimeout(this.timer);
    if (shown) this.poll();
    else this.timer = null;
  }

  async poll() {
    try {
      this.draw(await this.api.get("server_info"), performance.now());
    } catch (error) {
      this.showError(error);
    }
    if (!part("view-server").hidden) this.timer = setTimeout(() => this.poll(), INTERVAL_MS);
  }

  draw(info, now) {
    const state = info.internal_states[0];
    this.drawTiles(info, state, now);
    this.drawDecisions(info.speculation);
    this.drawDrafters(info);
    drawPositions(part("server-positions"), state.accepted_per_position.map((count) => count / state.drafts));
    const { drafting_seconds: drafting, target_seconds: model, step_seconds: all } = state;
    drawSplit(part("server-split"), { drafting, model, other: Math.max(0, all - drafting - model) });
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
    const meter = make("meter", { min: 0, max: pages, value: state.pages_held, "aria-label": "KV pages in use" });
    part("server-tiles").replaceChildren(
      tile("running", whole(state.running)),
      tile("waiting", whole(state.waiting)),
      tile(`of ${whole(pages)} KV pages in use`, whole(state.pages_held), meter),
      tile("tokens/s", fixed(speed)),
      tile("estimated speedup", state.speedup === null ? "–" : times(state.speedup)),
      tile("acceptance rate", state.drafts ? percent(state.acceptance_rate) : "–"),
      tile("mean acceptance length", fixed(state.avg_spec_accept_length, 2)),
    );
  }

  drawDecisions({ on, reason, decisions }) {
    const why = reason ? `, last switched because ${reason}` : ", not switched since the start";
    part("server-speculation").textContent = `Speculative decoding is ${on ? "on" : "off"}${why}.`;
    const known = new Map((this.before?.info.speculation.decisions ?? []).map((each) => [name(each), each.steps]));
    const rows = [...decisions].sort((a, b) => a.drafter.localeCompare(b.drafter) || a.decision.localeCompare(b.decision) || b.steps - a.steps).map((each) => {
      const fresh = known.has(name(each)) || this.before ? each.steps - (known.get(name(each)) ?? 0) : 0;
      return make(
        "tr",
        fresh ? { class: "fresh" } : {},
        make("th", { scope: "row" }, each.drafter),
        make("td", {}, make("b", {}, each.decision), `: ${drafterReasonText(each.reason)}`),
        make("td", { class: "number" }, fresh ? `+${whole(fresh)}` : ""),
        make("td", { class: "number" }, whole(each.steps)),
      );
    });
    part("server-decisions").replaceChildren(...(rows.length ? rows : [emptyRow(4, "no decisions yet")]));
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
    part("server-drafters").replaceChildren(...(rows.length ? rows : [emptyRow(4, "no drafts yet")]));
  }
}

const name = ({ drafter, decision, reason }) => `${drafter} ${decision} ${reason}`;

const emptyRow = (columns, words) => make("tr", {}, make("td", { colspan: columns, class: "hint" }, words));

function drawFacts(into, facts) {
  into.replaceChildren(...facts.flatMap(([term, value]) => [make("dt", {}, term), make("dd", {}, value)]));
}

function memoryFacts({ memory }) {
  const names = { weights: "weights", drafter: "drafters", cache: "KV cache", step: "activations", program: "process", total: "total" };
  return Object.entries(names).map(([key, words]) => [words, bytes(memory[key])]);
}

function servedFacts(info, state) {
  return [
    ["model", info.model],
    ["served names", info.served_model_names.join(", ")],
    ["context length", `${whole(info.max_model_len)} tokens`],
    ["drafters", info.drafters.join(", ") || "none"],
    ["max draft tokens per step", whole(info.max_draft)],
    ["verification rule", info.rule],
    ["finished sequences", whole(state.texts)],
    ["output tokens", whole(state.tokens)],
    ["preemptions", whole(state.preemptions)],
    ["version", info.version],
  ];
}
