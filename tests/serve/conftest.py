from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from starlette.testclient import TestClient

from tests.serve.rig import TEMPLATE, built, client, free, templated
from tests.tiny import TinyModel
from trtkv.runtime.llm import LLM


@pytest.fixture(scope="session")
def engine_dir(tiny_llama: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tiny_llama.path, tmp_path_factory.mktemp("serve") / "tiny")


@pytest.fixture(scope="module")
def llm(engine_dir: Path) -> LLM:
    return LLM(engine_dir, device="cpu")


@pytest.fixture(scope="module")
def api(llm: LLM) -> Iterator[TestClient]:
    with client({"tiny": llm}) as made:
        yield made


@pytest.fixture
def engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """The engine with a chat template that renders tools."""
    templated(llm, TEMPLATE, monkeypatch)
    yield llm
    assert free(llm)


@pytest.fixture
def ask(api: TestClient, engine: LLM) -> openai.OpenAI:
    return openai.OpenAI(base_url="http://testserver/v1", api_key="unused", http_client=api, max_retries=0)
