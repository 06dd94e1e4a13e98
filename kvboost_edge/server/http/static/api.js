/** Requests to this server and its errors. The API key is sent in the Authorization header only. */

/** An error: `message` for people, `detail` from the server, `status` 0 without a response. */
export class ApiError extends Error {
  constructor(message, { status = 0, detail = "", requestId = "" } = {}) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.detail = detail;
    this.requestId = requestId;
  }
}

const PATIENCE_MS = 10000; // for a response in JSON

/** Messages by error code, if it is more specific than the status, and by status. */
const WORDS = {
  capacity_exceeded: "The request does not fit into the server's memory.",
  context_length_exceeded: "The conversation exceeds the model's context.",
  deadline_exceeded: "The request exceeded the server's time limit.",
  engine_stopped: "The engine has stopped after an error. Restart the server.",
  queue_full: "The server is busy.",
  shutting_down: "The server is shutting down.",
  400: "The server does not accept this request.",
  401: "The server does not accept the API key. Set it under Settings.",
  403: "This API key is not allowed to do that.",
  404: "The server does not know this model or address.",
  409: "The model is in use.",
  408: "The request took too long to arrive.",
  413: "The conversation is too large for the server.",
  422: "The server does not accept this request.",
  429: "Too many requests for this API key.",
  500: "The server failed while answering.",
  502: "The model could not be downloaded.",
  503: "The server is busy or shutting down.",
  504: "The request exceeded the server's time limit.",
};

/**
 * A request to `path`, by default a POST if it has a body; resolves to the Response, rejects with ApiError, or with
 * AbortError when `signal` fired.
 */
export async function request(path, { key = "", body = null, signal = null, method = body === null ? "GET" : "POST" } = {}) {
  const headers = {};
  // fetch would fail as if the server were not reachable.
  if (/[^\x21-\x7e]/.test(key)) throw new ApiError("The API key has a character that no key can have. Set it under Settings.", { status: 401 });
  if (key !== "") headers.Authorization = `Bearer ${key}`;
  if (body !== null) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method,
      headers,
      body: body === null ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await refused(response);
  return response;
}

/** The JSON at `path`. Rejects with ApiError, also if the server takes too long. */
export async function readJsonFrom(path, key) {
  const signal = AbortSignal.timeout(PATIENCE_MS);
  try {
    return await (await request(path, { key, signal })).json();
  } catch (error) {
    if (error instanceof ApiError) throw error;
    throw new ApiError(signal.aborted ? "The server takes too long to answer." : "The server sent an incomplete answer.");
  }
}

/** The value of `promise`; rejects when `signal` fires. */
export function unlessAborted(signal, promise) {
  const aborted = new Promise((_, reject) => { signal.addEventListener("abort", () => reject(signal.reason), { once: true }); });
  return Promise.race([promise, aborted]);
}

/** The objects of a streamed chat completion; calls `begun(request id)` first. Rejects with ApiError. */
export async function* streamChat(body, { key, signal, begun }) {
  const response = await request("/v1/chat/completions", { key, body, signal });
  const requestId = idOf(response);
  begun(requestId);
  for await (const line of linesOf(response, signal)) {
    if (!line.startsWith("data: ")) continue; // a comment, or the end of an event, which has one line of data
    const data = line.slice("data: ".length);
    if (data === "[DONE]") return;
    yield parsed(data, requestId);
  }
  throw new ApiError("The connection ended before the answer was complete.", { requestId });
}

/** The objects of an answer in JSON lines. Rejects with ApiError, also for an object with an error. */
export async function* streamLines(path, options) {
  const response = await request(path, options);
  for await (const line of linesOf(response, options.signal)) {
    if (line !== "") yield parsed(line, idOf(response), "The server reports an error.");
  }
}

/** The lines of an answer as they arrive, without a last one that is not ended. */
async function* linesOf(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      if (signal?.aborted) throw error;
      throw new ApiError("The connection to the server was lost.", { detail: String(error.message), requestId: idOf(response) });
    });
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) yield line.trimEnd(); // a proxy may end lines with CR LF
  }
}

const idOf = (response) => response.headers.get("x-request-id") ?? "";

/** `words`: those for an error without a known code. */
function parsed(data, requestId, words = "The server failed while answering.") {
  let chunk;
  try {
    chunk = JSON.parse(data);
  } catch {
    throw new ApiError("The server sent invalid JSON.", { detail: data.slice(0, 200), requestId });
  }
  if (!chunk.error) return chunk;
  const { message, code } = partsOf(chunk.error);
  throw new ApiError(WORDS[code] ?? words, { detail: message, requestId });
}

async function refused(response) {
  const { message: detail = "", code = "" } = await errorOf(response);
  let message = WORDS[code] ?? WORDS[response.status] ?? `The server answered with status ${response.status}.`;
  const wait = Number(response.headers.get("retry-after"));
  if (wait > 0) message += ` Try again in ${wait} s.`;
  return new ApiError(message, { status: response.status, detail, requestId: idOf(response) });
}

/** The error in OpenAI's or Ollama's format; {} for other formats, which are shown by status. */
async function errorOf(response) {
  try {
    return partsOf((await response.json()).error);
  } catch {
    return {};
  }
}

/** Message and code of an error: an object in OpenAI's format, a text in Ollama's. */
function partsOf(error) {
  if (typeof error === "string") return { message: error, code: "" };
  return { message: String(error.message ?? ""), code: error.code ?? "" };
}
