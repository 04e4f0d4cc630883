"""Store the weights of several ONNX graphs in one file, each weight once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WEIGHTS_FILE = "weights.bin"
# tensors with fewer elements stay in the graph
FEWEST_MOVED_ELEMENTS = 1024


def share_weights(files: Sequence[Path]):
    """Move the weights of graphs into `WEIGHTS_FILE` in the same folder.

    A weight that is used several times, also if one use is transposed, is stored once. A weight
    whose values are exact in float16, as in a checkpoint in float16, is stored in float16, and the
    graph casts it to float32. So the graphs compute the same as before.

    Args:
        files: Graphs in the same folder.
    """
    offsets: dict[tuple[np.dtype, bytes], int] = {}
    with (files[0].parent / WEIGHTS_FILE).open("wb") as weights_file:
        for file in files:
            model = onnx.load(file)
            initializers, added_nodes = [], []
            for tensor in model.graph.initializer:
                array = numpy_helper.to_array(tensor)
                if array.dtype != np.float32 or array.size < FEWEST_MOVED_ELEMENTS:
                    initializers.append(tensor)
                    continue
                with np.errstate(over="ignore"):
                    float16_array = array.astype(np.float16)
                is_exact_in_float16 = np.array_equal(float16_array, array)
                stored_array = float16_array if is_exact_in_float16 else array
                # a weight that is stored in float32 gets the same Cast, which then changes nothing
                operators = ["Cast"]
                if (stored_array.dtype, stored_array.T.tobytes()) in offsets:
                    stored_array = stored_array.T
                    # Transpose without `perm` reverses the axes
                    operators = ["Transpose", "Cast"]
                content = stored_array.tobytes()
                key = (stored_array.dtype, content)
                if key not in offsets:
                    offsets[key] = weights_file.tell()
                    weights_file.write(content)
                name = f"{tensor.name}.stored"
                initializers.append(_external_tensor(name, stored_array, offsets[key]))
                for operator in operators:
                    is_cast = operator == "Cast"
                    output_name = tensor.name if is_cast else f"{name}.T"
                    options: dict[str, Any] = {"to": TensorProto.FLOAT} if is_cast else {}
                    added_nodes.append(helper.make_node(operator, [name], [output_name], **options))
                    name = output_name
            nodes = [*added_nodes, *model.graph.node]
            for field, values in (("initializer", initializers), ("node", nodes)):
                model.graph.ClearField(field)
                getattr(model.graph, field).extend(values)
            onnx.save(model, file)


def _external_tensor(name: str, array: np.ndarray, offset: int) -> TensorProto:
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
