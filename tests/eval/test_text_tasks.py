from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.eval.conftest import Open
from tests.tiny import TinyModel
from trtkv import LLM
from trtkv.errors import ConfigError
from trtkv.eval.agreement import Agreement
from trtkv.eval.attention import DECODED, TOP, AttentionError, policy_of, record, replay
from trtkv.eval.decoding import Cost, Given
from trtkv.eval.long_generation import LongGeneration, first_difference
from trtkv.eval.perplexity import Perplexity, scored_tokens, windows
from trtkv.eval.pg19 import Pg19
from trtkv.eval.task import Bench, TaskOptions
from trtkv.eval.teacher_forcing import forced_logprobs
from trtkv.policies.registry import parse_policy

SNAPKV = ("evict.budget=40", "evict.window=8")
STREAMING = ("evict.budget=24",)


def bench(llm: LLM, full: LLM, length: int = 96, samples: int = 3) -> Bench:
    return Bench(llm, lambda: full, length, samples, 0, 3)


def write_text(path: Path, seed: int) -> str:
    text = "".join("abcdefghij klm\n"[int(one)] for one in torch.randint(0, 15, (300,), generator=torch.Generator().manual_seed(seed)))
    path.write_text(text, encoding="utf-8")
    return text


def test_windows_score_every_token_once(tiny_llm: Open, tmp_path: Path) -> None:
    text = write_text(tmp_path / "a.txt", 1)
    found = windows(tiny_llm(), TaskOptions(tmp_path / "a.txt"), 96, 4, 0)
    tokens = tiny_llm().encode(text)
    assert scored_tokens(96) == 24
    assert [one.prompt for one in found] == [72] * 4
    assert [token for one in found for token in one.tokens[one.prompt :]] == tokens[72 : 72 + 4 * 24]
    assert windows(tiny_llm(), TaskOptions(tmp_path / "a.txt"), 96, 4, 0, (3, 1)) == [found[3], found[1]]
    # A text that ends early gives fewer windows, one that is too short none.
    assert len(windows(tiny_llm(), TaskOptions(tmp_path / "a.txt"), 96, 99, 0)) == (len(tokens) - 96) // 24 + 1
    with pytest.raises(ConfigError, match=f"has {len(tokens)} tokens, a window takes 301"):
        windows(tiny_llm(), TaskOptions(tmp_path / "a.txt"), 301, 1, 0)
    with pytest.raises(ConfigError, match="predicts nothing"):
        windows(tiny_llm(), TaskOptions(tmp_path / "a.txt"), 1, 1, 0)


def test_generated_text_depends_on_the_seed_alone(tiny_llm: Open) -> None:
    first, again, other = (windows(tiny_llm(), TaskOptions(), 64, 2, seed) for seed in (3, 3, 4))
    assert first == again != other
    assert all(len(one.tokens) == 64 for one in first)


def test_perplexity_is_the_models(tiny_llm: Open, tiny_llama: TinyModel, tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", 2)
    found = Perplexity(TaskOptions(tmp_path / "a.txt")).measure(bench(tiny_llm(), tiny_llm(), samples=2))
    losses = []
    for text in windows(tiny_llm(), TaskOptions(tmp_path / "a.txt"), 96, 2, 0):
        predicted = tiny_llama.logits(torch.tensor(text.tokens), torch.float64)[71:95].log_softmax(-1)
        losses.append(-predicted[range(24), text.tokens[72:]].mean())
    assert found["nll"] == pytest.approx(float(sum(losses)) / 2, rel=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(found["nll"]))
    assert found["nll_error"] == pytest.approx(float(abs(losses[0] - losses[1])) / 2, rel=1e-3)
    assert found["tokens"] == 48


def test_a_missing_file_is_reported_before_anything_runs(tmp_path: Path) -> None:
    for task in (Perplexity, Agreement, AttentionError, LongGeneration):
        with pytest.raises(ConfigError, match="does not exist"):
            task(TaskOptions(tmp_path / "none.txt"), name="some")


def test_full_agrees_with_itself(tiny_llm: Open) -> None:
    found = Agreement(TaskOptions(), name="agreement").measure(bench(tiny_llm(), tiny_llm()))
    assert found["agreement"] == 1
    assert abs(found["kl"]) < 1e-6
    assert found["nll"] == pytest.approx(found["full_nll"])


def test_agreement_and_kl_are_those_of_the_distributions(tiny_llm: Open) -> None:
    llm, full = tiny_llm("snapkv", SNAPKV), tiny_llm()
    task = Agreement(TaskOptions(), name="agreement")
    found = task.measure(bench(llm, full))
    texts = windows(llm, TaskOptions(), 96, 3, 0)
    mine, wanted = (torch.cat(forced_logprobs(one, texts)[0]).double() for one in (llm, full))
    targets = torch.tensor([token for text in texts for token in text.tokens[text.prompt :]])[:, None]
    assert found["agreement"] == pytest.approx(float((mine.argmax(-1) == wanted.argmax(-1)).double().mean()))
    assert found["kl"] == pytest.approx(float(torch.nn.functional.kl_div(mine, wanted, log_target=True, reduction="batchmean")), rel=1e-4)
    assert found["nll"] == pytest.approx(-float(mine.gather(1, targets).mean()), rel=1e-4)
    assert found["kl"] > 0
    assert found["stored_bytes"] < full.engine.cache.count.stored(95)


def test_full_predicts_a_window_once_for_all_policies(tiny_llm: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def count(llm: LLM, texts: Sequence[Given]) -> tuple[list[Tensor], Cost]:
        asked.append(len(texts))
        return forced_logprobs(llm, texts)

    monkeypatch.setattr("trtkv.eval.agreement.forced_logprobs", count)
    full, task = tiny_llm(), Agreement(TaskOptions(), name="agreement")
    picks = [(2,), (0,), (2,), (0,)]  # two windows of one policy, then of another
    found = [task.measure(replace(bench(tiny_llm("snapkv", SNAPKV), full), pick=pick)) for pick in picks]
    assert asked == [1, 1] and found[:2] == found[2:] and found[0]["nll"] != found[1]["nll"]
    task.measure(replace(bench(tiny_llm("snapkv", SNAPKV), full, length=64), pick=(2,)))
    assert len(asked) == 3, "windows of another length are others"


def test_attention_of_full_has_no_error(tiny_llm: Open) -> None:
    found = AttentionError(TaskOptions(), name="attention").measure(bench(tiny_llm(), tiny_llm(), samples=1))
    assert found["error"] < 1e-5
    assert found["recall"] == 1
    assert found["covered"] == pytest.approx(1)
    assert sum(name.startswith("error_layer_") for name in found) == 3


def test_attention_error_and_recall_by_definition(tiny_llm: Open) -> None:
    full, policy = tiny_llm(), parse_policy("streaming", sets=STREAMING)
    text = Given(windows(full, TaskOptions(), 96, 1, 0)[0].tokens, 96 - DECODED)
    seen = record(full, text)
    done = replay(policy, seen)
    layer, step = 1, 3
    q, k, v = (x.double() for x in seen.layers[layer])
    at = text.prompt + step
    errors, recalls = [], []
    for head in range(6):
        scores = k[: at + 1, head // 3] @ q[at, head] * 16**-0.5
        kept = torch.tensor([*range(4), *range(at + 1 - 21, at + 1)])  # sink, the window of 20 and the new token
        exact, mine = scores.softmax(0) @ v[: at + 1, head // 3], scores[kept].softmax(0) @ v[kept, head // 3]
        errors.append((mine - exact, exact))
        recalls.append(len(set(scores.topk(TOP).indices.tolist()) & set(kept.tolist())) / TOP)
    wrong, right = (torch.cat([one[index] for one in errors]).norm() for index in (0, 1))
    assert done[layer].attention_error[step] == pytest.approx(float(wrong / right), rel=1e-3)
    assert done[layer].recall[step] == pytest.approx(sum(recalls) / 6)


def test_recording_leaves_the_engine_as_it_was(tiny_llm: Open) -> None:
    full = tiny_llm()
    free, slots = full.engine.pages.free, sorted(full.engine.slots)
    first, again = (record(full, Given(windows(full, TaskOptions(), 96, 1, 0)[0].tokens, 80)) for _ in range(2))
    assert (full.engine.pages.free, sorted(full.engine.slots)) == (free, slots)
    assert all(torch.equal(a, b) for one, other in zip(first.layers, again.layers, strict=True) for a, b in zip(one, other, strict=True))
    assert first.layers[0][0].shape == (96, 6, 16)


def test_attention_needs_values_that_can_be_read(tiny_llm: Open) -> None:
    held = tiny_llm("snapkv", SNAPKV)
    with pytest.raises(ConfigError, match="--executor torch"):
        AttentionError(TaskOptions(), name="attention").measure(bench(held, held))
    with pytest.raises(ConfigError, match=f"--length {DECODED + 1}"):
        AttentionError(TaskOptions(), name="attention").measure(bench(tiny_llm(), tiny_llm(), length=DECODED))
    with pytest.raises(ConfigError, match="'kvzip' has the model repeat prompts"):
        AttentionError(TaskOptions(), name="attention").measure(bench(tiny_llm("kvzip"), tiny_llm()))


def test_a_policy_is_known_from_its_plan(tiny_llm: Open) -> None:
    for name, sets in (("full", ()), ("snapkv", SNAPKV), ("fier", ("retrieve.budget=48",)), ("minikv-pyramid", ())):
        plan = tiny_llm(name, sets).engine.cache.plan
        again = policy_of(plan)
        assert again.name == plan.policy
        assert again.roles == {kind: role for kind, role in parse_policy(name, sets=sets).roles.items() if kind in plan.roles}


def test_long_generation_of_full_equals_itself(tiny_llm: Open) -> None:
    task = LongGeneration(TaskOptions(), generated=40)
    found = task.measure(bench(tiny_llm(), tiny_llm(), length=80, samples=2))
    assert (found["agreement"], found["same"], found["diverged"]) == (1, 1, 40)
    assert found["nll"] == pytest.approx(found["full_nll"])


def test_long_generation_under_a_policy(tiny_llm: Open) -> None:
    task, llm = LongGeneration(TaskOptions(), generated=40), tiny_llm("streaming", STREAMING)
    found = task.measure(bench(llm, tiny_llm(), length=120, samples=2))
    assert 0 <= found["diverged"] < 40
    assert found["same"] >= found["diverged"] / 40
    assert found["nll"] > found["full_nll"]
    assert 0 < found["tokens_read_per_step"] < 26
    with pytest.raises(ConfigError, match="--length 56"):
        task.measure(bench(llm, tiny_llm(), length=55))
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2]) == 2


def test_what_full_wrote_is_reused_for_the_next_policy(tiny_llm: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    task, full, llm = LongGeneration(TaskOptions(), generated=20), tiny_llm(), tiny_llm("streaming", STREAMING)
    first = task.measure(bench(llm, full, length=60, samples=2))
    runs: list[object] = []
    run = full.engine.stepper.run
    monkeypatch.setattr(full.engine.stepper, "run", lambda rows: (runs.append(rows), run(rows))[1])
    assert task.measure(bench(llm, full, length=60, samples=2)) == first
    assert not runs
    assert task.measure(bench(llm, full, length=61, samples=2)) != first
    assert runs


def test_long_generation_does_not_depend_on_the_batch(tiny_llm: Open) -> None:
    # LagKV answers otherwise where chunks of a prompt end elsewhere, as they would if prompts of a batch shared steps.
    llm, full = tiny_llm("lagkv", ("evict.lag=16", "evict.sink=4")), tiny_llm()
    found = [LongGeneration(TaskOptions(), generated=20).measure(replace(bench(llm, full, length=150), batch=batch)) for batch in (1, 2, 3)]
    texts = [{name: one[name] for name in ("same", "diverged", "agreement")} for one in found]
    assert texts[0] == texts[1] == texts[2]


def test_attention_weighs_pages_as_the_plan_does(tiny_llm: Open) -> None:
    # A simulation keeps FIER's bits in bytes; the engine packs them.
    llm = tiny_llm("fier", ("retrieve.budget=48",))
    found = AttentionError(TaskOptions(), name="attention").measure(bench(llm, tiny_llm(), samples=1))
    assert found["stored_bytes"] == llm.engine.cache.count.stored(96)


def test_pg19_counts_words(tiny_llm: Open, tmp_path: Path) -> None:
    folder = tmp_path / "test"
    folder.mkdir()
    texts = [write_text(folder / f"{name}.txt", seed) for seed, name in enumerate("ab")]
    found = Pg19(TaskOptions(folder)).measure(bench(tiny_llm(), tiny_llm(), samples=3))
    # A byte is a token: two windows of the first book, one of the second; a word counts where its window's text has one more.
    places = [(texts[0], 0), (texts[0], 24), (texts[1], 0)]
    words = sum(len(text[start : start + 96].split()) - len(text[start : start + 72].split()) for text, start in places)
    assert found["words"] == words
    assert found["word_perplexity"] == pytest.approx(math.exp(found["nll"] * 72 / found["words"]), rel=1e-6)
    assert found["tokens"] == 72
    one = Pg19(TaskOptions(folder / "a.txt"))
    assert one.identity != Pg19(TaskOptions(folder)).identity
    assert one.measure(bench(tiny_llm(), tiny_llm(), samples=1))["tokens"] == 24


def test_pg19_without_books(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file was given"):
        Pg19(TaskOptions())
    for path in (tmp_path, tmp_path / "none.txt"):
        with pytest.raises(ConfigError, match="no text and no folder"):
            Pg19(TaskOptions(path))
