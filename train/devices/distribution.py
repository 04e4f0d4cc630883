"""Distribute a run over processes: data parallelism, sharding with FSDP2, or DeepSpeed ZeRO.

Checkpoints do not depend on this layout: a run can resume with another layout and another number of
processes.
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
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    TorchDynamoPlugin,
    gather_object,
    is_deepspeed_available,
    parse_flag_from_env,
)
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from ..config import TrainConfig
from ..run_folder.checkpoint import ADAM_MOMENTS
from .cpu_kernels import use_cpu_kernels, warn_of_emulated_bf16
from .memory import keep_freed_memory

logger = logging.getLogger(__name__)

# timeout of collective operations, in which the other processes wait while the main process learns
# a vocabulary and tokenizes the corpus
COLLECTIVE_TIMEOUT = timedelta(hours=6)
# lowest compute capability of GPUs whose tensor cores support bf16
MIN_BF16_CAPABILITY = (8, 0)
HALF_PRECISION_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Result = TypeVar("Result")


def open_accelerator(config: TrainConfig) -> Accelerator:
    """Join the process group that a launcher started, or run as a single process.

    Args:
        config: Settings of the run.

    Returns:
        Accelerator of this process.

    Raises:
        ValueError: If the launcher's layout is not supported, DeepSpeed is not installed, or the
            device does not support the precision.
    """
    keep_freed_memory()
    requested_layouts = {
        name
        for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM")
        if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true"
    }
    # refuse Megatron-LM before an `Accelerator` is made, because accelerate would import a library
    # that may not be installed
    if "MEGATRON_LM" in requested_layouts:
        _refuse_layout("MEGATRON_LM")
    if "DEEPSPEED" in requested_layouts and not is_deepspeed_available():
        raise ValueError("DeepSpeed must be installed, as pip install deepspeed does.")
    # accelerate allows one precision in a process, and an earlier run, as in a notebook, may have
    # used another one
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        # DeepSpeed's own mixed precision would also round the weights; `prepare` uses autocast
        mixed_precision="no"
        if config.precision == "fp32" or "DEEPSPEED" in requested_layouts
        else config.precision,
        # a training step accumulates gradients itself. With a number of accumulation steps from the
        # launcher, accelerate would divide the loss by this number
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        # `prepare` compiles the layers, so a compiler setting of the launcher must not apply too
        dynamo_plugin=TorchDynamoPlugin(backend="no") if config.compile else None,
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=COLLECTIVE_TIMEOUT),
            # a user's class may have weights that are not used in each step
            DistributedDataParallelKwargs(find_unused_parameters=config.model_class is not None),
        ],
        cpu=is_launched_on_cpu() and not requested_layouts,
    )
    layout = accelerator.distributed_type
    if layout not in ("NO", "FSDP", "DEEPSPEED") and not layout.startswith("MULTI_"):
        _refuse_layout(layout.value)
    if accelerator.parallelism_config is not None:
        _refuse_layout("a parallelism_config")
    if layout == DistributedType.FSDP:
        _check_fsdp(accelerator)
    elif "FSDP" in requested_layouts or accelerator.num_processes != _num_launched_processes():
        requested_text = (
            " and ".join(sorted(requested_layouts)) or f"{_num_launched_processes()} processes"
        )
        _refuse_layout(f"{requested_text} on {accelerator.device.type}")
    if layout == DistributedType.DEEPSPEED:
        _check_deepspeed(accelerator, config)
    in_all_processes(lambda: _refuse_precision(config.precision, accelerator.device))
    _warn_of_other_precision(config.precision, accelerator)
    if (
        config.precision == "bf16"
        and accelerator.device.type == "cpu"
        and accelerator.is_main_process
    ):
        warn_of_emulated_bf16("--precision fp32")
    disable_cudnn_attention()
    _warn_of_idle_cores(accelerator)
    _warn_of_idle_tensor_cores(config.precision, accelerator)
    return accelerator


def disable_cudnn_attention():
    """Disable cuDNN's attention kernel in this process.

    On a GPU, cuDNN builds an execution plan for each new shape, which takes longer than a step.
    Nearly every batch has a new shape.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def is_launched_on_cpu() -> bool:
    """Return whether a launcher started several processes on a machine without GPUs.

    The launcher does not set accelerate's option for CPUs. Without the argument `cpu`, accelerate
    would run each process alone, outside of a process group.
    """
    return _num_launched_processes() > 1 and not torch.accelerator.is_available()


def _num_launched_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def join_processes() -> PartialState:
    """Join the processes that a launcher started, on CPUs if asked for or if there is no GPU.

    Returns:
        State of the processes.
    """
    cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or is_launched_on_cpu()
    return PartialState(cpu=cpu, timeout=COLLECTIVE_TIMEOUT)


def leave_process_group():
    """Leave the process group when all processes have reached this point.

    If a process ends without leaving the group, the threads of the group may abort the process.
    """
    state = PartialState()
    state.wait_for_everyone()
    state.destroy_process_group()


def main_process_first(function: Callable[[], Result]) -> Result:
    """Call a function in the main process before the others; an error in one ends all processes.

    Other machines may not have access to the files of the main process, so on each of them one
    process calls the function before the rest.

    Args:
        function: Function that every process calls.

    Returns:
        Result of the function in this process.

    Raises:
        Exception: The error of the function, re-raised in the first process that had an error.
        SystemExit: With status 1, in all other processes, after an error in any process.
    """
    state = PartialState()
    is_first_here = state.is_local_main_process
    turns = (
        state.is_main_process,
        is_first_here and not state.is_main_process,
        not is_first_here,
    )
    return _call_in_turns(function, turns)


def in_all_processes(function: Callable[[], Result]) -> Result:
    """Call a function in all processes at once; an error in one ends all processes.

    Args:
        function: Function that every process calls, and that waits for no other process.

    Returns:
        Result of the function in this process.

    Raises:
        Exception: The error of the function, re-raised in the first process that had an error.
        SystemExit: With status 1, in all other processes, after an error in any process.
    """
    return _call_in_turns(function, [True])


def _call_in_turns(function: Callable[[], Result], turns: Iterable[bool]) -> Result:
    state = PartialState()
    if state.num_processes == 1:
        return function()
    results: list[Result] = []
    local_error: Exception | None = None
    for is_turn in turns:
        if is_turn:
            try:
                results.append(function())
            except Exception as error:
                local_error = error
        has_error_by_process = gather_object([local_error is not None])
        if any(has_error_by_process):
            # leave the group only at exit, so that no process ends before the error is printed
            atexit.register(leave_process_group)
            # only one process prints the error
            if local_error is not None and has_error_by_process.index(True) == state.process_index:
                raise local_error
            raise SystemExit(1)
    return results[-1]


def refuse_disagreement(facts: Mapping[str, Any], hint: str = "") -> None:
    """Raise an error if the processes have different settings or data.

    Args:
        facts: Values that must be equal in all processes, by name.
        hint: Words for the error message that say how to make the values equal.

    Raises:
        ValueError: In the main process, if another process has a different value.
        SystemExit: With status 1, in the other processes, if a value differs.
    """
    state = PartialState()
    if state.num_processes == 1:
        return
    facts_by_process = gather_object([dict(facts)])
    for process, process_facts in enumerate(facts_by_process):
        for name, fact in facts_by_process[0].items():
            if process_facts[name] == fact:
                continue
            # leave the group only at exit, so that no process ends before the error is printed
            atexit.register(leave_process_group)
            if not state.is_main_process:
                raise SystemExit(1)
            raise ValueError(
                f"all processes must have the same {name}{hint}, got {fact} in the main process "
                f"and {process_facts[name]} in process {process}."
            )


def _refuse_layout(layout: str) -> NoReturn:
    raise ValueError(
        "accelerate must run one process, several with a copy of the model each (multi-CPU, "
        f"multi-GPU), FSDP2 or DeepSpeed ZeRO 1 or 2 on accelerators, got {layout}."
    )


def _check_fsdp(accelerator: Accelerator):
    plugin = accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        _refuse_layout(f"FSDP with fsdp_version {plugin.fsdp_version}")
    if os.environ.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true":
        _refuse_layout("FSDP with fsdp_offload_params")
    # no broadcast of the main process's weights is needed: every process makes or reads the same
    # weights itself
    plugin.cpu_ram_efficient_loading = False
    if accelerator.mixed_precision != "no":
        # gradients are summed over processes in fp32, as without FSDP
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=HALF_PRECISION_DTYPES[accelerator.mixed_precision],
            reduce_dtype=torch.float32,
        )


def _check_deepspeed(accelerator: Accelerator, config: TrainConfig):
    plugin = accelerator.deepspeed_plugin
    settings = plugin.deepspeed_config
    if plugin.zero_stage not in (1, 2):
        _refuse_layout(f"DeepSpeed with zero_stage {plugin.zero_stage}")
    for name in ("offload_optimizer_device", "offload_param_device"):
        if getattr(plugin, name) not in (None, "none"):
            _refuse_layout(f"DeepSpeed with {name} {getattr(plugin, name)}")
    for name in HALF_PRECISION_DTYPES:
        if settings.get(name, {}).get("enabled") is True:
            raise ValueError(
                f"DeepSpeed's configuration must leave {name} to the setting precision, got it "
                "enabled there."
            )
    if config.precision == "fp16":
        raise ValueError("precision must be fp32 or bf16 with DeepSpeed, got 'fp16'.")
    # DeepSpeed needs these values, but the training step itself makes the micro-batches and
    # accumulates their gradients
    settings["train_micro_batch_size_per_gpu"] = 1
    settings["gradient_accumulation_steps"] = 1
    settings["gradient_clipping"] = config.max_grad_norm or 0.0


def _refuse_precision(precision: str, device: torch.device):
    # refuse fp16 on a CPU, where accelerate would silently use fp32
    if precision == "fp16" and device.type == "cpu":
        raise ValueError("precision must be fp32 or bf16 on a CPU, got 'fp16'.")
    # refuse bf16 without hardware support: torch would emulate it, which is slower than fp32
    if (
        precision == "bf16"
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise ValueError(
            f"precision must be fp32 or fp16 on {torch.cuda.get_device_name()}, got 'bf16'."
        )


def _warn_of_other_precision(precision: str, accelerator: Accelerator):
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if accelerator.is_main_process and launched not in ("no", precision):
        logger.warning(
            "The launcher's mixed_precision %s is not used: the precision is %s, which --precision "
            "sets.",
            launched,
            precision,
        )


def num_usable_cores() -> int:
    """Return the number of cores that this process may use, which `taskset` and SLURM limit."""
    # macOS and Windows cannot limit a process to some cores in this way
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def _warn_of_idle_cores(accelerator: Accelerator):
    threads, cores = torch.get_num_threads(), num_usable_cores()
    # processes on other machines use other cores
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
    is_on_cpu = accelerator.is_main_process and accelerator.device.type == "cpu"
    if is_on_cpu and threads * local_processes < cores:
        logger.warning(
            "Each process uses %d of %d cores. Set OMP_NUM_THREADS=%d before the command to use "
            "all cores.",
            threads,
            cores,
            cores // local_processes,
        )


def _warn_of_idle_tensor_cores(precision: str, accelerator: Accelerator):
    if (
        accelerator.is_main_process
        and accelerator.device.type == "cuda"
        and precision == "fp32"
        and torch.get_float32_matmul_precision() == "highest"
        and torch.cuda.get_device_capability() >= MIN_BF16_CAPABILITY
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
        accelerator: Accelerator from `open_accelerator`.
        model: Model with the same weights on every process. FSDP2 shards the model in place: each
            process then keeps a part of each weight.
        config: Settings of the run.

    Returns:
        Wrapped model, optimizer, and wrapped optimizer.
    """
    if accelerator.is_fsdp2:
        # shard the tied embedding here: three modules share it, and accelerate handles only two
        fully_shard(
            [
                model.get_encoder().get_input_embeddings(),
                model.get_decoder().get_input_embeddings(),
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
        # compile each layer in place, so that the model keeps its module structure, its parameter
        # names and its fused loss
        for layer in _iterate_layers(model):
            # with dynamic shapes, because batches differ in length
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


def _iterate_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of each stack of a model of any class: the items of its module lists."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _iterate_layers(child)


def gather_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gather tensors that are sharded over processes. All processes must call this.

    Args:
        tensors: Tensors by name, whole or sharded.

    Returns:
        Whole tensors by name; the gathered tensors are in host memory.
    """
    return {
        name: tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor
        for name, tensor in tensors.items()
    }


def shard_tensors(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Shard whole tensors in the same way as the weights of a model.

    Args:
        model: Model, not wrapped.
        tensors: Whole tensors, by name of the weight.

    Returns:
        Sharded tensors by name; unchanged tensors if the weights are not sharded.
    """
    parameters = dict(model.named_parameters())
    return {
        name: _shard_like_parameter(tensor, parameters[name]) for name, tensor in tensors.items()
    }


def gather_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Gather the weights of a model. All processes must call this.

    Args:
        model: Model, not wrapped.

    Returns:
        Weights and persistent buffers, by name; a tied weight occurs once.
    """
    for module in model.modules():
        # after an evaluation the parameters are still gathered, and in the precision of the
        # computation; the shards are in fp32
        if isinstance(module, FSDPModule):
            module.reshard()
    tensors = {name: weight.detach() for name, weight in model.named_parameters()}
    return gather_tensors(tensors | dict(_persistent_buffers(model)))


def _persistent_buffers(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer


def broadcast_buffers(model: PreTrainedModel):
    """Copy the persistent buffers of the main process to the others. All processes must call this.

    Each process changes buffers, such as the statistics of `BatchNorm`, with its own batches. A
    checkpoint contains the persistent buffers of the main process.

    Args:
        model: Model, not wrapped.
    """
    if PartialState().num_processes > 1:
        for _, buffer in _persistent_buffers(model):
            torch.distributed.broadcast(buffer, src=0)


def gather_optimizer_state(
    accelerator: Accelerator, model: PreTrainedModel, optimizer: Optimizer
) -> dict[str, Any]:
    """Gather the state of an optimizer. All processes must call this.

    Args:
        accelerator: Accelerator that prepared model and optimizer.
        model: Model, not wrapped.
        optimizer: Optimizer, not wrapped.

    Returns:
        State with the entries of `state_dict`, as from an optimizer in a single process.
    """
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        state = optimizer.state_dict()
        gathered_states = {
            index: gather_tensors(weight_state) for index, weight_state in state["state"].items()
        }
        return {**state, "state": gathered_states}
    from deepspeed.utils import safe_get_full_optimizer_state

    (group,) = optimizer.param_groups
    # DeepSpeed keeps all weights in one flat tensor, so there is a single step count
    step = optimizer.state[group["params"][0]]["step"]
    parameters = list(model.parameters())
    gathered_states = {
        index: {
            # each weight needs its own copy, because the optimizer increments the count in place
            "step": step.clone(),
            **{name: safe_get_full_optimizer_state(parameter, name) for name in ADAM_MOMENTS},
        }
        for index, parameter in enumerate(parameters)
    }
    return {
        "state": gathered_states,
        "param_groups": [{**group, "params": list(range(len(parameters)))}],
    }


def load_optimizer_state(
    accelerator: Accelerator,
    model: PreTrainedModel,
    optimizer: Optimizer,
    wrapped_optimizer: AcceleratedOptimizer,
    state: Mapping[str, Any],
) -> None:
    """Restore the state of an optimizer, but not its hyperparameters. Each process loads its shard.

    Args:
        accelerator: Accelerator that prepared model and optimizer.
        model: Model, not wrapped.
        optimizer: Optimizer, not wrapped.
        wrapped_optimizer: Prepared optimizer.
        state: Result of `gather_optimizer_state`.
    """
    parameters = list(model.parameters())
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        sharded_states = {
            index: {
                name: _shard_like_parameter(tensor, parameters[index])
                if name in ADAM_MOMENTS
                else tensor
                for name, tensor in weight_state.items()
            }
            for index, weight_state in state["state"].items()
        }
        # keep the parameter groups: learning rate and betas come from the resumed run's settings
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": sharded_states, "param_groups": groups})
        return
    from deepspeed.utils import safe_set_full_optimizer_state

    (group,) = optimizer.param_groups
    (flat_weights,) = group["params"]
    # create the moments that the saved values replace: an optimizer has none before its first step
    optimizer.state[flat_weights] = {
        "step": state["state"][0]["step"].to(flat_weights.device),
        **{name: torch.zeros_like(flat_weights) for name in ADAM_MOMENTS},
    }
    wrapped_optimizer.optimizer._lazy_init_hp_params_optimizer_state()
    for parameter, weight_state in zip(parameters, state["state"].values(), strict=True):
        for name in ADAM_MOMENTS:
            safe_set_full_optimizer_state(
                parameter, weight_state[name].to(flat_weights.device), name
            )


def _shard_like_parameter(tensor: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return tensor
    mesh = parameter.device_mesh
    # every process has the whole tensor, so without a source rank nothing is broadcast
    return distribute_tensor(
        tensor.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None
    )
