"""Load on a running `trtkv serve`: closed loop (so many streams at once) or open loop (requests at a rate), figures as one JSON line.

    python build_scripts/serve_load.py http://127.0.0.1:8080 --streams 32 --requests 64 --tokens 100

The client speaks HTTP itself: a library would take as much of a small machine as the server does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import psutil


@dataclass
class Seen:
    """What the clients saw; times in seconds."""

    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    tokens: int = 0
    cut: int = 0


async def ask(host: str, port: int, body: bytes, seen: Seen) -> None:
    """Send one streaming request and read it to its end."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    lines = ["POST /v1/completions HTTP/1.1", f"host: {host}", "connection: close", "content-type: application/json", f"content-length: {len(body)}"]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
    status = int((await reader.readline()).split()[1])
    seen.statuses[status] = seen.statuses.get(status, 0) + 1
    last, done = None, status != 200
    async for line in reader:
        now = time.perf_counter()
        if line.startswith(b"data: [DONE]"):
            done = True
        elif line.startswith(b"data: {"):
            data = json.loads(line[6:])
            seen.tokens += data["usage"]["completion_tokens"] if data.get("usage") else 0
            (seen.first_s if last is None else seen.between_s).append(now - (began if last is None else last))
            last = now
    seen.cut += not done
    writer.close()


async def drive(args: argparse.Namespace, seen: Seen) -> float:
    """Drive the load; returns the seconds it took."""
    where, rng, left = urlsplit(args.url), random.Random(0), args.requests
    host, port = where.hostname or "127.0.0.1", where.port or 80

    def body() -> bytes:
        prompt = [rng.randrange(1, args.vocab) for _ in range(args.prompt)]
        options = {"stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0, "stream": True, "logprobs": args.logprobs}
        return json.dumps({"prompt": prompt, "max_tokens": args.tokens, **options, **({"model": args.model} if args.model else {})}).encode()

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await ask(host, port, body(), seen)

    began = time.perf_counter()
    if args.rate:
        going = []
        for _ in range(args.requests):
            going.append(asyncio.create_task(ask(host, port, body(), seen)))
            await asyncio.sleep(rng.expovariate(args.rate))
        await asyncio.gather(*going)
    else:
        await asyncio.gather(*(worker() for _ in range(args.streams)))
    return time.perf_counter() - began


def rss_bytes(pid: int) -> int:
    """Return the memory of a process and its children."""
    process = psutil.Process(pid)
    return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))


def main() -> None:
    """Read the options, drive, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--logprobs", type=int, help="ask for log probabilities: every token has a piece then, even one that ends inside a character")
    parser.add_argument("--model")
    parser.add_argument("--pid", type=int, help="process whose memory is shown before and after")
    args = parser.parse_args()
    seen = Seen()
    before = rss_bytes(args.pid) if args.pid else 0
    seconds = asyncio.run(drive(args, seen))
    figures = {"requests": args.requests, "seconds": round(seconds, 2), "tokens_per_s": round(seen.tokens / seconds, 1)}
    figures |= {"statuses": seen.statuses, "cut": seen.cut}
    for name, values in (("ttft", seen.first_s), ("gap", seen.between_s)):
        for share in (50, 99) if values else ():
            figures[f"{name}_p{share}_ms"] = round(sorted(values)[max(0, -(-share * len(values) // 100) - 1)] * 1e3, 2)
    if args.pid:
        figures |= {"rss_before_mib": before >> 20, "rss_after_mib": rss_bytes(args.pid) >> 20}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
