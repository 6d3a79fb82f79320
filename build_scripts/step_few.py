import sys, tempfile, time, gc
from pathlib import Path
import torch
sys.path.insert(0, str(Path(__file__).parent))
import tune_step
from trtkv.bench.load import Load, Work
from trtkv.checkpoint.find import resolve_model
from trtkv.config import Limits
from trtkv.plugins._device import store
from trtkv.plugins.kernels import request
from trtkv.plugins.linear import launch, launch_few
from trtkv.plugins.linear.launch import Form
from trtkv.policies.registry import parse_policy

SOURCE, PREFERS, FORM_OF = launch._SOURCE, launch_few.prefers, launch.form_of


def old_form(width, inner, gated):
    if gated:
        return Form(2, 8, 1)
    return Form(4, 8, 2) if width >= launch.WIDE else Form(2, 8, 1) if inner >= launch.LONG else Form(4, 8, 1)


def use(kind):
    launch._SOURCE = SOURCE.with_name("old.cu") if kind == "old" else SOURCE
    launch.form_of = old_form if kind == "old" else FORM_OF
    launch_few.prefers = (lambda *a, **k: False) if kind == "old" else PREFERS


KINDS = ("old", "new")
CASES = ((8, 8192), (2, 8192), (1, 32768))


def compile_all(folder):
    with store.listing() as asked:
        for batch, context in CASES:
            for model in ("qwen2.5-7b",):
                config = resolve_model(model).config
                for kind in KINDS:
                    use(kind)
                    request(parse_policy("full", budget=None).plan(config), config, Limits(max_seq_len=context, max_batch_size=batch, max_chunk_tokens=8192), "90")
    from trtkv.builder.kernels import write_kernels
    write_kernels(list(asked), Path(folder), lambda stage, done: None)
    print(len(asked), "kernels")


@torch.inference_mode()
def main():
    t0 = time.perf_counter()
    for batch, context in CASES:
        with tempfile.TemporaryDirectory() as folder:
            use("new")
            engine = tune_step.opened("qwen2.5-7b", "full", 0, context, batch, Path(folder) / "engine")
            print(f"[{time.perf_counter() - t0:.1f}] opened", flush=True)
            load = Load(engine, Work(context, batch, 8192, tune_step.STEPS + 16, direct=True))
            load.fill(lambda fraction: None)
            print(f"[{time.perf_counter() - t0:.1f}] filled", flush=True)
            truth = None
            for kind in (*KINDS, *KINDS):
                use(kind)
                took, parts, logits = tune_step.timed(load, {}, True)
                truth = logits if truth is None else truth
                shown = " ".join(f"{part}={parts[part + '_us']:.0f}" for part in tune_step.SHOWN if part + "_us" in parts)
                print(f"[{time.perf_counter() - t0:.1f}] {batch} x {context} {kind}: {took:.1f} us {shown} error {float((logits - truth).norm() / truth.norm()):.1e}", flush=True)
            del engine, load
            gc.collect()
            torch.cuda.empty_cache()


if len(sys.argv) > 1:
    compile_all(sys.argv[1])
else:
    main()
