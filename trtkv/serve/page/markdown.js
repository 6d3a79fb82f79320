// Markdown as models write it, read into plain data: headings, lists, tables, quotes, rules, code and paragraphs.
//
// A block is {tag, children, ...}; code is {tag: "pre", language, children: [text]}. HTML is text like any other.

import { inline } from "./inline.js";

const DEEPEST = 8; // quotes and lists inside each other; what is deeper is text
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([^`]*)$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|(\d{1,9})[.)])(?:( +)(.*))?$/;
const SIDE = /^:?-+:?$/; // of a table's second line
const BLANK = /^[ \t]*$/;

// Returns the blocks of a text.
export function markdown(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n").map(line => line.replace(/^[ \t]+/, indent => indent.replace(/\t/g, "    ")));
  return blocks(lines, 0);
}

function blocks(lines, depth) {
  const found = [], kinds = [fence, heading, rule, quote, list, table, paragraph];
  for (let start = 0; start < lines.length; ) {
    if (BLANK.test(lines[start])) {
      start++;
      continue;
    }
    let read = null;
    for (const kind of kinds) if ((read = kind(lines, start, depth))) break;
    found.push(read.node);
    start = read.end;
  }
  return found;
}

// Each of the following reads one kind of block that begins at a line: its node and the line after it, or null.

function fence(lines, start) {
  const [, indent, mark, about] = FENCE.exec(lines[start]) ?? [];
  if (!mark) return null;
  const closing = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}[ \\t]*$`);
  let end = start + 1;
  while (end < lines.length && !closing.test(lines[end])) end++;
  const strip = new RegExp(`^ {0,${indent.length}}`);
  const code = lines.slice(start + 1, end).map(line => line.replace(strip, ""));
  return { end: Math.min(end + 1, lines.length), node: { tag: "pre", language: about.trim().split(/\s/)[0].slice(0, 40), children: [code.join("\n")] } };
}

function heading(lines, start) {
  const [, marks, text] = HEADING.exec(lines[start]) ?? [];
  return marks ? { end: start + 1, node: { tag: "h" + marks.length, children: inline(text.trim().replace(/(^|[ \t])#+$/, "")) } } : null;
}

function rule(lines, start) {
  return RULE.test(lines[start]) ? { end: start + 1, node: { tag: "hr", children: [] } } : null;
}

function quote(lines, start, depth) {
  if (depth >= DEEPEST || !QUOTE.test(lines[start])) return null;
  let end = start + 1;
  while (end < lines.length && (QUOTE.test(lines[end]) || continues(lines, end))) end++;
  const inner = lines.slice(start, end).map(line => line.replace(QUOTE, ""));
  return { end, node: { tag: "blockquote", children: blocks(inner, depth + 1) } };
}

function list(lines, start, depth) {
  const first = ITEM.exec(lines[start]);
  if (depth >= DEEPEST || !first) return null;
  const ordered = first[3] !== undefined, kind = first[2].at(-1), items = [];
  let end = start;
  for (let found; end < lines.length && (found = ITEM.exec(lines[end])) && found[2].at(-1) === kind && !RULE.test(lines[end]); ) {
    const { next, inner } = item(lines, end, found);
    items.push({ tag: "li", children: tight(blocks(inner, depth + 1)) });
    end = next;
  }
  if (!items.length) return null;
  return { end, node: { tag: ordered ? "ol" : "ul", ...(ordered ? { start: Number(first[3]) } : {}), children: items } };
}

// Reads one item: its first line, then lines that are indented below it and those that continue its text.
function item(lines, start, [, indent, mark, , space, text]) {
  const width = indent.length + mark.length + (space && space.length <= 4 ? space.length : 1);
  const least = Math.min(width, indent.length + 2), strip = new RegExp(`^ {0,${width}}`);
  const inner = [(space && space.length > 4 ? space.slice(1) : "") + (text ?? "")];
  let next = start + 1;
  for (; next < lines.length; next++) {
    const line = lines[next];
    if (BLANK.test(line)) {
      let after = next;
      while (after < lines.length && BLANK.test(lines[after])) after++;
      if (after === lines.length || /^ */.exec(lines[after])[0].length < least) {
        // Blank lines between two items belong to neither.
        return { next: after, inner };
      }
      inner.push(...lines.slice(next, after).map(() => ""));
      next = after - 1;
    } else if (/^ */.exec(line)[0].length >= least) inner.push(line.replace(strip, ""));
    else if (continues(lines, next)) inner.push(line);
    else break;
  }
  return { next, inner };
}

// An item's text stands without the paragraph around it.
function tight(children) {
  return children.flatMap((one, index) => (one.tag === "p" && index === 0 ? one.children : [one]));
}

function table(lines, start) {
  const sides = sidesOf(lines, start);
  if (!sides) return null;
  let end = start + 2;
  while (end < lines.length && lines[end].includes("|")) end++;
  const row = (line, tag) => ({
    tag: "tr",
    children: cells(line).slice(0, sides.length).map((text, index) => ({ tag, side: sides[index], children: inline(text) })),
  });
  const body = lines.slice(start + 2, end).map(line => row(line, "td"));
  const parts = [{ tag: "thead", children: [row(lines[start], "th")] }, { tag: "tbody", children: body }];
  return { end, node: { tag: "table", children: parts } };
}

// Returns how the columns of a table that begins here are aligned, or null where none does.
function sidesOf(lines, start) {
  if (!lines[start].includes("|") || !lines[start + 1]?.includes("-")) return null;
  const marks = cells(lines[start + 1]);
  if (!marks.every(one => SIDE.test(one)) || marks.length !== cells(lines[start]).length) return null;
  return marks.map(one => (one.endsWith(":") ? (one.startsWith(":") ? "center" : "right") : "left"));
}

function cells(line) {
  const text = line.trim(), found = [""];
  for (let at = text[0] === "|" ? 1 : 0; at < text.length; at++) {
    const escaped = text[at] === "\\" && text[at + 1] === "|";
    if (text[at] === "|") found.push("");
    else found.push(found.pop() + text[escaped ? ++at : at]);
  }
  if (found.length > 1 && found.at(-1) === "") found.pop();
  return found.map(one => one.trim());
}

function paragraph(lines, start) {
  let end = start + 1;
  while (end < lines.length && continues(lines, end)) end++;
  const text = lines.slice(start, end).map(line => line.trim()).join("\n");
  return { end, node: { tag: "p", children: inline(text) } };
}

// Whether a line goes on with the paragraph before it.
function continues(lines, at) {
  const line = lines[at];
  if (BLANK.test(line) || BLANK.test(lines[at - 1])) return false;
  return ![FENCE, HEADING, RULE, QUOTE, ITEM].some(one => one.test(line)) && !sidesOf(lines, at);
}
