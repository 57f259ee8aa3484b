// The conversation.
import { Answer } from "./answer.js";
import { isStop, ConnectionLost } from "./api.js";
import { announce, make, part } from "./dom.js";
import { exampleButtons } from "./examples.js";
import { RoundStats } from "./round_stats.js";
import { fixed } from "./format.js";

const NEAR = 80; // pixels from the end within which the view follows new text

export class Chat {
  /** `showError(error)` shows the banner; `shown` maps elements to answers; `racing()` returns whether a race runs. */
  constructor({ api, settings, drafters, figures, shown, showError, racing }) {
    Object.assign(this, { api, settings, drafters, figures, shown, showError, racing });
    this.messages = [];
    this.stopper = null;
    this.listen();
    part("examples").replaceChildren(...exampleButtons((text) => this.send(text)));
    this.figures.show(new RoundStats());
  }

  get busy() {
    return this.stopper !== null;
  }

  listen() {
    const field = part("message");
    part("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(field.value);
    });
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send(field.value);
    });
    document.addEventListener("keydown", (event) => event.key === "Escape" && part("card").hidden && this.stop());
    part("stop").addEventListener("click", () => this.stop());
    part("clear").addEventListener("click", () => this.clear());
  }

  stop() {
    this.stopper?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    part("conversation").replaceChildren(part("welcome"));
    part("welcome").hidden = false;
    part("message").focus();
  }

  /** Send one message; if the request fails without output, the conversation is unchanged. */
  async send(text) {
    if (this.busy || !text.trim() || !this.settings.info) return;
    if (this.racing()) {
      this.showError(new Error("A race is running and needs the machine to itself; send when it has finished"));
      return;
    }
    const asked = [...this.messages, { role: "user", content: text }];
    let request;
    try {
      request = this.settings.request(asked);
    } catch (problem) {
      this.showError(problem);
      return;
    }
    const question = make("article", { class: "message question", "aria-label": "You" }, make("div", { class: "text" }, text));
    const answer = new Answer(this.drafters);
    this.begin(question, answer);
    await this.write(request, answer);
    if (answer.content) this.messages = [...asked, { role: "assistant", content: answer.content }];
    else part("message").value ||= text;
  }

  begin(question, answer) {
    part("welcome").hidden = true;
    part("message").value = "";
    this.shown.set(answer.element, answer);
    part("conversation").append(question, answer.element);
    this.follow();
    this.stopper = new AbortController();
    this.drawState();
    announce("The model is responding");
  }

  async write({ path, body }, answer) {
    const { signal } = this.stopper;
    try {
      for await (const chunk of this.api.stream(path, body, signal)) {
        const close = this.isAtEnd();
        for (const choice of chunk.choices) answer.add(choice);
        if (chunk.speculation) answer.close(chunk);
        this.figures.show(answer.stats);
        if (close) this.follow();
      }
      answer.end();
      const { tokens, perStep } = answer.stats;
      announce(`The response is finished: ${tokens} tokens, ${fixed(perStep, 2)} per step`);
    } catch (error) {
      this.failed(error, answer);
    } finally {
      this.stopper = null;
      this.drawState();
    }
  }

  failed(error, answer) {
    if (isStop(error)) {
      answer.end("stopped");
      announce("Stopped");
      return;
    }
    answer.end(error instanceof ConnectionLost ? "interrupted: the connection to the server broke" : error.message);
    this.showError(error);
  }

  drawState() {
    part("send").hidden = this.busy;
    part("stop").hidden = !this.busy;
    part("conversation").setAttribute("aria-busy", String(this.busy));
  }

  /** Return whether the end of the conversation is visible above the composer. */
  isAtEnd() {
    const end = part("conversation").lastElementChild.getBoundingClientRect().bottom;
    return end - part("composer").getBoundingClientRect().top < NEAR;
  }

  follow() {
    part("conversation").lastElementChild.scrollIntoView({ block: "end" });
  }
}
