// The request settings form.
import { make, part } from "./dom.js";
import { ruleText } from "./format.js";

const SEEDS = 2 ** 31;

export class Settings {
  constructor() {
    this.info = null;
    part("settings-form").addEventListener("input", () => this.changed());
    part("settings-form").addEventListener("submit", (event) => event.preventDefault());
    if (matchMedia("(max-width: 60rem)").matches) part("settings").open = false;
  }

  /** Fill the form with the server's drafters, rules and defaults. */
  load(info) {
    this.info = info;
    const option = (value, words) => make("option", { value }, words);
    const drafters = info.drafters.map((name) => option(name, name));
    part("set-drafter").replaceChildren(option("", `server default (${info.drafter})`), ...drafters, option("none", "none: plain decoding"));
    const group = (label, rules) => make("optgroup", { label }, ...rules.map((rule) => option(rule, rule)));
    part("set-rule").replaceChildren(
      option("", `server default (${info.rule})`),
      group("Lossless: same output distribution", [...info.rules.lossless, "auto"]),
      group("Lossy: the output may change", info.rules.lossy),
    );
    part("set-budget").placeholder = `at most ${info.max_draft}`;
    part("set-temperature").placeholder = String(info.sampling_defaults.temperature ?? 1);
    this.changed();
  }

  get rule() {
    return part("set-rule").value || this.info?.rule || "match";
  }

  get lossy() {
    return Boolean(this.info?.rules.lossy.includes(this.rule)) && part("set-drafter").value !== "none";
  }

  changed() {
    part("rule-words").textContent = ruleText(this.rule);
    part("rule-words").classList.toggle("lossy", this.lossy);
    part("lossy-mark").hidden = !this.lossy;
    part("lossy-mark").textContent = this.lossy ? `Lossy rule: ${this.rule}` : "";
    const problem = this.schema().problem;
    part("schema-words").hidden = !problem;
    part("schema-words").textContent = problem ?? "";
    part("set-schema").setAttribute("aria-invalid", String(Boolean(problem)));
  }

  schema() {
    const text = part("set-schema").value.trim();
    if (!text) return {};
    try {
      return { value: JSON.parse(text) };
    } catch (error) {
      return { problem: `Invalid JSON: ${error.message}` };
    }
  }

  /** Return the request fields of the form. A missing seed is chosen here, so that it is known. */
  fields() {
    const found = { return_token_details: true, stream_options: { include_usage: true } };
    const seed = part("set-seed").valueAsNumber;
    if (Number.isSafeInteger(seed)) found.seed = seed;
    else if (this.rule !== "auto") found.seed = Math.floor(Math.random() * SEEDS);
    for (const [name, id] of [["temperature", "set-temperature"], ["max_tokens", "set-tokens"]]) {
      if (!Number.isNaN(part(id).valueAsNumber)) found[name] = part(id).valueAsNumber;
    }
    const { value, problem } = this.schema();
    if (problem) throw new Error(problem);
    if (value !== undefined) {
      found.response_format = { type: "json_schema", json_schema: { name: "answer", schema: value } };
    }
    return { ...found, speculative: this.speculative() };
  }

  speculative() {
    const drafter = part("set-drafter").value;
    const budget = part("set-budget").valueAsNumber;
    if (drafter === "none") return false;
    return {
      ...(drafter ? { drafter } : {}),
      ...(Number.isNaN(budget) ? {} : { max_draft: budget }),
      ...(part("set-rule").value ? { rule: part("set-rule").value } : {}),
    };
  }

  /** Return the request for these messages; without a chat template, a completion of the last one. */
  request(messages) {
    const fields = this.fields();
    if (!this.info.chats) return { path: "v1/completions", body: { ...fields, prompt: messages.at(-1).content } };
    const system = part("set-system").value.trim();
    const opening = system ? [{ role: "system", content: system }] : [];
    return { path: "v1/chat/completions", body: { ...fields, messages: [...opening, ...messages] } };
  }
}
