// Markdown inside a line: emphasis, code, links and line breaks as plain data, never as HTML.
//
// A node is a text, or {tag, children} with `href` for links: nothing that a model writes becomes a tag, an attribute or an address of its own.

const SAFE = /^(?:https?:\/\/|mailto:)[^\s<>"\u0000-\u001f]{1,2000}$/i;
const ESCAPE = /\\([!-/:-@[-`{-~])/g;
const TARGET = /\(\s{0,3}(<[^<>\n]{0,2000}>|[^\s()<>]{0,2000}(?:\([^\s()<>]{0,200}\)[^\s()<>]{0,200}){0,4})(?:\s{1,3}(?:"[^"\n]{0,500}"|'[^'\n]{0,500}'))?\s{0,3}\)/y;
const BARE = /https?:\/\/[^\s<>"'`*|]{1,2000}/iy;
const ANGLED = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/iy;
const PLAIN = /[^\\`*_~![\]<\nh]+/y;
const DEEPEST = 24; // marks that may be open at once: the work on a text stays linear, its tree shallow
const LONGEST = 3; // of a run of marks that means emphasis
const LETTER = /[\p{L}\p{N}]/u;
const SPACE = /^$|\s/;

// Returns an address that a link may have, or null: web and mail only.
export const safe = href => (SAFE.test(href) ? href : null);

const at = (pattern, text, position) => {
  pattern.lastIndex = position;
  return pattern.exec(text);
};

// Returns the nodes of one paragraph's text.
export function inline(text) {
  const frames = [{ mark: "", count: 0, nodes: [] }];
  const noCode = new Set(); // lengths of runs of ` that have no partner any more
  const lastLink = text.lastIndexOf("](");
  let position = 0;
  const add = node => {
    const { nodes } = frames.at(-1);
    if (typeof node === "string" && typeof nodes.at(-1) === "string") nodes.push(nodes.pop() + node);
    else if (node !== "") nodes.push(node);
  };
  // Returns the frame of the link whose text this is, if it can become one.
  const opener = () => (position < lastLink ? frames.findLastIndex(one => one.mark === "[" && !one.dead) : -1);
  // Closes the frames above one: what they opened was text.
  const flatten = level => {
    while (frames.length > level + 1) {
      const { mark, count, nodes } = frames.pop();
      add(mark.repeat(count));
      nodes.forEach(add);
    }
  };
  const read = {
    "\\"() {
      const next = text[position + 1];
      if (next === "\n") add({ tag: "br", children: [] });
      else add(next && /[!-/:-@[-`{-~]/.test(next) ? next : "\\" + (next ?? ""));
      return 2;
    },
    "\n"() {
      add({ tag: "br", children: [] });
      return 1;
    },
    "`"() {
      const run = at(/`+/y, text, position)[0];
      let end = noCode.has(run.length) ? -1 : position + run.length;
      while (end >= 0) {
        end = text.indexOf(run, end);
        if (end < 0) noCode.add(run.length);
        else if (text[end + run.length] !== "`" && text[end - 1] !== "`") break;
        else end = at(/`+/y, text, end)[0].length + end;
      }
      if (end < 0) {
        add(run);
        return run.length;
      }
      const code = text.slice(position + run.length, end).replace(/\n/g, " ");
      add({ tag: "code", children: [/^ .*[^ ].* $/.test(code) ? code.slice(1, -1) : code] });
      return end + run.length - position;
    },
    "<"() {
      const found = at(ANGLED, text, position);
      const href = found && safe(found[1]);
      add(href ? { tag: "a", href, children: [found[1]] } : "<");
      return href ? found[0].length : 1;
    },
    h() {
      const before = text[position - 1] ?? "";
      const found = LETTER.test(before) || opener() >= 0 ? null : at(BARE, text, position);
      if (!found) {
        add("h");
        return 1;
      }
      let href = found[0].replace(/[.,:;!?\]]+$/, "");
      if (href.endsWith(")") && !href.includes("(")) href = href.replace(/\)+$/, "");
      add(safe(href) ? { tag: "a", href, children: [href] } : href);
      return href.length;
    },
    "!"() {
      if (text[position + 1] !== "[") add("!");
      return 1; // a picture is shown as a link to it: nothing is fetched that the reader did not ask for
    },
    "["() {
      if (frames.length > DEEPEST) add("[");
      else frames.push({ mark: "[", count: 1, nodes: [] });
      return 1;
    },
    "]"() {
      const level = frames.findLastIndex(one => one.mark === "[");
      const target = level < 0 || frames[level].dead ? null : at(TARGET, text, position + 1);
      const href = target && safe(target[1].replace(/^<|>$/g, "").replace(ESCAPE, "$1"));
      if (!href) {
        if (level >= 0) flatten(level - 1);
        add("]");
        return 1;
      }
      flatten(level);
      const { nodes } = frames.pop();
      for (const one of frames) one.dead = one.mark === "["; // a link holds no link
      add({ tag: "a", href, children: nodes.length ? nodes : [href] });
      return 1 + target[0].length;
    },
  };
  const emphasis = mark => {
    const run = at(mark === "*" ? /\*+/y : mark === "_" ? /_+/y : /~+/y, text, position)[0];
    const before = text[position - 1] ?? "", after = text[position + run.length] ?? "";
    const word = mark === "_"; // which is part of names, and so means nothing inside them
    const left = !SPACE.test(after) && !(word && LETTER.test(before));
    const right = !SPACE.test(before) && !(word && LETTER.test(after));
    if (run.length > LONGEST || (mark === "~" && run.length !== 2)) {
      add(run);
      return run.length;
    }
    let open = run.length;
    for (let level; right && open && (level = frames.findLastIndex(one => one.mark === mark)) > opener(); ) {
      flatten(level);
      const frame = frames.at(-1), many = Math.min(frame.count, open, 2);
      frame.nodes = [{ tag: mark === "~" ? "del" : many === 2 ? "strong" : "em", children: frame.nodes }];
      frame.count -= many;
      open -= many;
      if (!frame.count) {
        frames.pop();
        frame.nodes.forEach(add);
      }
    }
    if (open && left && frames.length <= DEEPEST) frames.push({ mark, count: open, nodes: [] });
    else if (open) add(mark.repeat(open));
    return run.length;
  };
  while (position < text.length) {
    const plain = at(PLAIN, text, position);
    if (plain) {
      add(plain[0]);
      position += plain[0].length;
      continue;
    }
    const sign = text[position];
    position += (read[sign] ?? (() => emphasis(sign)))();
  }
  flatten(0);
  return frames[0].nodes;
}
