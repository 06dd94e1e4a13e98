/** Requests to this server and its errors. The API key is sent in the Authorization header only. */

import { EventParser } from "/static/sse.js";

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
  408: "The request took too long to arrive.",
  413: "The conversation is too large for the server.",
  422: "The server does not accept this request.",
  429: "Too many requests for this API key.",
  500: "The server failed while answering.",
  503: "The server is busy or shutting down.",
  504: "The request exceeded the server's time limit.",
};

/** A request to `path`; resolves to the Response, rejects with ApiError, or with AbortError when `signal` fired. */
export async function request(path, { key = "", body = null, signal = null } = {}) {
  const headers = {};
  if (key !== "") headers.Authorization = `Bearer ${key}`;
  if (body !== null) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === null ? "GET" : "POST",
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

/** The objects of a streamed chat completion; calls `begun(request id)` first. Rejects with ApiError. */
export async function* streamChat(body, { key, signal, begun }) {
  const response = await request("/v1/chat/completions", { key, body, signal });
  const requestId = response.headers.get("x-request-id") ?? "";
  begun(requestId);
  const parser = new EventParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await nextPiece(reader, signal, requestId);
    if (done) throw new ApiError("The connection ended before the answer was complete.", { requestId });
    for (const data of parser.push(value)) {
      if (data === "[DONE]") return;
      yield parsed(data, requestId);
    }
  }
}

async function nextPiece(reader, signal, requestId) {
  try {
    return await reader.read();
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError("The connection to the server was lost.", { detail: String(error.message), requestId });
  }
}

function parsed(data, requestId) {
  let chunk;
  try {
    chunk = JSON.parse(data);
  } catch {
    throw new ApiError("The server sent invalid JSON.", { detail: data.slice(0, 200), requestId });
  }
  if (chunk.error) throw new ApiError(WORDS[chunk.error.code] ?? "The server failed while answering.", { detail: chunk.error.message ?? "", requestId });
  return chunk;
}

async function refused(response) {
  const { message: detail = "", code = "" } = await errorOf(response);
  let message = WORDS[code] ?? WORDS[response.status] ?? `The server answered with status ${response.status}.`;
  const wait = Number(response.headers.get("retry-after"));
  if (wait > 0) message += ` Try again in ${wait} s.`;
  return new ApiError(message, { status: response.status, detail, requestId: response.headers.get("x-request-id") ?? "" });
}

/** The error in OpenAI's format; {} for other formats, which are shown by status. */
async function errorOf(response) {
  try {
    const { message, code } = (await response.json()).error;
    return { message: String(message ?? ""), code: code ?? "" };
  } catch {
    return {};
  }
}
