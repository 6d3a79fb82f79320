"""The chat page in a real browser: an answer streams in, the engine's state is shown live, a long answer is stopped.

Runs where TRTKV_CHROMIUM names a Chromium and the package playwright is installed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.serve.rig import PATIENCE_S, Server, built
from tests.tiny import make_tiny

CHROMIUM = os.environ.get("TRTKV_CHROMIUM", "")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(not CHROMIUM, reason="TRTKV_CHROMIUM names no browser")]


def test_a_conversation(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    model = make_tiny("llama", tmp_path / "model", max_position_embeddings=4096, eos_token_id=None)
    settings = model.path / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("eos_token", "unused_token"))
    engine = built(model.path, tmp_path / "page", "streaming", budget=64, max_seq_len=4096)
    with Server(engine, "--no-triton", "--device", "cpu", "--api-key", "k") as server, sync_playwright() as play:
        page = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]).new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(server.url)
        page.click("summary")
        send(page, "no key yet")
        until(page, "document.querySelector('article.bad small')?.textContent.includes('API key')")
        page.fill("#key", "k")
        until(page, "document.getElementById('policy').textContent === 'streaming'")
        page.fill("#max_tokens", "3000")
        page.fill("#temperature", "0")
        send(page, "hello")
        answer = "[...document.querySelectorAll('article.assistant span')].at(-1).textContent.length"
        until(page, f"{answer} > 20")
        until(page, "/[1-9].* KiB/.test(document.getElementById('kv').textContent) && document.getElementById('running').textContent === '1'")
        length = page.evaluate(answer)
        until(page, f"{answer} > {length}")
        page.click("#send")
        until(page, "[...document.querySelectorAll('article.assistant small')].at(-1).textContent === 'stopped'")
        until(page, "document.getElementById('running').textContent === '0'")
        page.fill("#max_tokens", "12")
        send(page, "again")
        until(page, "/\\+ \\d+ tokens, first after/.test([...document.querySelectorAll('article.assistant small')].at(-1).textContent)")
        page.click("#clear")
        assert page.locator("article").count() == 0 and errors == []


def send(page: Any, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")


def until(page: Any, expression: str) -> None:
    """Wait by polling: the page's policy forbids the evaluation that the library's waiting needs."""
    end = time.monotonic() + PATIENCE_S
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        time.sleep(0.03)
