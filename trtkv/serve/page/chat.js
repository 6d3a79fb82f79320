// The chat page: a conversation, the ones before it, and what the engine does meanwhile.

import { answer, status } from "./api.js";
import { Figures, size, stored } from "./figures.js";
import { copy, follow, make } from "./render.js";
import { chats, key, settings } from "./store.js";

const at = id => document.getElementById(id);
const FIELDS = ["system", "temperature", "top_p", "max_tokens", "seed", "budget", "tau"];
const BUSY_MS = 250, IDLE_MS = 2000;
const NEAR = 60; // pixels from its end in which the log follows what is written

let chat = chats.get(location.hash.slice(1)) ?? chats.make();
let engines = [];
let running = null; // what stops the answer that streams in
let figures = null;
let editing = false;
let timer = 0;

// The engine

const engine = () => engines.find(one => one.model === at("model").value) ?? engines[0];

async function poll() {
  clearTimeout(timer);
  try {
    engines = await status();
  } catch (error) {
    at("load").textContent = error.status ? "" : "no connection";
    if (error.status === 401) return askKey();
  }
  if (engines.length) showEngine();
  clearTimeout(timer);
  timer = setTimeout(poll, running ? BUSY_MS : IDLE_MS);
}

function showEngine() {
  const select = at("model"), names = engines.map(one => one.model);
  if ([...select.options].map(one => one.value).join("\n") !== names.join("\n")) {
    const wanted = select.value || settings.get().model;
    select.replaceChildren(...names.map(name => new Option(name)));
    select.value = names.includes(wanted) ? wanted : names[0];
  }
  const one = engine();
  at("policy").textContent = `policy ${one.policy}, up to ${one.max_seq_len.toLocaleString("en")} tokens`;
  const waiting = one.waiting ? `, ${one.waiting} waiting` : "";
  at("load").textContent = one.running === undefined ? "" : `${one.running} running${waiting}, cache ${size(stored(one))}`;
  at("budget-about").textContent = one.budget ? `tokens read in a step, ${one.budget.join(" to ")}` : one.budget === null ? "not with this policy" : "";
  at("tau-about").textContent = one.tau === false ? "not with this policy" : "cosine below which FreeKV selects anew";
  at("budget").placeholder = one.budget?.[1] ?? "";
  if (running) figures?.look(one);
}

// Keys

function askKey(problem = "") {
  at("key-problem").textContent = problem || (key.get() ? "The key was refused." : "");
  at("given-key").value = "";
  if (!at("ask-key").open) at("ask-key").showModal();
}

async function useKey(value) {
  key.save(value.trim());
  at("key").value = key.get();
  at("ask-key").close();
  await poll();
  if (engines.length && !running && chat.messages.at(-1)?.role === "user") ask();
}

// The conversation

function view({ role, content, note }) {
  const article = make("article", { className: role }), text = make("div", { className: "text" }), small = make("small", {}, note ?? "");
  const tools = make("div", { className: "tools" }), button = make("button", { type: "button" }, "Copy");
  let written = content;
  button.addEventListener("click", () => copy(written, button));
  tools.append(button);
  const show = role === "user" ? given => (text.textContent = given) : follow(text);
  show(content);
  const thoughts = make("p"), thinking = make("details", { hidden: true }, make("summary", {}, "Reasoning"), thoughts);
  article.append(thinking, text, small, tools);
  const update = given => show((written = given));
  const think = given => ((thinking.hidden = !given), (thoughts.textContent = given));
  return { article, small, update, think };
}

function showChat() {
  editing = false;
  at("log").replaceChildren(...chat.messages.map(one => view(one).article));
  offer();
  at("log").scrollTop = at("log").scrollHeight;
  document.title = chat.title ? `${chat.title} – trtkv` : "trtkv chat";
  history.replaceState(null, "", chat.messages.length ? "#" + chat.id : location.pathname + location.search);
  showChats();
}

// Offers, below the last message, to answer it once more or to change it.
function offer() {
  document.getElementById("again")?.remove();
  if (running || !chat.messages.length) return;
  const answered = chat.messages.at(-1).role === "assistant";
  const again = make("button", { type: "button" }, answered ? "Regenerate" : "Try again"), edit = make("button", { type: "button" }, "Edit message");
  again.addEventListener("click", regenerate);
  edit.addEventListener("click", startEdit);
  at("log").append(make("div", { id: "again", className: "tools" }, again, edit));
}

function save() {
  if (!chats.save(chat)) say("This browser has no room for the conversation: it is lost when the page is closed. Delete others.");
}

function regenerate() {
  if (running) return;
  if (chat.messages.at(-1)?.role === "assistant") chat.messages.pop();
  showChat();
  ask();
}

function startEdit() {
  const last = chat.messages.findLast(one => one.role === "user");
  if (running || !last) return;
  editing = true;
  at("text").value = last.content;
  at("text").focus();
  [...at("log").querySelectorAll("article.user")].at(-1).classList.add("editing");
  say("Editing the last message; Esc leaves it as it was.");
}

function stopEdit() {
  editing = false;
  at("text").value = "";
  at("log").querySelector(".editing")?.classList.remove("editing");
}

function send() {
  const text = at("text").value.trim();
  if (!text) return;
  at("text").value = "";
  // What got no answer would be a second message of the same role, which chat templates refuse.
  if (editing) chat.messages.length = chat.messages.findLastIndex(one => one.role === "user");
  else if (chat.messages.at(-1)?.role === "user") chat.messages.pop();
  chat.messages.push({ role: "user", content: text });
  save();
  showChat();
  ask();
}

function request() {
  const given = settings.get(), system = (given.system ?? "").trim(), body = {};
  for (const name of FIELDS.slice(1)) if (given[name] !== undefined && given[name] !== "") body[name] = Number(given[name]);
  const messages = chat.messages.map(({ role, content }) => ({ role, content }));
  return { ...body, model: at("model").value || undefined, messages: system ? [{ role: "system", content: system }, ...messages] : messages };
}

async function ask() {
  const own = chat, { article, small, update, think } = view({ role: "assistant", content: "" }), log = at("log");
  let text = "", thought = "", reason = "", usage = null, frame = 0, problem = "";
  const follows = work => {
    const near = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
    work();
    if (near) log.scrollTop = log.scrollHeight;
  };
  running = new AbortController();
  figures = new Figures();
  at("send").textContent = "Stop";
  offer();
  log.append(article);
  log.scrollTop = log.scrollHeight;
  say("Answering.");
  poll();
  try {
    for await (const chunk of answer(request(), running.signal)) {
      const choice = chunk.choices[0];
      usage = chunk.usage ?? usage;
      if (usage) figures.arrived(usage.completion_tokens);
      reason = choice?.finish_reason ?? reason;
      if (!choice?.delta?.content && !choice?.delta?.reasoning_content) continue;
      text += choice.delta.content ?? "";
      thought += choice.delta.reasoning_content ?? "";
      frame ||= requestAnimationFrame(() => ((frame = 0), follows(() => (update(text), think(thought)))));
    }
  } catch (error) {
    reason = error.name === "AbortError" ? "stopped" : "";
    problem = reason ? "" : error.message;
    if (error.status === 401) askKey();
  }
  cancelAnimationFrame(frame);
  running = null;
  at("send").textContent = "Send";
  const note = problem || figures.line(usage, reason);
  follows(() => {
    update(text);
    think(thought);
    small.textContent = note;
    article.classList.toggle("bad", Boolean(problem));
  });
  if (text) own.messages.push({ role: "assistant", content: text, note });
  if (text && chats.get(own.id)) chats.save(own);
  say(problem || (reason === "stopped" ? "Stopped." : "Answered."));
  if (own === chat) follows(offer);
  showChats();
  poll();
}

function say(text) {
  at("said").textContent = text;
}

// Conversations

function showChats() {
  at("chats").replaceChildren(...chats.list().map(one => {
    const open = make("button", { type: "button", title: one.title }, one.title || "Untitled");
    if (one.id === chat.id) open.setAttribute("aria-current", "page");
    const remove = make("button", { type: "button", ariaLabel: "Delete " + one.title, title: "Delete" }, "×");
    open.addEventListener("click", () => openChat(one));
    remove.addEventListener("click", () => removeChat(one));
    return make("li", {}, open, remove);
  }));
}

function openChat(one) {
  if (one.id === chat.id) return menu(false);
  running?.abort();
  chat = one;
  at("figures").hidden = true;
  menu(false);
  showChat();
  at("text").focus();
}

function removeChat(one) {
  if (!confirm(`Delete "${one.title}"?`)) return;
  if (one.id === chat.id) openChat(chats.make());
  chats.remove(one.id);
  showChats();
}

function menu(open) {
  at("side").classList.toggle("open", open);
  at("menu").setAttribute("aria-expanded", String(open));
}

// Controls

function showSettings() {
  const given = settings.get();
  for (const name of FIELDS) at(name).value = given[name] ?? "";
  at("key").value = key.get();
  at("settings").showModal();
}

for (const name of FIELDS) at(name).addEventListener("change", () => settings.save({ ...settings.get(), [name]: at(name).value }));
at("key").addEventListener("change", () => useKey(at("key").value));
at("model").addEventListener("change", () => {
  settings.save({ ...settings.get(), model: at("model").value });
  showEngine();
});
at("open-settings").addEventListener("click", showSettings);
at("new").addEventListener("click", () => openChat(chats.make()));
at("menu").addEventListener("click", () => menu(!at("side").classList.contains("open")));
at("log").addEventListener("click", () => menu(false));
at("use-key").addEventListener("click", () => useKey(at("given-key").value));
at("given-key").addEventListener("keydown", event => event.key === "Enter" && useKey(at("given-key").value));
for (const one of document.querySelectorAll("[data-close]")) one.addEventListener("click", () => one.closest("dialog").close());
at("form").addEventListener("submit", event => {
  event.preventDefault();
  if (running) running.abort();
  else send();
});
at("text").addEventListener("keydown", event => {
  const typed = event.key === "Enter" && !event.shiftKey && !event.isComposing && !matchMedia("(pointer: coarse)").matches;
  if (typed) event.preventDefault();
  if (typed && !running) send();
  if (event.key === "ArrowUp" && !at("text").value) startEdit();
});
document.addEventListener("keydown", event => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  menu(false);
  if (running) running.abort();
  else if (editing) stopEdit();
});
addEventListener("storage", event => chats.holds(event.key) && showChats());
addEventListener("hashchange", () => {
  const found = chats.get(location.hash.slice(1));
  if (found && found.id !== chat.id) openChat(found);
});

showChat();
poll();
