"""Store the weights of several ONNX graphs in one file, each weight once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WEIGHTS_FILE = "weights.bin"
# tensors with fewer elements stay in the graph
SMALLEST = 1024


def share_weights(files: Sequence[Path]):
    """Move the weights of graphs into `WEIGHTS_FILE` in the same folder.

    A weight that is used several times, also if one use is transposed, is stored once. A weight
    whose values are exact in float16, as in a checkpoint in float16, is stored in float16, and the
    graph casts it to float32. So the graphs compute the same as before.

    Args:
        files: Graphs in the same folder.
    """
    offsets: dict[tuple[np.dtype, bytes], int] = {}
    with (files[0].parent / WEIGHTS_FILE).open("wb") as weights:
        for file in files:
            program = onnx.load(file)
            kept, nodes = [], []
            for tensor in program.graph.initializer:
                array = numpy_helper.to_array(tensor)
                if array.dtype != np.float32 or array.size < SMALLEST:
                    kept.append(tensor)
                    continue
                with np.errstate(over="ignore"):
                    half = array.astype(np.float16)
                stored = half if np.array_equal(half, array) else array
                kinds = ["Cast"]
                if (stored.dtype, stored.T.tobytes()) in offsets:
                    stored = stored.T
                    # Transpose without `perm` reverses the axes
                    kinds = ["Transpose", "Cast"]
                key = (stored.dtype, stored.tobytes())
                if key not in offsets:
                    offsets[key] = weights.tell()
                    weights.write(key[1])
                name = f"{tensor.name}.stored"
                kept.append(_external(name, stored, offsets[key]))
                for kind in kinds:
                    result = tensor.name if kind == "Cast" else f"{name}.T"
                    options: dict[str, Any] = {"to": TensorProto.FLOAT} if kind == "Cast" else {}
                    nodes.append(helper.make_node(kind, [name], [result], **options))
                    name = result
            nodes.extend(program.graph.node)
            for field, values in (("initializer", kept), ("node", nodes)):
                program.graph.ClearField(field)
                getattr(program.graph, field).extend(values)
            onnx.save(program, file)


def _external(name: str, array: np.ndarray, offset: int) -> TensorProto:
    """Return a tensor whose values are stored in `WEIGHTS_FILE`."""
    tensor = TensorProto(
        name=name,
        dims=array.shape,
        data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
        data_location=TensorProto.EXTERNAL,
    )
    for key, value in (
        ("location", WEIGHTS_FILE),
        ("offset", offset),
        ("length", array.nbytes),
    ):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


__all__ = ["WEIGHTS_FILE", "share_weights"]
