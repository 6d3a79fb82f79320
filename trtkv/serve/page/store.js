// What the browser keeps: conversations and settings until they are deleted, the API key until the tab is closed.

const CHAT = "trtkv.chat.", SETTINGS = "trtkv.settings", KEY = "trtkv.key";
const ROLES = ["user", "assistant"];

const read = (storage, name, none) => {
  try {
    return JSON.parse(storage.getItem(name)) ?? none;
  } catch {
    return none; // what something else wrote there is no conversation
  }
};

// Writes a value; false where the browser has no room for it, or stores nothing at all.
const write = (storage, name, value) => {
  try {
    storage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
};

const isMessage = one => ROLES.includes(one?.role) && typeof one.content === "string";

// A conversation is {id, title, changed, messages}; every one is an entry of its own, so that two tabs overwrite none of each other's.
export const chats = {
  list() {
    const names = Object.keys(localStorage).filter(name => name.startsWith(CHAT));
    const found = names.map(name => this.get(name.slice(CHAT.length))).filter(Boolean);
    return found.sort((a, b) => b.changed - a.changed);
  },
  get(id) {
    const found = read(localStorage, CHAT + id, null);
    if (!found || !Array.isArray(found.messages)) return null;
    return { id, title: String(found.title ?? ""), changed: Number(found.changed) || 0, messages: found.messages.filter(isMessage) };
  },
  make: () => ({ id: crypto.getRandomValues(new Uint32Array(3)).join("-"), title: "", changed: 0, messages: [] }),
  save(chat) {
    chat.changed = Date.now();
    chat.title ||= (chat.messages[0]?.content ?? "").trim().replace(/\s+/g, " ").slice(0, 60);
    return write(localStorage, CHAT + chat.id, chat);
  },
  remove: id => localStorage.removeItem(CHAT + id),
  holds: name => name?.startsWith(CHAT),
};

export const settings = {
  get: () => ({ max_tokens: "1024", ...read(localStorage, SETTINGS, {}) }),
  save: values => write(localStorage, SETTINGS, values),
};

export const key = {
  get: () => String(read(sessionStorage, KEY, "")),
  save: value => write(sessionStorage, KEY, value),
};
