"""The chat page's scripts in an engine without a browser, over a document that notes what is made."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import trtkv.serve

PAGE = Path(trtkv.serve.__file__).parent / "page"
DOCUMENT = """
const made = [];
class Node_ {
  constructor(tag) { this.tag = tag; this.childNodes = []; made.push(tag); }
  append(...nodes) { for (const one of nodes) this.childNodes.push(one), typeof one === "object" && (one.parent = this); }
  get lastChild() { return this.childNodes.at(-1); }
  remove() { this.parent.childNodes.splice(this.parent.childNodes.indexOf(this), 1); }
  addEventListener() {}
}
const document = { createElement: tag => new Node_(tag), createTextNode: text => ({ text }) };
const seen = node => typeof node === "string" ? node : node.text ?? Object.fromEntries(
  Object.entries(node).filter(([name]) => name !== "parent").map(([name, value]) => [name, name === "childNodes" ? value.map(seen) : value]));
const rendered = texts => {
  const root = document.createElement("root"), show = follow(root);
  const counts = texts.map(text => { const before = made.length; show(text); return made.length - before; });
  return { tree: seen(root), counts };
};
"""


def script(*names: str) -> str:
    """Join modules into one script, each before those that import it."""
    texts = [re.sub(r"^import .*$", "", (PAGE / name).read_text(), flags=re.MULTILINE) for name in names]
    return "\n".join(re.sub(r"^export ", "", text, flags=re.MULTILINE) for text in texts)


@cache
def engine() -> Any:
    """Return a JavaScript engine with the page's Markdown in it."""
    import pytest

    racer = pytest.importorskip("py_mini_racer")
    found = racer.MiniRacer()
    # Names at the top of several modules would meet in one script.
    modules = "".join(f"const {{ {names} }} = (() => {{ {text}\nreturn {{ {names} }}; }})();\n" for names, text in _modules())
    found.eval(f"{DOCUMENT}\n{modules}")
    return found


def _modules() -> list[tuple[str, str]]:
    return [("inline, safe", script("inline.js")), ("markdown", script("markdown.js")), ("make, follow", script("render.js"))]


def markdown(text: str) -> list[dict[str, Any]]:
    """Read a text into blocks."""
    found: list[dict[str, Any]] = json.loads(engine().eval(f"JSON.stringify(markdown({json.dumps(text)}))"))
    return found


def rendered(*texts: str) -> dict[str, Any]:
    """Show texts one after the other in one element: its tree, and the elements that each text made."""
    found: dict[str, Any] = json.loads(engine().eval(f"JSON.stringify(rendered({json.dumps(texts)}))"))
    return found
