// The conversation.
import { Answer } from "./answer.js";
import { isStop, ConnectionLost } from "./api.js";
import { loadTurns, saveTurns } from "./conversation_store.js";
import { announce, make, part } from "./dom.js";
import { exampleButtons } from "./examples.js";
import { RoundStats } from "./round_stats.js";
import { count, fixed } from "./format.js";

const NEAR = 80; // pixels from the end within which the view follows new text

export class Chat {
  /** `showError(error)` shows the banner; `shown` maps elements to answers; `racing()` returns whether a race runs. */
  constructor({ api, settings, drafters, figures, shown, showError, racing }) {
    Object.assign(this, { api, settings, drafters, figures, shown, showError, racing });
    this.turns = []; // a question and its response each
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
    part("markdown").addEventListener("change", () => this.turns.forEach(({ answer }) => answer.redraw()));
    addEventListener("pagehide", () => this.busy && this.save()); // what has arrived of the response
  }

  stop() {
    this.stopper?.abort();
  }

  clear() {
    this.stop();
    this.turns = [];
    this.save();
    part("conversation").replaceChildren(part("welcome"));
    part("welcome").hidden = false;
    part("message").focus();
  }

  save() {
    const complete = this.turns.filter(({ answer }) => answer.content);
    saveTurns(complete.map(({ question, answer }) => ({ question, answer: answer.saved() })));
  }

  /** Show the conversation of before the reload. */
  restore() {
    if (this.turns.length || this.busy) return;
    for (const { question, answer: saved } of loadTurns()) {
      const turn = this.newTurn(question);
      turn.answer.restore(saved);
      this.figures.show(turn.answer.stats);
    }
    if (this.turns.length) this.follow();
  }

  /** Add a question and an empty response to the conversation. */
  newTurn(question) {
    const element = make("article", { class: "message question", "aria-label": "You" }, make("div", { class: "text" }, question));
    const turn = { question, answer: this.newAnswer() };
    this.turns.push(turn);
    part("welcome").hidden = true;
    part("conversation").append(element, turn.answer.element);
    return turn;
  }

  newAnswer() {
    const answer = new Answer(this.drafters, () => this.regenerate());
    this.shown.set(answer.element, answer);
    return answer;
  }

  /** Return the request for a question after some turns, or null if there can be none now. */
  request(turns, question) {
    if (this.busy || !question.trim() || !this.settings.info) return null;
    const before = turns.flatMap((turn) => [
      { role: "user", content: turn.question },
      { role: "assistant", content: turn.answer.content },
    ]);
    try {
      if (this.racing()) throw new Error("A race is running and needs the machine to itself; send when it has finished");
      return this.settings.request([...before, { role: "user", content: question }]);
    } catch (problem) {
      this.showError(problem);
      return null;
    }
  }

  /** Send one message; if the request fails without output, the conversation is unchanged. */
  async send(question) {
    const request = this.request(this.turns, question);
    if (!request) return;
    part("message").value = "";
    const turn = this.newTurn(question);
    await this.write(request, turn.answer);
    if (!turn.answer.content) {
      this.turns = this.turns.filter((each) => each !== turn);
      part("message").value ||= question;
    }
    this.save();
  }

  /** Replace the last response by another one, unless the request fails without output. */
  async regenerate() {
    const turn = this.turns.at(-1);
    const request = turn && this.request(this.turns.slice(0, -1), turn.question);
    if (!request) return;
    const old = turn.answer;
    turn.answer = this.newAnswer();
    old.element.replaceWith(turn.answer.element);
    await this.write(request, turn.answer);
    if (!turn.answer.content && turn.answer.element.isConnected) {
      turn.answer.element.replaceWith(old.element);
      turn.answer = old;
    }
    this.save();
  }

  async write({ path, body }, answer) {
    this.follow();
    this.stopper = new AbortController();
    this.drawState();
    announce("The model is responding");
    const { signal } = this.stopper;
    try {
      for await (const chunk of this.api.stream(path, body, signal)) {
        const close = this.isAtEnd();
        for (const choice of chunk.choices) answer.add(choice);
        if (chunk.speculation) answer.close(chunk.speculation);
        this.figures.show(answer.stats);
        if (close) requestAnimationFrame(() => this.follow()); // after the text is rendered
      }
      answer.end();
      const { tokens, perStep } = answer.stats;
      announce(`The response is finished: ${count(tokens, "token")}, ${fixed(perStep, 2)} per step`);
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
    part("conversation").lastElementChild?.scrollIntoView({ block: "end" });
  }
}
