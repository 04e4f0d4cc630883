"""Measure the linear layers of the base model in three precisions, with one thread."""

import time

import torch
from torch.nn.functional import linear

torch.set_num_threads(1)
print("torch", torch.__version__, "AMX", torch.cpu._is_amx_tile_supported())
print("rows  layer       GFLOP/s: float32  float16  bfloat16")
for rows in (1, 4, 32, 128, 2048):
    for outputs, inputs in ((512, 512), (2048, 512)):
        rates = []
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
            operations = 2 * rows * outputs * inputs
            repeats = max(5, int(2e9 / operations))
            for _ in range(3):
                linear(x, weight)
            start = time.perf_counter()
            for _ in range(repeats):
                linear(x, weight)
            rates.append(operations * repeats / (time.perf_counter() - start) / 1e9)
        print(f"{rows:4}  {outputs:4} x {inputs}       ", *(f"{rate:8.1f}" for rate in rates))
