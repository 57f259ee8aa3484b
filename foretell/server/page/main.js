// Assembles the page.
import { Api, isStop, ConnectionLost } from "./api.js";
import { Card } from "./card.js";
import { Chat } from "./chat.js";
import { announce, part } from "./dom.js";
import { Drafters } from "./drafters.js";
import { Figures } from "./figures.js";
import { askKey } from "./key.js";
import { Race } from "./race.js";
import { ServerView } from "./server.js";
import { Settings } from "./settings.js";

const VIEWS = ["chat", "race", "server"];
const THEMES = ["system", "light", "dark"];
const THEME = "foretell.theme";
const RECONNECT_MS = 2000; // milliseconds between two attempts to reach the server

class Page {
  constructor() {
    this.gone = false;
    this.api = new Api({ askKey, lost: () => this.connectionLost(), back: () => this.reconnected() });
    const showError = (error) => this.showError(error);
    const common = { api: this.api, settings: new Settings(), drafters: new Drafters(), shown: new WeakMap(), showError };
    this.settings = common.settings;
    this.drafters = common.drafters;
    this.chat = new Chat({ ...common, figures: new Figures(), racing: () => this.race.busy });
    this.race = new Race({ ...common, chat: this.chat });
    this.server = new ServerView(common);
    new Card(common.drafters, (element) => common.shown.get(element.closest("[data-answer]"))?.find(element));
    this.listen();
    this.setTheme(localStorage.getItem(THEME) ?? "system");
    this.show(location.hash.slice(1));
    this.load();
  }

  listen() {
    for (const view of VIEWS) part(`tab-${view}`).addEventListener("click", () => (location.hash = view));
    document.querySelector("[role=tablist]").addEventListener("keydown", (event) => this.switchTab(event));
    addEventListener("hashchange", () => this.show(location.hash.slice(1)));
    part("tint").addEventListener("change", (event) => document.body.classList.toggle("untinted", !event.target.checked));
    part("banner-close").addEventListener("click", () => (part("banner").hidden = true));
    part("theme").addEventListener("click", () => this.setTheme(THEMES[(THEMES.indexOf(this.theme) + 1) % THEMES.length]));
    part("forget-key").addEventListener("click", () => this.forgetKey());
  }

  /** Load the server's info into the page. */
  async load() {
    try {
      const info = await this.api.get("server_info");
      part("model").textContent = info.served_model_names[0];
      document.title = `Foretell · ${info.served_model_names[0]}`;
      this.drafters.register(info.drafters);
      this.settings.load(info);
      this.chat.restore();
      part("forget-key").hidden = !this.api.key;
    } catch (error) {
      this.showError(error);
    }
  }

  /** Switch tabs with the arrow keys. */
  switchTab(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const now = VIEWS.findIndex((view) => part(`tab-${view}`).getAttribute("aria-selected") === "true");
    const next = VIEWS[(now + step + VIEWS.length) % VIEWS.length];
    location.hash = next;
    part(`tab-${next}`).focus();
  }

  show(wanted) {
    const shown = VIEWS.includes(wanted) ? wanted : VIEWS[0];
    for (const view of VIEWS) {
      part(`view-${view}`).hidden = view !== shown;
      part(`tab-${view}`).setAttribute("aria-selected", String(view === shown));
      part(`tab-${view}`).tabIndex = view === shown ? 0 : -1;
    }
    document.body.dataset.view = shown;
    part("figures").hidden = shown !== "chat";
    this.server.watch(shown === "server");
  }

  setTheme(theme) {
    this.theme = THEMES.includes(theme) ? theme : "system";
    document.documentElement.dataset.theme = this.theme;
    part("theme").textContent = `◐ ${this.theme}`;
    part("theme").setAttribute("aria-label", `Theme: ${this.theme}`);
    localStorage.setItem(THEME, this.theme);
  }

  forgetKey() {
    this.api.key = null;
    part("forget-key").hidden = true;
    announce("The key was removed");
    this.load();
  }

  showError(error) {
    if (isStop(error) || error instanceof ConnectionLost) return; // a lost connection is already shown
    part("banner").classList.remove("gone");
    part("banner-words").textContent = error.message;
    part("banner").hidden = false;
    part("forget-key").hidden = !this.api.key;
  }

  connectionLost() {
    if (this.gone) return;
    this.gone = true;
    part("banner").classList.add("gone");
    part("banner-words").textContent = "The server cannot be reached. Retrying every two seconds.";
    part("banner").hidden = false;
    setTimeout(() => this.reconnect(), RECONNECT_MS);
  }

  async reconnect() {
    const found = await fetch("health", { cache: "no-store" }).catch(() => null);
    if (found) this.reconnected();
    if (this.gone) setTimeout(() => this.reconnect(), RECONNECT_MS);
  }

  reconnected() {
    if (!this.gone) return;
    this.gone = false;
    part("banner").hidden = true;
    announce("The server is reachable again");
    this.load();
  }
}

new Page();
