// The conversation.
import { Answer } from "./answer.js";
import { isStop, Lost } from "./api.js";
import { announce, make, part } from "./dom.js";
import { exampleButtons } from "./examples.js";
import { Tally } from "./tally.js";
import { fixed } from "./words.js";

const NEAR = 80; // pixels from the end: whoever reads further up is not pulled down

export class Chat {
  /** `told(error)` says in the banner what went wrong; `shown` knows which answer an element is; `racing()` asks. */
  constructor({ api, settings, drafters, figures, shown, told, racing }) {
    Object.assign(this, { api, settings, drafters, figures, shown, told, racing });
    this.messages = [];
    this.stopper = null;
    this.listen();
    part("examples").replaceChildren(...exampleButtons((text) => this.send(text)));
    this.figures.show(new Tally());
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

  /** Ask and answer once; a question that cannot be asked leaves the conversation as it was. */
  async send(text) {
    if (this.busy || !text.trim() || !this.settings.info) return;
    if (this.racing()) {
      this.told(new Error("A race is being run, and needs the machine for itself; send when it is over"));
      return;
    }
    const asked = [...this.messages, { role: "user", content: text }];
    let request;
    try {
      request = this.settings.request(asked);
    } catch (problem) {
      this.told(problem);
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
    announce("The model is answering");
  }

  async write({ path, body }, answer) {
    const { signal } = this.stopper;
    try {
      for await (const chunk of this.api.stream(path, body, signal)) {
        const close = this.isAtEnd();
        for (const choice of chunk.choices) answer.add(choice);
        if (chunk.speculation) answer.close(chunk);
        this.figures.show(answer.tally);
        if (close) this.follow();
      }
      answer.end();
      const { tokens, perStep } = answer.tally;
      announce(`The answer is finished: ${tokens} tokens, ${fixed(perStep, 2)} a step`);
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
    answer.end(error instanceof Lost ? "broken off: the server went away" : error.message);
    this.told(error);
  }

  drawState() {
    part("send").hidden = this.busy;
    part("stop").hidden = !this.busy;
    part("conversation").setAttribute("aria-busy", String(this.busy));
  }

  /** Whether the last words are in sight, just above the composer. */
  isAtEnd() {
    const end = part("conversation").lastElementChild.getBoundingClientRect().bottom;
    return end - part("composer").getBoundingClientRect().top < NEAR;
  }

  follow() {
    part("conversation").lastElementChild.scrollIntoView({ block: "end" });
  }
}
