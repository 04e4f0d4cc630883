"""Distribution of a run over processes: a copy of the model each, or parts with FSDP2 or DeepSpeed.

Checkpoints do not depend on it: a run can resume with another layout or number of processes.
"""

import atexit
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from accelerate.utils import (
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    TorchDynamoPlugin,
    gather_object,
    is_deepspeed_available,
)
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from ..config import TrainConfig
from ..run_folder.checkpoint import ADAM_MOMENTS
from .cpu_kernels import use_cpu_kernels
from .memory import keep_memory

logger = logging.getLogger(__name__)

# the other processes wait while the main process learns a vocabulary and tokenizes the corpus
LONGEST_WAIT = timedelta(hours=6)
# compute capability of the first GPUs whose tensor cores take bf16
FIRST_WITH_BF16 = (8, 0)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Prepared = TypeVar("Prepared")


def open_accelerator(config: TrainConfig) -> Accelerator:
    """Join the processes that a launcher started, or be the only one.

    Args:
        config: Settings of the run.

    Returns:
        Accelerator of this process.

    Raises:
        ValueError: If the launcher's layout is not supported, or the device does not support the
            precision.
    """
    keep_memory()
    asked = {
        name
        for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM")
        if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true"
    }
    # an accelerator for it would need a library that may not be installed
    if "MEGATRON_LM" in asked:
        _refuse_layout("MEGATRON_LM")
    if "DEEPSPEED" in asked and not is_deepspeed_available():
        raise ValueError("DeepSpeed must be installed, as pip install deepspeed does.")
    # the precision of an earlier run of this process, as in a notebook
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        # the mixed precision of DeepSpeed would also round the weights
        mixed_precision="no"
        if config.precision == "fp32" or "DEEPSPEED" in asked
        else config.precision,
        # a training step sums its micro-batches itself; a launcher's setting would divide the loss
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        # a run that compiles its layers itself does not take the launcher's compiler as well
        dynamo_plugin=TorchDynamoPlugin(backend="no") if config.compile else None,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=LONGEST_WAIT)],
        cpu=is_launched_on_cpu() and not asked,
    )
    kind = accelerator.distributed_type
    if kind not in ("NO", "FSDP", "DEEPSPEED") and not kind.startswith("MULTI_"):
        _refuse_layout(kind.value)
    if accelerator.parallelism_config is not None:
        _refuse_layout("a parallelism_config")
    if kind == DistributedType.FSDP:
        _check_fsdp(accelerator)
    elif "FSDP" in asked or accelerator.num_processes != _num_launched():
        names = " and ".join(sorted(asked)) or f"{_num_launched()} processes"
        _refuse_layout(f"{names} on {accelerator.device.type}")
    if kind == DistributedType.DEEPSPEED:
        _check_deepspeed(accelerator, config)
    _refuse_precision(config.precision, accelerator.device)
    use_attention_for_all_shapes()
    _warn_of_idle_cores(accelerator)
    _warn_of_idle_tensor_cores(config.precision, accelerator)
    return accelerator


def use_attention_for_all_shapes():
    """Keep torch from cuDNN's attention in this process.

    On a GPU it makes a plan for each new shape, which takes longer than the step, and nearly every
    batch has a shape of its own.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def is_launched_on_cpu() -> bool:
    """Return whether a launcher started several processes on a machine without GPUs.

    The launcher does not tell accelerate, which would let each process work alone.
    """
    return _num_launched() > 1 and not torch.accelerator.is_available()


def _num_launched() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def leave_processes():
    """Leave the process group when all processes have reached this point.

    A process that ends without leaving may be aborted by the threads of the group.
    """
    state = PartialState()
    state.wait_for_everyone()
    state.destroy_process_group()


def main_process_first(prepare: Callable[[], Prepared]) -> Prepared:
    """Call a function in the main process before the others; an error in one ends all processes.

    On each other machine, which may not see the files of the main process, one process goes before
    the rest.

    Args:
        prepare: Function that every process calls.

    Returns:
        Result of the function.

    Raises:
        Exception: Error of the function, in the first process with an error.
        SystemExit: In all other processes after an error, with status 1.
    """
    state = PartialState()
    is_first_here = state.is_local_main_process
    turns = (
        state.is_main_process,
        is_first_here and not state.is_main_process,
        not is_first_here,
    )
    return _in_turns(prepare, turns)


def in_all_processes(prepare: Callable[[], Prepared]) -> Prepared:
    """Call a function in all processes at once; an error in one ends all processes.

    Args:
        prepare: Function that every process calls, and that waits for no other process.

    Returns:
        Result of the function.

    Raises:
        Exception: Error of the function, in the first process with an error.
        SystemExit: In all other processes after an error, with status 1.
    """
    return _in_turns(prepare, [True])


def _in_turns(prepare: Callable[[], Prepared], turns: Iterable[bool]) -> Prepared:
    state = PartialState()
    if state.num_processes == 1:
        return prepare()
    prepared: list[Prepared] = []
    refusal: Exception | None = None
    for is_turn in turns:
        if is_turn:
            try:
                prepared.append(prepare())
            except Exception as error:
                refusal = error
        refused = gather_object([refusal is not None])
        if any(refused):
            # at exit, after the error is printed
            atexit.register(leave_processes)
            # only one process prints the error
            if refusal is not None and refused.index(True) == state.process_index:
                raise refusal
            raise SystemExit(1)
    return prepared[-1]


def refuse_disagreement(facts: Mapping[str, Any], hint: str = "") -> None:
    """Refuse processes with different settings or data.

    Args:
        facts: Values that all processes must share, by name.
        hint: How to share them, for the error.

    Raises:
        ValueError: If another process has a different value; only in the main process.
        SystemExit: In the other processes, with status 1.
    """
    state = PartialState()
    if state.num_processes == 1:
        return
    seen = gather_object([dict(facts)])
    for process, other in enumerate(seen):
        for name, fact in seen[0].items():
            if other[name] == fact:
                continue
            # at exit, after the error is printed
            atexit.register(leave_processes)
            if not state.is_main_process:
                raise SystemExit(1)
            raise ValueError(
                f"all processes must have the same {name}{hint}, got {fact} in the main process "
                f"and {other[name]} in process {process}."
            )


def _refuse_layout(kind: str) -> NoReturn:
    raise ValueError(
        "accelerate must run one process, several with a copy of the model each (multi-CPU, "
        f"multi-GPU), FSDP2 or DeepSpeed ZeRO 1 or 2 on accelerators, got {kind}."
    )


def _check_fsdp(accelerator: Accelerator):
    plugin = accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        _refuse_layout(f"FSDP with fsdp_version {plugin.fsdp_version}")
    if os.environ.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true":
        _refuse_layout("FSDP with fsdp_offload_params")
    # every process makes or reads the weights itself
    plugin.cpu_ram_efficient_loading = False
    if accelerator.mixed_precision != "no":
        # gradients are summed over processes in fp32, as without FSDP
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[accelerator.mixed_precision], reduce_dtype=torch.float32
        )


def _check_deepspeed(accelerator: Accelerator, config: TrainConfig):
    plugin = accelerator.deepspeed_plugin
    settings = plugin.deepspeed_config
    if plugin.zero_stage not in (1, 2):
        _refuse_layout(f"DeepSpeed with zero_stage {plugin.zero_stage}")
    for name in ("offload_optimizer_device", "offload_param_device"):
        if getattr(plugin, name) not in (None, "none"):
            _refuse_layout(f"DeepSpeed with {name} {getattr(plugin, name)}")
    for name in DTYPES:
        if settings.get(name, {}).get("enabled") is True:
            raise ValueError(
                f"DeepSpeed's configuration must leave {name} to the setting precision, got it "
                "enabled there."
            )
    if config.precision == "fp16":
        raise ValueError("precision must be fp32 or bf16 with DeepSpeed, got 'fp16'.")
    # the run itself decides batch size, accumulation and clipping
    settings["train_micro_batch_size_per_gpu"] = 1
    settings["gradient_accumulation_steps"] = 1
    settings["gradient_clipping"] = config.max_grad_norm or 0.0


def _refuse_precision(precision: str, device: torch.device):
    # on a CPU accelerate would silently use fp32
    if precision == "fp16" and device.type == "cpu":
        raise ValueError("precision must be fp32 or bf16 on a CPU, got 'fp16'.")
    # torch would emulate bf16, which is slower than fp32
    if (
        precision == "bf16"
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise ValueError(
            f"precision must be fp32 or fp16 on {torch.cuda.get_device_name()}, got 'bf16'."
        )


def _warn_of_idle_cores(accelerator: Accelerator):
    threads, cores = torch.get_num_threads(), os.cpu_count()
    if accelerator.device.type == "cpu" and threads * accelerator.num_processes < cores:
        logger.warning(
            "Each process uses %d of %d cores. Set OMP_NUM_THREADS=%d before the command to use "
            "all cores.",
            threads,
            cores,
            cores // accelerator.num_processes,
        )


def _warn_of_idle_tensor_cores(precision: str, accelerator: Accelerator):
    if (
        accelerator.is_main_process
        and accelerator.device.type == "cuda"
        and precision == "fp32"
        and torch.get_float32_matmul_precision() == "highest"
        and torch.cuda.get_device_capability() >= FIRST_WITH_BF16
    ):
        logger.warning(
            "precision fp32 leaves the tensor cores of the GPU idle: --precision bf16 computes "
            "several times as fast."
        )


def prepare(
    accelerator: Accelerator, model: PreTrainedModel, config: TrainConfig
) -> tuple[nn.Module, Optimizer, AcceleratedOptimizer]:
    """Make the optimizer, and distribute model and optimizer over the processes. Section 5.3.

    Args:
        accelerator: From `open_accelerator`.
        model: Model, the same on every process; with FSDP2 it keeps a part of each weight.
        config: Settings of the run.

    Returns:
        Wrapped model, optimizer, and wrapped optimizer.
    """
    if accelerator.is_fsdp2:
        # the embedding is shared by three modules, and accelerate handles only two
        fully_shard(
            [
                model.get_encoder().embed_tokens,
                model.get_decoder().embed_tokens,
                model.get_output_embeddings(),
            ],
            reshard_after_forward=False,
            mp_policy=accelerator.state.fsdp_plugin.mixed_precision_policy
            or MixedPrecisionPolicy(),
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED and config.precision == "bf16":
        autocast = torch.autocast(accelerator.device.type, torch.bfloat16)
        model.forward = autocast(model.forward)
    if accelerator.device.type == "cpu":
        use_cpu_kernels(model, is_half=config.precision != "fp32")
    if config.compile:
        # in place: the model keeps its structure, its names and its fused loss
        for layer in _layers(model):
            # batches differ in length
            layer.compile(dynamic=True)
    optimizer = torch.optim.Adam(
        model.parameters(),
        lr=1.0,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )
    wrapped_model, wrapped_optimizer = accelerator.prepare(model, optimizer)
    return wrapped_model, optimizer, wrapped_optimizer


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of each stack, of whatever class the model is."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _layers(child)


def whole_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gather tensors that are distributed over processes. All processes must call this.

    Args:
        tensors: Tensors by name, whole or distributed.

    Returns:
        Whole tensors by name; gathered ones are in host memory.
    """
    return {
        name: tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor
        for name, tensor in tensors.items()
    }


def own_parts(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Distribute whole tensors in the same way as the weights of a model.

    Args:
        model: Model, not wrapped.
        tensors: Whole tensors, by name of the weight.

    Returns:
        Parts of this process, by name.
    """
    parameters = dict(model.named_parameters())
    return {name: _part(tensor, parameters[name]) for name, tensor in tensors.items()}


def whole_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Gather the weights of a model. All processes must call this.

    Args:
        model: Model, not wrapped.

    Returns:
        Weights by name, tied ones once, and the buffers that are saved with the model.
    """
    for module in model.modules():
        # an evaluation leaves gathered weights, in the precision of the computation
        if isinstance(module, FSDPModule):
            module.reshard()
    tensors = {name: weight.detach() for name, weight in model.named_parameters()}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}".lstrip(".")] = buffer
    return whole_tensors(tensors)


def whole_optimizer_state(
    accelerator: Accelerator, model: PreTrainedModel, optimizer: Optimizer
) -> dict[str, Any]:
    """Gather the state of an optimizer. All processes must call this.

    Args:
        accelerator: Accelerator that prepared model and optimizer.
        model: Model, not wrapped.
        optimizer: Optimizer, not wrapped.

    Returns:
        `state_dict` in the form of an optimizer of a single process.
    """
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        state = optimizer.state_dict()
        whole = {index: whole_tensors(slots) for index, slots in state["state"].items()}
        return {**state, "state": whole}
    from deepspeed.utils import safe_get_full_optimizer_state

    (group,) = optimizer.param_groups
    # DeepSpeed keeps all weights in one flat tensor, with one count of steps
    step = optimizer.state[group["params"][0]]["step"]
    parameters = list(model.parameters())
    whole = {
        index: {
            # a copy for each weight: the optimizer increments each count in place
            "step": step.clone(),
            **{name: safe_get_full_optimizer_state(parameter, name) for name in ADAM_MOMENTS},
        }
        for index, parameter in enumerate(parameters)
    }
    return {"state": whole, "param_groups": [{**group, "params": list(range(len(parameters)))}]}


def load_optimizer_state(
    accelerator: Accelerator,
    model: PreTrainedModel,
    optimizer: Optimizer,
    wrapped_optimizer: AcceleratedOptimizer,
    state: Mapping[str, Any],
) -> None:
    """Restore the state of an optimizer, on each process its part. Its settings stay.

    Args:
        accelerator: Accelerator that prepared model and optimizer.
        model: Model, not wrapped.
        optimizer: Optimizer, not wrapped.
        wrapped_optimizer: Prepared optimizer.
        state: Result of `whole_optimizer_state`.
    """
    parameters = list(model.parameters())
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        parts = {
            index: {
                name: _part(tensor, parameters[index]) if name in ADAM_MOMENTS else tensor
                for name, tensor in slots.items()
            }
            for index, slots in state["state"].items()
        }
        # learning rate and betas come from the settings of the resumed run
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": parts, "param_groups": groups})
        return
    from deepspeed.utils import safe_set_full_optimizer_state

    (group,) = optimizer.param_groups
    (flat,) = group["params"]
    # before its first step an optimizer has no moments
    optimizer.state[flat] = {
        "step": state["state"][0]["step"].to(flat.device),
        **{name: torch.zeros_like(flat) for name in ADAM_MOMENTS},
    }
    wrapped_optimizer.optimizer._lazy_init_hp_params_optimizer_state()
    for parameter, slots in zip(parameters, state["state"].values(), strict=True):
        for name in ADAM_MOMENTS:
            safe_set_full_optimizer_state(parameter, slots[name].to(flat.device), name)


def _part(tensor: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return tensor
    mesh = parameter.device_mesh
    # every process has read the whole tensor, so nothing is sent
    return distribute_tensor(
        tensor.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None
    )
