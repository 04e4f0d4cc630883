"""Measure the parts of one greedy translation in int8 by the base model, with two threads."""

import time

import torch

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer import engine_checks_vanilla_transformer as checks
from vanilla_transformer.engine_vanilla_transformer import SearchEngine
from vanilla_transformer.identity_vanilla_transformer import computing_modules
from vanilla_transformer.kernels_vanilla_transformer import Int8Linear

SOURCE_TOKENS, NUM_STEPS, NUM_ROUNDS = 12, 14, 40
SEARCH = {
    "num_beams": 1,
    "int8": True,
    "min_new_tokens": NUM_STEPS,
    "max_new_tokens": NUM_STEPS,
}


class RecordedLinear(Int8Linear):
    """Layer that records its inputs while `calls` is a list."""

    calls = None

    def __call__(self, x):
        if RecordedLinear.calls is not None:
            RecordedLinear.calls.append((self, x))
        return super().__call__(x)


@torch.inference_mode()
def main():
    """Measure each part in turn, and print the medians."""
    torch.set_num_threads(2)
    torch.manual_seed(1)
    config = VanillaTransformerConfig.from_paper("base")
    model = VanillaTransformerForConditionalGeneration(config).eval()
    source = torch.randint(4, config.vocab_size, (1, SOURCE_TOKENS))
    ids = torch.randint(4, config.vocab_size, (1, 1, NUM_STEPS + 1))
    engine = SearchEngine(model, RecordedLinear)
    memory = engine.encode(source, None)
    modules = computing_modules(model)

    def run_steps():
        decoding = engine.begin(memory, None)
        for length in range(1, NUM_STEPS + 1):
            decoding.step(ids[:, :, :length])

    decoding = engine.begin(memory, None)
    RecordedLinear.calls = []
    decoding.step(ids[:, :, :1])
    calls, RecordedLinear.calls = RecordedLinear.calls, None
    num_weights = sum(linear.num_outputs * x.shape[1] for linear, x in calls)
    block = torch.zeros(2**28, dtype=torch.int8).view(torch.int32)

    def run_products():
        for _ in range(NUM_STEPS):
            for linear, x in calls:
                linear(x)

    parts = {
        "whole call of generate": lambda: model.generate(source, **SEARCH),
        "  checksums of the weights": lambda: checks._state_of(modules, Int8Linear),
        "  other checks of the model": lambda: checks.reason_against_engine(model, "int8"),
        "  encoder": lambda: engine.encode(source, None),
        f"  {NUM_STEPS} steps of the decoder": run_steps,
        "    their products": run_products,
        "reading 256 MiB": block.max,
    }
    times: dict[str, list[float]] = {name: [] for name in parts}
    for round_number in range(NUM_ROUNDS + 2):
        for name, run in parts.items():
            start = time.perf_counter()
            run()
            if round_number >= 2:
                times[name].append(1000 * (time.perf_counter() - start))
    print("torch", torch.__version__, "threads", torch.get_num_threads())
    print(f"milliseconds: median (quartiles), {NUM_ROUNDS} rounds")
    for name, values in times.items():
        low, middle, high = torch.tensor(values).quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
        print(f"{name:28} {middle:6.1f} ({low:.1f} to {high:.1f})")
    num_checked = sum(it.weight.numel() for _, it, _ in modules if isinstance(it, torch.nn.Linear))
    print(f"weights with a checksum: {4 * num_checked / 1e6:.0f} MB in float32")
    print(f"weights that a step reads: {num_weights / 1e6:.0f} MB in int8")


main()
