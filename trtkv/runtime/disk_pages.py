"""Prompt pages on disk, a third tier: what one prompt filled serves prompts that begin alike, also after the process has ended.

A file is one page: its rows of every paged buffer, after a header that says for which cache plan, model and weights, and before a checksum of all of
it. Its name is the page's key, which represents the page's tokens and all tokens before them.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from plugins.cache.cache import Cache
from trtkv.engine.manifest import Manifest
from trtkv.errors import ConfigError
from trtkv.runtime.prefix_tree import Key

MAGIC = b"trtkv page 1\n"
SUFFIX = ".kvpage"
DIGEST_BYTES = 32


class SavedPages:
    """The pages of one engine in a directory; loaded, saved and damaged count since it was opened."""

    def __init__(self, directory: Path, cache: Cache, identity: str) -> None:
        """Take a directory, created if it is missing, for pages of this identity.

        Raises ConfigError where the policy moves tokens after they are stored, or the directory cannot be written.
        """
        plan = cache.plan
        if not plan.shares_pages or cache.parts > 1:
            why = "evicts or encodes tokens, so its pages belong to one prompt"
            why = "has layers whose window leaves earlier tokens behind" if plan.sliding else why
            why = "shares its KV heads out over several GPUs" if cache.parts > 1 else why
            raise ConfigError(f"prompts cannot be saved with policy '{plan.policy}': the engine {why}", "Leave --kv-disk out.")
        self._cache, self._directory, self._identity = cache, directory, identity
        self.loaded = self.saved = self.damaged = 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"'{directory}' cannot hold saved prompts: {error.strerror}", "Give a directory that can be written.") from None
        self._full = False

    def load(self, page: int, key: Key) -> bool:
        """Fill a page with what was saved under a key; False where nothing is, or the file is damaged or another engine's."""
        try:
            content = self._path(key).read_bytes()
        except OSError:
            return False
        payload = self._payload(content, key)
        if payload is None:
            self.damaged += 1
            return False
        start = 0
        for row in self._rows(page):
            data = torch.from_numpy(np.frombuffer(payload, np.uint8, row.nbytes, start).copy())
            row.copy_(data.view(row.dtype).view(row.shape).to(row.device))
            start += row.nbytes
        self.loaded += 1
        return True

    def save(self, page: int, key: Key) -> None:
        """Write a full page under a key, unless it is there; a disk that cannot take it is tried no more."""
        path = self._path(key)
        if self._full or path.exists():
            return
        header = self._header(key)
        digest = blake2b(digest_size=DIGEST_BYTES)
        try:
            path.parent.mkdir(exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=".page-")
            try:
                with os.fdopen(handle, "wb") as file:
                    for part in (header, *(_bytes_of(row) for row in self._rows(page))):
                        digest.update(part)
                        file.write(part)
                    file.write(digest.digest())
                Path(name).replace(path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError:
            self._full = True
            return
        self.saved += 1

    def _rows(self, page: int) -> Iterator[Tensor]:
        return (buffer[page] for buffer in self._cache.page_buffers())

    def _path(self, key: Key) -> Path:
        name = blake2b(key + self._identity.encode(), digest_size=16).hexdigest()
        return self._directory / name[:2] / (name + SUFFIX)

    def _header(self, key: Key) -> bytes:
        size = sum(row.nbytes for row in self._rows(0))
        text = json.dumps({"identity": self._identity, "key": key.hex(), "bytes": size}, sort_keys=True).encode()
        return MAGIC + len(text).to_bytes(4, "little") + text

    def _payload(self, content: bytes, key: Key) -> memoryview | None:
        """Return a file's rows, None where the header, the length or the checksum is wrong."""
        header, body = self._header(key), memoryview(content)[:-DIGEST_BYTES]
        right = bytes(body[: len(header)]) == header and len(body) == len(header) + sum(row.nbytes for row in self._rows(0))
        if not right or blake2b(body, digest_size=DIGEST_BYTES).digest() != content[-DIGEST_BYTES:]:
            return None
        return body[len(header) :]


def _bytes_of(row: Tensor) -> bytes:
    """Return a row's bytes; what the device addresses in host memory passes through the device."""
    return row.clone(memory_format=torch.contiguous_format).cpu().view(-1).view(torch.uint8).numpy().tobytes()


def identity_of(manifest: Manifest, weights: Path | None) -> str:
    """Name what a saved page depends on: cache plan, model and weights, these by the names, sizes and times of their files (None: random ones)."""
    files = sorted(weights.glob("*.safetensors")) if weights is not None else []
    facts = [manifest.cache.hash, manifest.model.model_dump_json(), [[one.name, one.stat().st_size, one.stat().st_mtime_ns] for one in files]]
    return blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
