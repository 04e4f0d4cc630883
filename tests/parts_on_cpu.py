"""`python -m vanilla_transformer.train`, with FSDP2 and DeepSpeed on the CPU.

accelerate shards a model only on GPUs. On a CPU it ignores FSDP, and opens DeepSpeed without a
backend. Training does the same on CPU and GPU, so the tests make accelerate shard on the CPU.
"""

import os
import sys

from accelerate import DistributedType
from accelerate.state import AcceleratorState, PartialState

from vanilla_transformer.train.__main__ import main
from vanilla_transformer.train.devices import distribution

if os.environ.get("ACCELERATE_USE_FSDP") == "true":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    open_state = AcceleratorState.__init__

    def open_sharded_state(self, *args, fsdp_plugin=None, **options):
        is_new = not AcceleratorState._shared_state
        open_state(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if is_new:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = open_sharded_state

if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
    # with ACCELERATE_USE_CPU=true accelerate would ignore DeepSpeed
    os.environ["ACCELERATE_USE_CPU"] = "false"
    handler = distribution.InitProcessGroupKwargs
    distribution.InitProcessGroupKwargs = lambda **options: handler(backend="gloo", **options)

if __name__ == "__main__":
    sys.exit(main())
