"""Stand-in for a GPU that computes on the CPU and refuses what a GPU would refuse.

`python tests/stand_in_device.py` searches and trains on it and on the CPU, and prints the results
and how often the host waited for the device. torch allows only one device in Python per process, so
this is a separate process.
"""

import copy
import json
from collections import Counter

import torch
from fake_graphs import FakeGraphs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)
from train_toys import toy_model

from vanilla_transformer import engine_checks_vanilla_transformer as engine_checks
from vanilla_transformer import engine_vanilla_transformer as engine
from vanilla_transformer import identity_vanilla_transformer as identity
from vanilla_transformer.train.devices.cpu_kernels import use_cheap_dropout
from vanilla_transformer.train.devices.fused_loss import fused_loss_sum

NAME = "standin"
# operators that accept tensors of two devices on a GPU too
TAKES_BOTH = ("aten::copy_", "aten::_to_copy")
TAKES_INDICES = ("aten::index", "aten::index_put", "aten::index_put_")
WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")
PAPER = {"num_beams": 4, "length_penalty_alpha": 0.6, "max_extra_tokens": 9}
SEARCHES = {
    "greedy": {"num_beams": 1, "max_extra_tokens": 9},
    "beam": PAPER,
    "processed": {"num_beams": 3, "length_penalty_alpha": 1.0, "no_repeat_ngram_size": 2},
    "suppressed": {**PAPER, "min_new_tokens": 8, "suppress_tokens": [5, 6]},
    "greedy suppressed": {"num_beams": 1, "min_new_tokens": 8, "suppress_tokens": [5, 6]},
}

waits, copies = Counter(), Counter()


class OnDevice(Tensor):
    """A tensor of the device.

    Args:
        inner: Its numbers.
    """

    @staticmethod
    def __new__(cls, inner: Tensor):
        return Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )

    def __init__(self, inner: Tensor):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, operator, types, arguments=(), options=None):
        return compute(operator, arguments, options or {})

    def tolist(self) -> list:
        """Read a number on the host.

        Returns:
            The numbers.
        """
        waits["tolist"] += 1
        return self.inner.tolist()


class Device(TorchDispatchMode):
    """Allow tensors on the device within this context."""

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        return compute(operator, arguments, options or {})


def compute(operator, arguments: tuple, options: dict):
    """Run operations of the device on the CPU.

    Args:
        operator: Operator of torch.
        arguments: Tensors of either device, and others.
        options: The same.

    Returns:
        Tensors of the device, where the arguments are or where the options say so.

    Raises:
        RuntimeError: If it takes tensors of both.
    """
    tensors = [part for part in tree_leaves((arguments, options)) if isinstance(part, Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
    name = operator._schema.name
    # numbers without dimensions may come from anywhere
    is_mixed = any(tensor.dim() for tensor in tensors if not isinstance(tensor, OnDevice))
    is_here = bool(ours)
    if options.get("device") is not None:
        is_here = torch.device(options["device"]).type == NAME
        options = {**options, "device": torch.device("cpu")}
    elif ours and is_mixed and name not in TAKES_BOTH:
        raise RuntimeError(f"{operator} takes tensors of one device, got two.")
    # the host counts what a mask selects
    by_mask = name in TAKES_INDICES and any(
        isinstance(index, Tensor) and index.dtype == torch.bool for index in arguments[1]
    )
    if ours and (name in WAITS or by_mask):
        waits[name] += 1
    inner = tree_map(
        lambda part: part.inner if isinstance(part, OnDevice) else part, (arguments, options)
    )
    results = operator(*inner[0], **inner[1])
    if not is_here:
        return results
    known = {id(tensor.inner): tensor for tensor in ours}

    def wrapped(part):
        if not isinstance(part, Tensor):
            return part
        return known[id(part)] if id(part) in known else OnDevice(part)

    return tree_map(wrapped, results)


def open_device(library: torch.library.Library):
    """Register the device with torch, and the copies from host to device.

    Args:
        library: Knows of it as long as it is kept.
    """

    class Module(_DummyBackendModule):
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16]

    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())

    def empty_strided(size, stride, dtype=None, **_) -> OnDevice:
        return OnDevice(torch.empty_strided(size, stride, dtype=dtype))

    def copy_from(source: Tensor, target: OnDevice, _: bool = False) -> Tensor:
        copies["from the host"] += 1
        target.inner.copy_(source)
        return target

    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")


def search(model, inputs: dict[str, Tensor], **more) -> dict[str, dict]:
    """Translate, once to build the engine and once more to count.

    Args:
        model: A model on either device.
        inputs: Its inputs, on the same device.
        more: Further settings of the search.

    Returns:
        For each search the translations, and how often the host waited.
    """
    results = {}
    for name, settings in SEARCHES.items():
        model.generate(**inputs, **settings, **more)
        waits.clear()
        ids = model.generate(**inputs, **settings, **more)
        waited = sum(waits.values())
        results[name] = {"ids": ids.tolist(), "waited": waited}
    return results


def search_with_graphs(model, inputs: dict[str, Tensor]) -> dict:
    """Translate with recorded steps.

    Args:
        model: A model on the device.
        inputs: Its inputs.

    Returns:
        The results of `search`, the number of graphs, and how often the work in them waited for the
        device or copied from the host, which a graph cannot.
    """
    graphs, impossible = FakeGraphs(), Counter()

    def captured(compute, device):
        def watched():
            before = waits + copies
            compute()
            impossible.update((waits + copies) - before)

        return graphs(watched, device)

    # the engine of the searches before captures nothing
    original = engine.CAPTURING_DEVICES, engine.captured
    engine.CAPTURING_DEVICES, engine.captured = (NAME,), captured
    found = search(model, inputs)
    engine.CAPTURING_DEVICES, engine.captured = original
    return {**found, "graphs": graphs.num_graphs, "impossible": dict(impossible)}


def train(model, inputs: dict[str, Tensor]) -> dict:
    """Compute a loss and its gradient.

    Args:
        model: On either device.
        inputs: On the same.

    Returns:
        The loss, the gradient's norm for each weight, and how often the host waited before.
    """
    model.train()
    use_cheap_dropout(model)
    target = inputs["input_ids"].roll(1, dims=1)
    label_indices = torch.arange(target.numel(), device=target.device)[2:]
    mask = inputs["attention_mask"].bool()[:, None, None]
    waits.clear()
    loss = fused_loss_sum(model, inputs["input_ids"], target, target, label_indices, 0.1, mask)
    loss.backward()
    waited = sum(waits.values())
    norms = {name: weight.grad.norm().item() for name, weight in model.named_parameters()}
    return {"loss": loss.item(), "norms": norms, "waited": waited}


def main():
    """Run the same computation on CPU and device, and print the results."""
    model = toy_model(dropout=0.0).eval()
    for name, parameter in model.named_parameters():
        if "_proj.weight" in name or "embed_tokens" in name:
            parameter.data.normal_(std=0.3)
    generator = torch.Generator().manual_seed(5)
    source = torch.randint(4, model.config.vocab_size, (5, 9), generator=generator)
    mask = (torch.arange(9) < torch.tensor([9, 7, 2, 9, 4])[:, None]).long()
    inputs = {"input_ids": source.masked_fill(mask == 0, 0), "attention_mask": mask}
    # torch asks how many devices there are before it first goes backward
    with torch.library._scoped_library("aten", "IMPL") as library:
        open_device(library)
        # translations on the CPU by the modules of the model
        expected = search(model, inputs, engine="off")
        expected["training"] = train(copy.deepcopy(model), inputs)
        with Device():
            model.to(NAME)
            # weights come there one by one
            model.tie_weights()
            inputs = {name: tensor.to(NAME) for name, tensor in inputs.items()}
            # the mode of this stand-in turns the engine off
            identity._get_current_dispatch_mode_stack = list
            # they are no plain ones, as a GPU's are: all else is asked
            engine_checks.nn.Parameter = OnDevice
            found = {"refusal": engine_checks.reason_against_engine(model), **search(model, inputs)}
            found["captured"] = search_with_graphs(model, inputs)
            found["training"] = train(copy.deepcopy(model), inputs)
            # otherwise torch changes the dtype of a weight, and the numbers behind it stay
            torch.__future__.set_overwrite_module_params_on_conversion(True)
            for dtype_name in ("float16", "bfloat16"):
                half_model = copy.deepcopy(model).to(getattr(torch, dtype_name))
                half_model.tie_weights()
                weight = half_model.lm_head.weight
                assert weight.inner.dtype == weight.dtype == half_model.dtype
                found[dtype_name] = search(half_model, inputs)
    print(json.dumps({"expected": expected, "found": found}))


if __name__ == "__main__":
    main()
