"""TensorRT-LLM's recorded surface in the place of the package."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations import fake_tensorrt_llm as fake
from trtkv.integrations.tensorrt_llm import models


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The recorded surface in the place of TensorRT-LLM, and the adapter's classes over it."""
    fake.install(monkeypatch)
    models.cache_clear()
    yield models
    models.cache_clear()
