// Draws what this product is about: the tokens that a step reads beside those stored and those that full attention would read, and bytes alike.

const at = id => document.getElementById(id);
const WIDTH = 300, HEIGHT = 80, PAD = 3;
const KINDS = { full: "decode_tokens_seen", stored: "decode_tokens_stored", read: "decode_tokens_read" };

export const count = n => Math.round(n).toLocaleString("en");

export function size(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; n >= 1024 && unit < units.length - 1; unit++) n /= 1024;
  return n.toFixed(unit ? 1 : 0) + " " + units[unit];
}

export const seconds = ms => (ms < 1000 ? Math.round(ms) + " ms" : (ms / 1000).toFixed(1) + " s");

// Adds up the bytes of an engine's tiers.
export const stored = engine => Object.values(engine.kv_cache_bytes ?? {}).reduce((sum, one) => sum + one, 0);

// The figures of one answer: a point for every look at the engine while it decodes.
export class Figures {
  constructor() {
    this.points = [];
    this.began = performance.now();
    this.first = this.last = 0;
    this.tokens = 0;
    at("figures").hidden = false;
    this.draw();
  }

  // Notes how many tokens have come.
  arrived(tokens) {
    if (tokens <= this.tokens) return;
    this.last = performance.now();
    this.first ||= this.last;
    this.tokens = tokens;
  }

  // Takes a state of the engine that answers; sequences of others make it a mean.
  look(engine) {
    if (engine.decode_tokens_seen > 0) this.points.push(engine);
    this.running = engine.running;
    this.draw();
  }

  get rate() {
    return this.tokens > 1 ? (this.tokens - 1) / Math.max(0.001, (this.last - this.first) / 1000) : 0;
  }

  // Says in a line what the answer took.
  line(usage, reason) {
    const now = this.points.at(-1), said = [];
    if (usage) said.push(`${count(usage.prompt_tokens)} + ${count(usage.completion_tokens)} tokens`);
    if (this.first) said.push(`first after ${seconds(this.first - this.began)}`);
    if (this.rate) said.push(`${this.rate.toFixed(1)} tokens/s`);
    if (now) said.push(`read ${count(now.decode_tokens_read)} of ${count(now.decode_tokens_seen)} tokens a step`);
    if (now) said.push(`stored ${size(stored(now))} where full attention stores ${size(now.kv_cache_full_bytes)}`);
    if (reason && reason !== "stop") said.push(reason === "length" ? "ended at the longest answer" : reason);
    return said.join(" · ");
  }

  draw() {
    const now = this.points.at(-1), others = this.running > 1 ? ", mean of " + this.running : "";
    at("rate").textContent = this.rate ? this.rate.toFixed(1) : "–";
    at("first").textContent = this.first ? seconds(this.first - this.began) : "–";
    at("running").textContent = this.running ?? "–";
    at("tokens").textContent = now ? `reads ${count(now.decode_tokens_read)} of ${count(now.decode_tokens_seen)}${others}` : "–";
    at("bytes").textContent = now ? `${size(stored(now))}, full attention ${size(now.kv_cache_full_bytes)}` : "–";
    this.drawLines();
    const most = now ? Math.max(stored(now), now.kv_cache_full_bytes, 1) : 1;
    at("bars").querySelector(".full").setAttribute("width", now ? (WIDTH * now.kv_cache_full_bytes) / most : 0);
    at("bars").querySelector(".stored").setAttribute("width", now ? (WIDTH * stored(now)) / most : 0);
  }

  drawLines() {
    const most = Math.max(1, ...this.points.map(one => one.decode_tokens_seen)), last = Math.max(1, this.points.length - 1);
    for (const [kind, name] of Object.entries(KINDS)) {
      const places = this.points.map((one, index) => {
        const up = (one[name] / most) * (HEIGHT - 2 * PAD);
        return `${((index / last) * WIDTH).toFixed(1)} ${(HEIGHT - PAD - up).toFixed(1)}`;
      });
      if (places.length === 1) places.push(places[0].replace(/^\S+/, WIDTH));
      at("lines").querySelector("." + kind).setAttribute("d", places.length ? "M" + places.join("L") : "");
    }
  }
}
