"""What a model writes, as the chat page shows it: read as Markdown, and never run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.page_script import markdown, rendered

BLOCKS = {"p", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "ul", "ol", "li", "blockquote", "table", "thead", "tbody", "tr", "th", "td"}
INSIDE = {"br", "strong", "em", "del", "code", "a"}
FIELDS = {"a": {"href"}, "ol": {"start"}, "th": {"side"}, "td": {"side"}, "pre": {"language"}}
ATTACKS = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>",
    '<a href="javascript:alert(1)">x</a>',
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](java\tscript:alert(1))",
    "[x](&#106;avascript:alert(1))",
    "[x](\\javascript:alert(1))",
    "[x](<javascript:alert(1)>)",
    "[x](data:text/html;base64,PHNjcmlwdD4=)",
    "[x](vbscript:msgbox)",
    "[x](//evil.example/x)",
    "[x](/metrics)",
    '[x](https://a.example/"onmouseover="alert(1))',
    "![x](javascript:alert(1))",
    "<javascript:alert(1)>",
    "`</code><script>alert(1)</script>`",
    '```"><script>alert(1)</script>\n</pre><script>alert(1)</script>\n```',
    "| <b onclick=alert(1)> | x |\n|-|-|\n| <iframe src=javascript:alert(1)> | y |",
    "# <style>@import 'https://evil.example'</style>",
    "[![a](https://a.example/i.png)](javascript:alert(1))",
    "[a](https://a.example 'x' onclick=alert(1))",
    "\u2028[x](javascript\u200b:alert(1))\u0000",
)


def walk(nodes: list[Any]) -> Iterator[Any]:
    for one in nodes:
        yield one
        if not isinstance(one, str):
            yield from walk(one["children"])


def text_of(nodes: list[Any]) -> str:
    return "".join(one if isinstance(one, str) else text_of(one["children"]) for one in nodes)


def assert_harmless(blocks: list[Any]) -> None:
    for one in walk(blocks):
        if isinstance(one, str):
            continue
        assert one["tag"] in BLOCKS | INSIDE
        assert set(one) - {"tag", "children"} <= FIELDS.get(one["tag"], set())
        if one["tag"] == "a":
            assert re.fullmatch(r"(?i:https?://|mailto:)[^\s<>\"\x00-\x1f]+", one["href"])
            assert not any(isinstance(inner, dict) and inner["tag"] == "a" for inner in walk(one["children"]))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a **b *c* d**", "p(a ,strong(b ,em(c), d))"),
        ("***both*** ~~gone~~ ~one~", "p(em(strong(both)), ,del(gone), ~one~)"),
        ("snake_case_name _em_ 2 * 3 * 4", "p(snake_case_name ,em(em), 2 * 3 * 4)"),
        ("**Note:**text **[0, 1)** \\*as is\\*", "p(strong(Note:),text ,strong([0, 1)), *as is*)"),
        ("`a` ``b`c`` `open", "p(code(a), ,code(b`c), `open)"),
        ("[t](https://a.example/b_(c) 'title') <https://d.example> https://e.example/f.", "p(a(t), ,a(https://d.example), ,a(https://e.example/f),.)"),
        ("![pic](https://a.example/i.png) [not](a link) [1]", "p(a(pic), [not](a link) [1])"),
        ("[a [b](https://c.example) d](https://e.example)", "p([a ,a(b), d](,a(https://e.example),))"),
        ("# One #\n###### Six\n#no", "h1(One)|h6(Six)|p(#no)"),
        ("a\nb\n\nc", "p(a,br(),b)|p(c)"),
        ("- a\n  - b\n- c\n\n  more\n3. d\n4. e", "ul(li(a,ul(li(b))),li(c,p(more)))|ol(li(d),li(e))"),
        ("* a\n\n* b\ntext", "ul(li(a),li(b,br(),text))"),
        ("> a\n> > b\n\nc", "blockquote(p(a),blockquote(p(b)))|p(c)"),
        ("---\n***\na\n---", "hr()|hr()|p(a)|hr()"),
        ("Say:\n```py x\n  a <b>\n\n~~~\n```\nend", "p(Say:)|pre(  a <b>\n\n~~~)|p(end)"),
        ("~~~\nopen *fence*", "pre(open *fence*)"),
        ("|a|b|\n|-|:-:|\n|1|`x\\|y`|extra|\n|2|", "table(thead(tr(th(a),th(b))),tbody(tr(td(1),td(code(x|y))),tr(td(2))))"),
        ("before\na | b\n--|--\n1 | 2\n\nafter", "p(before)|table(thead(tr(th(a),th(b))),tbody(tr(td(1),td(2))))|p(after)"),
        ("<b>no</b> &amp; \\", "p(<b>no</b> &amp; \\)"),
        (" \n\t\n", ""),
    ],
)  # fmt: skip
def test_markdown_is_read(text: str, wanted: str) -> None:
    def show(one: Any) -> str:
        return one if isinstance(one, str) else f"{one['tag']}({','.join(map(show, one['children']))})"

    assert "|".join(map(show, markdown(text))) == wanted


def test_what_blocks_carry() -> None:
    fence, numbers, table, link = markdown("```python title\nx\n```\n7. a\n\n|a|b|c|\n|:-|-:|:-:|\n\n[x](<https://a.example/b>)")
    assert fence["language"] == "python" and numbers["start"] == 7
    assert [cell["side"] for cell in table["children"][0]["children"][0]["children"]] == ["left", "right", "center"]
    assert link["children"][0]["href"] == "https://a.example/b"


@pytest.mark.parametrize("text", ATTACKS)
def test_an_attack_is_text(text: str) -> None:
    assert_harmless(markdown(text))
    for one in shown(rendered(text)["tree"]):
        assert one["tag"] in BLOCKS | INSIDE | {"root", "span", "button", "div"}
        assert set(one) <= {"tag", "childNodes", "href", "rel", "target", "start", "className", "tabIndex", "type"}
        if one["tag"] == "a":
            assert re.match(r"https://(a|evil)\.example", one["href"]) and "noopener" in one["rel"].split() and "alert" not in one["href"]


def shown(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
        for one in node["childNodes"]:
            yield from shown(one)


MARKS = st.sampled_from([*"*_~`[]()<>!\\|#->\n \t:.1aé", "**", "```", "](", "https://a.b/", "javascript:", "\n\n", "    ", "|-|", "- ", "1. ", "> "])


@given(st.lists(MARKS, max_size=60).map("".join) | st.text(max_size=200))
def test_any_text_is_harmless_and_loses_no_word(text: str) -> None:
    blocks = markdown(text)
    assert_harmless(blocks)
    # Letters and digits stay, but for the numbers of lists, what follows a fence's mark, targets, and cells beyond a table's head.
    if not re.search(r"\d|`|~|\]\(|\||\\", text):
        assert sorted(filter(str.isalpha, text_of(blocks))) == sorted(filter(str.isalpha, text))


@pytest.mark.parametrize(
    "text",
    [
        "*a " * 30_000, "[" * 100_000, "[a](" * 30_000, "]" * 100_000, ">" * 100_000, "- " * 50_000, "~~a" * 30_000, "\\" * 100_001,
        "x".join("`" * length for length in range(1, 400)), "|a" * 20_000 + "\n" + "|-" * 20_000 + "\n" + "|x\n" * 20_000,
        "# " + " " * 100_000 + "x", "<https://" * 20_000, "\n".join(" " * depth + "- a" for depth in range(1000)), "> " * 20_000 + "a\n" * 20_000,
    ],
    ids=range(14),
)  # fmt: skip
def test_a_text_made_to_take_long_is_read_too(text: str) -> None:
    """Work that grew with the square of these would take minutes."""
    blocks = markdown(text)
    assert_harmless(blocks)
    deepest = max((depth(one) for one in blocks), default=0)
    assert deepest < 100


def depth(one: Any) -> int:
    return 0 if isinstance(one, str) else 1 + max(map(depth, one["children"]), default=0)


def test_a_growing_answer_makes_only_what_is_new() -> None:
    first, second = "# Title\n\nA paragraph.\n\n- a", "# Title\n\nA paragraph.\n\n- a\n- b\n\nEnd *x*"
    grown, whole = rendered(first, second), rendered(second)
    assert grown["tree"] == whole["tree"]
    assert grown["counts"] == [4, 5]  # h1, p, ul, li; then ul, two li, p, em
