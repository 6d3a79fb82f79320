// Puts the blocks of a text into the page, as elements from a short list and text: never as HTML.

import { markdown } from "./markdown.js";

const TAGS = new Set("p br hr h1 h2 h3 h4 h5 h6 strong em del code pre a ul ol li blockquote table thead tbody tr th td".split(" "));

// Makes an element; props are its properties, and what follows is put inside.
export function make(tag, props = {}, ...inside) {
  const made = Object.assign(document.createElement(tag), props);
  made.append(...inside);
  return made;
}

// Shows a text in an element and returns what shows a longer one, which replaces only the blocks that have changed.
export function follow(element) {
  let shown = [];
  return text => {
    const blocks = markdown(text), written = blocks.map(one => JSON.stringify(one));
    let same = 0;
    while (same < shown.length && shown[same] === written[same]) same++;
    while (element.childNodes.length > same) element.lastChild.remove();
    element.append(...blocks.slice(same).map(node));
    shown = written;
  };
}

function node(one) {
  if (typeof one === "string") return document.createTextNode(one);
  if (!TAGS.has(one.tag)) throw new Error("no element of an answer: " + one.tag);
  if (one.tag === "pre") return code(one);
  const made = make(one.tag, {}, ...one.children.map(node));
  if (one.tag === "a") Object.assign(made, { href: one.href, rel: "noopener noreferrer nofollow", target: "_blank" });
  if (one.tag === "ol" && one.start !== 1) made.start = one.start;
  if (one.side && one.side !== "left") made.className = one.side;
  return one.tag === "table" ? make("div", { className: "wide", tabIndex: 0 }, made) : made;
}

function code({ language, children: [text] }) {
  const button = make("button", { type: "button" }, "Copy");
  button.addEventListener("click", () => copy(text, button));
  return make("pre", {}, make("span", {}, language || "code", button), make("code", { tabIndex: 0 }, text));
}

// Copies a text and says so on the button that was pressed.
export async function copy(text, button) {
  const label = button.textContent;
  button.textContent = (await copied(text)) ? "Copied" : "Not allowed";
  setTimeout(() => (button.textContent = label), 1500);
}

async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  // Browsers have no clipboard for pages that came over plain HTTP from another machine.
  const area = make("textarea", { value: text, className: "unseen" }), before = document.activeElement;
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  before?.focus();
  return done;
}
