// Asking the server: keys, streams, and the three ways in which it can go wrong.

const KEY = "foretell.key"; // in sessionStorage: this tab's alone, gone when it is closed

/** The server said no, in words. */
export class Refused extends Error {
  constructor(status, error) {
    super(error?.message ?? `the server answered ${status}`);
    this.status = status;
    this.field = error?.param ?? null;
  }
}

/** The server cannot be reached, or went away in the midst of an answer. */
export class Lost extends Error {}

/** The user does not want to go on. */
export const isStop = (error) => error?.name === "AbortError";

export class Api {
  /** `askKey(wrong)` gives a key or throws; `lost()` and `back()` hear how the server is. */
  constructor({ askKey, lost, back }) {
    this.askKey = askKey;
    this.lost = lost;
    this.back = back;
    this.asking = null;
  }

  get key() {
    return sessionStorage.getItem(KEY);
  }

  set key(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  }

  /** What a path answers, as JSON. */
  async get(path) {
    return (await this.send(path)).json();
  }

  /** The chunks of a streamed answer. A failure inside the stream is thrown. */
  async *stream(path, body, signal) {
    const asked = { method: "POST", body: JSON.stringify({ ...body, stream: true }), signal };
    const reply = await this.send(path, asked);
    for await (const data of events(reply.body, signal, () => this.lost())) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(chunk.error.code === "unavailable" ? 503 : 500, chunk.error);
      yield chunk;
    }
    this.lost();
    throw new Lost("the server went away in the midst of the answer");
  }

  async send(path, options = {}) {
    for (;;) {
      const key = this.key;
      const reply = await this.reach(path, options, key);
      if (reply.status === 401) {
        await this.newKey(key);
        continue;
      }
      if (!reply.ok) throw new Refused(reply.status, (await reply.json().catch(() => null))?.error);
      return reply;
    }
  }

  async reach(path, options, key) {
    const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    try {
      const reply = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
      this.back();
      return reply;
    } catch (error) {
      if (isStop(error)) throw error;
      this.lost();
      throw new Lost("the server cannot be reached");
    }
  }

  /** Ask once, however many requests were turned away with the key that was `tried`. */
  async newKey(tried) {
    if (this.key !== tried) return; // another request has got a new one meanwhile
    this.asking ??= this.askKey(Boolean(tried)).finally(() => (this.asking = null));
    this.key = await this.asking;
  }
}

/** The data of server-sent events. */
async function* events(body, signal, lost) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      held += value;
      const whole = held.split("\n\n");
      held = whole.pop();
      for (const event of whole) if (event.startsWith("data: ")) yield event.slice(6);
    }
  } catch (error) {
    if (isStop(error) || signal?.aborted) throw new DOMException("stopped", "AbortError");
    lost();
    throw new Lost("the server went away in the midst of the answer");
  } finally {
    reader.cancel().catch(() => {});
  }
}
