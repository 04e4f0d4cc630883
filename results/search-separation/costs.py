"""Cost of the checks before a search, for the base model and one source: costs.py THREADS"""

import statistics
import sys
import time

import torch

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer import engine_vanilla_transformer as engine
from vanilla_transformer.identity_vanilla_transformer import computing_modules

torch.set_num_threads(int(sys.argv[1]))
torch.manual_seed(0)
config = VanillaTransformerConfig.from_paper("base")
model = VanillaTransformerForConditionalGeneration(config).eval()
ids = torch.randint(3, 37000, (1, 20))


def milliseconds(work, repeats=30):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - start))
    return f"{statistics.median(times):.2f}"


def search(**settings):
    with torch.no_grad():
        model.generate(ids, max_new_tokens=20, min_new_tokens=20, **settings)


modules = computing_modules(model)
print("identity of all modules, ms, each search:", milliseconds(lambda: engine.obstacle(model)))
print("content of all weights, ms, each search:", milliseconds(lambda: engine._state(modules)))
print("packing, ms, once:", milliseconds(lambda: engine.SearchEngine(model), 5))
packed = engine.SearchEngine(model)
print("probe, ms, once:", milliseconds(lambda: engine.probe(packed, model), 5))
search(num_beams=1)
for num_beams in (1, 4):
    print(
        f"a search of 20 tokens with num_beams {num_beams}, ms:",
        milliseconds(lambda beams=num_beams: search(num_beams=beams), 10),
    )
