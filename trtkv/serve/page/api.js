// The server as the page sees it: its state, and answers that stream in.

import { key } from "./store.js";

// What went wrong with a request, with its HTTP status.
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const headers = () => ({ "content-type": "application/json", ...(key.get() ? { authorization: "Bearer " + key.get() } : {}) });

async function checked(response) {
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new Refused(response.status, said?.error?.message ?? "the server answered " + response.status);
}

// Returns the engines with what they hold.
export async function status() {
  const response = await checked(await fetch("status", { headers: headers() }));
  return (await response.json()).engines;
}

// Yields the chunks of an answer; aborting the signal ends it in the engine too.
export async function* answer(body, signal) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  const response = await checked(await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(asked), signal }));
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(Number(chunk.error.code) || 500, chunk.error.message);
    yield chunk;
  }
  throw new Refused(0, "the connection ended before the answer did");
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}
