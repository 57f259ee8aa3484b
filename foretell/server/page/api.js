// Requests to the server: API key, streams, and the three ways in which they can fail.

const KEY = "foretell.key"; // in sessionStorage: of this tab only, removed when it is closed

/** An error response of the server. */
export class ApiError extends Error {
  constructor(status, error) {
    super(error?.message ?? `the server answered ${status}`);
    this.status = status;
    this.field = error?.param ?? null;
  }
}

/** The server cannot be reached, or the connection broke during a response. */
export class ConnectionLost extends Error {}

/** Return whether the user has stopped the request. */
export const isStop = (error) => error?.name === "AbortError";

export class Api {
  /** `askKey(wrong)` returns a key or throws; `lost()` and `back()` are called when the connection breaks and returns. */
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

  /** Return the JSON body of a path. */
  async get(path) {
    return (await this.send(path)).json();
  }

  /** Yield the chunks of a streamed response. An error inside the stream is thrown. */
  async *stream(path, body, signal) {
    const asked = { method: "POST", body: JSON.stringify({ ...body, stream: true }), signal };
    const reply = await this.send(path, asked);
    for await (const data of events(reply.body, signal, () => this.lost())) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.code === "unavailable" ? 503 : 500, chunk.error);
      yield chunk;
    }
    this.lost();
    throw new ConnectionLost("the connection to the server broke during the response");
  }

  async send(path, options = {}) {
    for (;;) {
      const key = this.key;
      const reply = await this.reach(path, options, key);
      if (reply.status === 401) {
        await this.newKey(key);
        continue;
      }
      if (!reply.ok) throw new ApiError(reply.status, (await reply.json().catch(() => null))?.error);
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
      throw new ConnectionLost("the server cannot be reached");
    }
  }

  /** Ask once, however many requests were rejected with the key that was `tried`. */
  async newKey(tried) {
    if (this.key !== tried) return; // another request already has a new one
    this.asking ??= this.askKey(Boolean(tried)).finally(() => (this.asking = null));
    this.key = await this.asking;
  }
}

/** Yield the data of server-sent events. */
async function* events(body, signal, lost) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      held += value;
      const complete = held.split("\n\n");
      held = complete.pop();
      for (const event of complete) if (event.startsWith("data: ")) yield event.slice(6);
    }
  } catch (error) {
    if (isStop(error) || signal?.aborted) throw new DOMException("stopped", "AbortError");
    lost();
    throw new ConnectionLost("the connection to the server broke during the response");
  } finally {
    reader.cancel().catch(() => {});
  }
}
