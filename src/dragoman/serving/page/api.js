// Requests to the server. Every failure becomes an ApiError whose message is a sentence for people.

const KEY = "dragoman-key";
const MAX_TRIES = 6;
let askForKey = async () => false;
export const limits = { max_texts: 1, max_nbest: 1 }; // of the server, once its settings are known

export class ApiError extends Error {
  constructor(code, message, { status = 0, retryAfter = 0 } = {}) {
    super(message);
    Object.assign(this, { code, status, retryAfter });
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: value => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** Call `ask(message)` when the server wants a key; it resolves to whether there is a new one. */
export function whenKeyIsNeeded(ask) {
  askForKey = ask;
}

const makeHeaders = () => (key.get() ? { Authorization: `Bearer ${key.get()}` } : {});

/** Return a message of the server as a sentence. Its first word stays as it is if it is a name, such as photo.jpg. */
export function toSentence(text) {
  const sentence = text.trim().replace(/^\p{Ll}(?=[\p{L}'’-]*([\s,:;]|$))/u, letter => letter.toUpperCase());
  return sentence + (/[.!?…]$/.test(sentence) ? "" : ".");
}

function makeError(status, body, retryAfter = 0) {
  const { code, message } = body?.error ?? {};
  const fallback = status >= 500 ? "The server could not answer; try again later" : `The server refused the request (${status})`;
  return new ApiError(code ?? "error", toSentence(typeof message === "string" && message ? message : fallback), { status, retryAfter });
}

export const UNREACHABLE = new ApiError("unreachable", "The server cannot be reached. It may have stopped, or the connection is broken.");

/** Return what `attempt` returns. A server that is busy is asked again after the time it names, or with another key. */
async function persist(attempt, signal, onWait = () => {}) {
  for (let tries = 1; ; tries++) {
    const used = key.get(); // an answer may come after another request has led to a new key
    try {
      return await attempt();
    } catch (error) {
      if (["key_missing", "key_invalid"].includes(error.code) && (key.get() !== used || (await askForKey(error.message)))) continue;
      if (!error.retryAfter || tries === MAX_TRIES || ![429, 503].includes(error.status)) throw error;
      onWait(error.retryAfter);
      await sleep(error.retryAfter * 1000, signal);
    }
  }
}

/** Send a request and return the response. */
export function send(path, { method = "GET", body, signal, onWait } = {}) {
  return persist(async () => {
    const headers = { ...makeHeaders(), ...(body === undefined ? {} : { "Content-Type": "application/json" }) };
    let response;
    try {
      response = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
    } catch (error) {
      throw error.name === "AbortError" ? error : UNREACHABLE;
    }
    if (response.ok) return response;
    throw makeError(response.status, await response.json().catch(() => null), Number(response.headers.get("Retry-After")) || 0);
  }, signal, onWait);
}

/** Send a form and return the answer; `onProgress` gets the bytes that were sent, and all of them. */
export function sendForm(path, form, { signal, onProgress, onWait }) {
  const attempt = () => new Promise((resolve, reject) => {
    const request = new XMLHttpRequest(); // fetch does not tell how much was sent
    request.open("POST", path);
    for (const [name, value] of Object.entries(makeHeaders())) request.setRequestHeader(name, value);
    request.upload.addEventListener("progress", event => onProgress(event.loaded, event.total));
    request.addEventListener("error", () => reject(UNREACHABLE));
    request.addEventListener("load", () => {
      const body = parseJson(request.responseText);
      if (request.status < 300) resolve(body);
      else reject(makeError(request.status, body, Number(request.getResponseHeader("Retry-After")) || 0));
    });
    signal.addEventListener("abort", () => {
      request.abort();
      reject(signal.reason);
    }, { once: true });
    request.send(form);
  });
  return persist(attempt, signal, onWait);
}

function parseJson(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

export const getJson = (path, options) => send(path, options).then(response => response.json());
export const postJson = (path, body, options) => getJson(path, { method: "POST", body, ...options });

export function sleep(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    }, { once: true });
  });
}

/** Stream a translation: call `onPart` with each part of the text and return the final answer. */
export async function stream(body, { signal, onPart, onWait }) {
  const response = await send("api/stream", { method: "POST", body, signal, onWait });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    let chunk;
    try {
      chunk = await reader.read();
    } catch (error) {
      throw error.name === "AbortError" ? error : UNREACHABLE;
    }
    if (chunk.done) throw UNREACHABLE; // the connection ended before the event "done"
    buffer += chunk.value;
    const events = buffer.split(/\r?\n\r?\n/);
    buffer = events.pop();
    for (const event of events) {
      const fields = Object.fromEntries(event.split(/\r?\n/).map(line => line.split(/: ?(.*)/s, 2)));
      const data = fields.data ? JSON.parse(fields.data) : {};
      if (fields.event === "part") onPart(data.text);
      else if (fields.event === "done") return data;
      else if (fields.event === "error") throw makeError(500, data);
    }
  }
}
