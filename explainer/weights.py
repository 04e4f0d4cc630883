"""Store the weights of several ONNX graphs in one file, each weight once."""

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

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
    with (files[0].parent / WEIGHTS_FILE).open("wb") as weights_file:
        store = _WeightStore(weights_file)
        for file in files:
            model = onnx.load(file)
            initializers, added_nodes = [], []
            for tensor in model.graph.initializer:
                array = numpy_helper.to_array(tensor)
                if array.dtype != np.float32 or array.size < FEWEST_MOVED_ELEMENTS:
                    initializers.append(tensor)
                    continue
                stored_tensor, is_transposed = store.add(f"{tensor.name}.stored", array)
                initializers.append(stored_tensor)
                added_nodes += _restoring_nodes(stored_tensor.name, tensor.name, is_transposed)
            nodes = [*added_nodes, *model.graph.node]
            for field, values in (("initializer", initializers), ("node", nodes)):
                model.graph.ClearField(field)
                getattr(model.graph, field).extend(values)
            onnx.save(model, file)


class _WeightStore:
    """Weights in a file, each once.

    Args:
        file: File that weights are appended to.
    """

    def __init__(self, file: BinaryIO):
        self._file = file
        self._offsets: dict[tuple[np.dtype, bytes], int] = {}

    def add(self, name: str, array: np.ndarray) -> tuple[TensorProto, bool]:
        """Store a weight if the file does not have it yet.

        Args:
            name: Name of the tensor.
            array: Weight in float32.

        Returns:
            A tensor whose values are in the file, and whether it is the transposed weight.
        """
        with np.errstate(over="ignore"):
            float16_array = array.astype(np.float16)
        stored_array = float16_array if np.array_equal(float16_array, array) else array
        is_transposed = (stored_array.dtype, stored_array.T.tobytes()) in self._offsets
        if is_transposed:
            stored_array = stored_array.T
        content = stored_array.tobytes()
        key = (stored_array.dtype, content)
        if key not in self._offsets:
            self._offsets[key] = self._file.tell()
            self._file.write(content)
        return _external_tensor(name, stored_array, self._offsets[key]), is_transposed


def _restoring_nodes(stored_name: str, name: str, is_transposed: bool) -> list[NodeProto]:
    """Return the nodes that make the weight `name` in float32 of a stored tensor."""
    nodes = []
    if is_transposed:
        # without `perm` the axes are reversed
        nodes.append(helper.make_node("Transpose", [stored_name], [f"{stored_name}.T"]))
        stored_name = f"{stored_name}.T"
    # a tensor in float32 gets the same Cast, which then changes nothing
    return [*nodes, helper.make_node("Cast", [stored_name], [name], to=TensorProto.FLOAT)]


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
