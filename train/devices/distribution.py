"""How a run lies on its processes: a copy of the model each, or with FSDP2 or DeepSpeed a part.

What is saved does not depend on it: a run goes on in another layout and on more or fewer processes.
"""

import atexit
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
from accelerate import Accelerator, DistributedType, PartialState
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

# the other processes wait while the first one learns a vocabulary and tokenizes the corpus
LONGEST_WAIT = timedelta(hours=6)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Prepared = TypeVar("Prepared")


def open_accelerator(config: TrainConfig) -> Accelerator:
    """Join the processes that a launcher started, or be the only one.

    Args:
        config: Settings of the run.

    Returns:
        What knows the processes, the device and the precision.

    Raises:
        ValueError: If the launcher was told of a layout that is not supported, or the device does
            not have the precision.
    """
    keep_memory()
    asked = {
        name
        for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM")
        if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true"
    }
    # to open an accelerator for it needs a library that may not be there
    if "MEGATRON_LM" in asked:
        _refuse_layout("MEGATRON_LM")
    if "DEEPSPEED" in asked and not is_deepspeed_available():
        raise ValueError("DeepSpeed must be installed, as pip install deepspeed does.")
    accelerator = Accelerator(
        # DeepSpeed's own would round the weights too
        mixed_precision="no"
        if config.precision == "fp32" or "DEEPSPEED" in asked
        else config.precision,
        # each step sums its micro-batches by itself: a launcher's setting would divide the loss
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        # batches differ in length; without this a launcher may still ask for a compiler
        dynamo_plugin=TorchDynamoPlugin(
            backend="inductor", dynamic=True, use_regional_compilation=True
        )
        if config.compile
        else None,
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
    _warn_of_idle_cores(accelerator)
    return accelerator


def is_launched_on_cpu() -> bool:
    """Whether a launcher started several processes on a machine without accelerators.

    It does not say so, and accelerate would let each work alone.
    """
    return _num_launched() > 1 and not torch.accelerator.is_available()


def _num_launched() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def leave_processes():
    """Leave the processes that a launcher started when all have come this far.

    One that ends as a member of their group may be aborted by the threads that serve it.
    """
    state = PartialState()
    state.wait_for_everyone()
    state.destroy_process_group()


def main_process_first(prepare: Callable[[], Prepared]) -> Prepared:
    """Let the main process prepare what the others then find; a refusal of one ends all of them.

    On each further machine, which may see none of it, one process comes before its others.

    Args:
        prepare: Called by every process.

    Returns:
        What it returns.

    Raises:
        Exception: What it raises, in the first process where it does.
        SystemExit: In the processes that another one's refusal ends, with status 1.
    """
    state = PartialState()
    is_first_here = state.is_local_main_process
    turns = (
        state.is_main_process,
        is_first_here and not state.is_main_process,
        not is_first_here,
    )
    return _in_turns(prepare, turns)


def together(prepare: Callable[[], Prepared]) -> Prepared:
    """Let all processes prepare at once; a refusal of one ends all of them.

    Args:
        prepare: Called by every process, and waits for none.

    Returns:
        What it returns.

    Raises:
        Exception: What it raises, in the first process where it does.
        SystemExit: In the processes that another one's refusal ends, with status 1.
    """
    return _in_turns(prepare, [True])


def _in_turns(prepare: Callable[[], Prepared], turns: Iterable[bool]) -> Prepared:
    state = PartialState()
    if state.num_processes == 1:
        return prepare()
    prepared = refusal = None
    for is_turn in turns:
        if is_turn:
            try:
                prepared = prepare()
            except Exception as error:
                refusal = error
        refused = gather_object([refusal is not None])
        if any(refused):
            # what is refused is said before
            atexit.register(leave_processes)
            # it is said once, however many found it
            raise refusal if refused.index(True) == state.process_index else SystemExit(1)
    return prepared


def refuse_disagreement(facts: Mapping[str, Any], hint: str = "") -> None:
    """Refuse processes that do not work on the same.

    Args:
        facts: What this process works on, by name.
        hint: How they would, for the error.

    Raises:
        ValueError: If another one has something else; in the main process alone, which says what.
        SystemExit: In the others, with status 1.
    """
    state = PartialState()
    if state.num_processes == 1:
        return
    seen = gather_object([dict(facts)])
    for process, other in enumerate(seen):
        for name, fact in seen[0].items():
            if other[name] == fact:
                continue
            # what is refused is said before
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
    # every process makes the weights, or reads them, by itself
    plugin.cpu_ram_efficient_loading = False
    if accelerator.mixed_precision != "no":
        # gradients are summed over processes in full precision, as they are without FSDP
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
    # what it divides by and clips at is said by the run alone
    settings["train_micro_batch_size_per_gpu"] = 1
    settings["gradient_accumulation_steps"] = 1
    settings["gradient_clipping"] = config.max_grad_norm or 0.0


def _refuse_precision(precision: str, device: torch.device):
    # on a processor, accelerate would go on in float32 without a word
    if precision == "fp16" and device.type == "cpu":
        raise ValueError("precision must be fp32 or bf16 on a CPU, got 'fp16'.")
    # torch would emulate it, more slowly than float32 is
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
            "Each process computes on %d of %d cores; OMP_NUM_THREADS=%d before the command gives "
            "it more.",
            threads,
            cores,
            cores // accelerator.num_processes,
        )


def prepare(
    accelerator: Accelerator, model: PreTrainedModel, config: TrainConfig
) -> tuple[nn.Module, Optimizer, Optimizer]:
    """Lay a model and its optimizer on the processes. Section 5.3.

    Args:
        accelerator: From `open_accelerator`.
        model: The same weights on every process; with FSDP2 it keeps a part of each.
        config: Settings of the run.

    Returns:
        The model to train, the optimizer, and the optimizer to train with.
    """
    if accelerator.is_fsdp2:
        # accelerate knows of two modules that share the embedding, and the paper has three
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
    optimizer = torch.optim.Adam(
        model.parameters(),
        lr=1.0,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )
    wrapped_model, wrapped_optimizer = accelerator.prepare(model, optimizer)
    return wrapped_model, optimizer, wrapped_optimizer


def whole_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put together what lies on several processes; all of them must ask.

    Args:
        tensors: By name, each whole or a part.

    Returns:
        All of them whole, and on the host those that were not.
    """
    return {
        name: tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor
        for name, tensor in tensors.items()
    }


def own_parts(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a process keeps of tensors that belong to a model's weights.

    Args:
        model: The model, not wrapped.
        tensors: Whole, by the name of the weight.

    Returns:
        Each as its weight lies on this process.
    """
    parameters = dict(model.named_parameters())
    return {name: _part(tensor, parameters[name]) for name, tensor in tensors.items()}


def whole_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights of a model that may lie on several processes; all of them must ask.

    Args:
        model: The model, not wrapped.

    Returns:
        Tensors by name, tied ones once, with the buffers that are saved with the model.
    """
    for module in model.modules():
        # an evaluation leaves weights put together, in the precision in which they compute
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
    """The state of an optimizer that may lie on several processes; all of them must ask.

    Args:
        accelerator: What prepared both.
        model: The model, not wrapped.
        optimizer: The optimizer, not wrapped.

    Returns:
        What the optimizer of one process alone has as its `state_dict`.
    """
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        state = optimizer.state_dict()
        whole = {index: whole_tensors(slots) for index, slots in state["state"].items()}
        return {**state, "state": whole}
    from deepspeed.utils import safe_get_full_optimizer_state

    (group,) = optimizer.param_groups
    # all weights lie one after the other in one tensor, with one count of steps
    step = optimizer.state[group["params"][0]]["step"]
    parameters = list(model.parameters())
    whole = {
        index: {
            # each its own: to count one up must not count the others
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
    wrapped_optimizer: Optimizer,
    state: Mapping[str, Any],
) -> None:
    """Put an optimizer back to where it was, each process its own part; its settings stay.

    Args:
        accelerator: What prepared them.
        model: The model, not wrapped.
        optimizer: The optimizer, not wrapped.
        wrapped_optimizer: The same, wrapped.
        state: From `whole_optimizer_state`.
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
        # its settings are those of the run as it goes on
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": parts, "param_groups": groups})
        return
    from deepspeed.utils import safe_set_full_optimizer_state

    (group,) = optimizer.param_groups
    (flat,) = group["params"]
    # before its first step an optimizer has no room for what is to be put there
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
    # every process has read all of it: none need be sent
    return distribute_tensor(
        tensor.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None
    )
