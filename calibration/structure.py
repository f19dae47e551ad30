"""What calibration needs to know of a graph: which tensors are one, and which layer a node is of.

Prefill and decode are traced apart, so the same activation can have another name in each. Here a
tensor's *key* says how it is computed (operator, keys of its inputs, down to graph inputs and
weights), so equal keys mean the same activation, whatever the number of tokens. Tensors that only
move data around (reshape, split, concatenation, and the cache between two calls) form *groups*
that share one quantization, as the NPU wants it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from hashlib import blake2s

import numpy as np
import onnx_ir as ir

from meki_edge.graph_spec import TensorSpec

MOVES = frozenset({"Concat", "Expand", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators that only move data, so that what comes out has the quantization of what goes in."""
STATES = (("past_key", "present_key"), ("past_value", "present_value"), ("memory_state", "present_memory_state"))
"""Roles of what the host keeps: an output of one call is the input of the next."""
SHARED = -1
"""The unit of what serves all layers: the mask, and the split of a token's rows."""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class Groups:
    """Keys that share one quantization (a disjoint-set forest over all graphs of a model)."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def join(self, first: str, second: str) -> None:
        """Put two keys into one group."""
        roots = sorted((self.of(first), self.of(second)))
        self._parent[roots[1]] = roots[0]

    def of(self, key: str) -> str:
        """The key that stands for the group of ``key``."""
        while (parent := self._parent.get(key, key)) != key:
            self._parent[key] = self._parent.get(parent, parent)
            key = parent
        return key


class Structure:
    """The tensors and nodes of one graph.

    Args:
        model: the float graph. Not changed.
        groups: of all graphs of the model; this graph's are added.
        hidden_keys: the keys of ``hidden`` tensors of earlier parts, by name; this part's are added.
        num_layers: decoder layers of the model; the head is the unit of that number.
    """

    def __init__(self, model: ir.Model, groups: Groups, hidden_keys: dict[str, str], num_layers: int) -> None:
        self.groups = groups
        self.keys: dict[str, str] = {}
        """Value name → key, of every float value but the initializers'."""
        self._units: dict[str, int] = {}
        self._initializers: dict[str, str] = {}
        for name, value in model.graph.initializers.items():
            self._initializers[name] = _initializer_key(name, value)
        units: dict[ir.Value, int] = {}
        for value in model.graph.inputs:
            self.keys[value.name] = hidden_keys.get(value.name, f"input {value.name}")
        for node in model.graph:
            self._visit(node)
            unit = self._unit(node, units, num_layers)
            self._units[node.outputs[0].name] = unit
            units |= dict.fromkeys(node.outputs, unit)
        for value in model.graph.outputs:
            hidden_keys.setdefault(value.name, self.keys[value.name])

    def unit(self, node: ir.Node) -> int:
        """The decoder layer of ``node``, the number of layers for the head, or ``SHARED``."""
        return self._units[node.outputs[0].name]

    def join_states(self, tensors: Iterable[TensorSpec]) -> None:
        """Put what goes out of one call and into the next into one group."""
        by_place = {(tensor.role, tensor.index): tensor for tensor in tensors}
        for past, present in STATES:
            for (role, index), tensor in by_place.items():
                if role == past and (present, index) in by_place:
                    self.groups.join(self.keys[tensor.name], self.keys[by_place[present, index].name])

    def _visit(self, node: ir.Node) -> None:
        floats = [value for value in node.inputs if value is not None and is_float(value)]
        keys = [self._key(value) for value in floats]
        moves = node.op_type in MOVES
        for index, value in enumerate(node.outputs):
            if not is_float(value):
                continue
            if node.op_type == "Concat" and len(set(keys)) == 1:
                key = keys[0]  # the mask repeated for the query heads of a key/value head
            else:
                text = f"{node.domain} {node.op_type} {' '.join(keys)} {index}"
                key = blake2s(text.encode(), digest_size=12).hexdigest()
            self.keys[value.name] = key
            if moves:
                for source in keys:
                    self.groups.join(key, source)

    def _key(self, value: ir.Value) -> str:
        return self._initializers.get(value.name) or self.keys[value.name]

    def _unit(self, node: ir.Node, units: dict[ir.Value, int], num_layers: int) -> int:
        owners = [units.get(value, SHARED) for value in node.inputs if value is not None]
        for value in node.inputs:
            if value is not None and value.name in self._initializers and value.const_value is not None:
                owners.extend(_owner(value.name, num_layers))
        return max(owners, default=SHARED)


def is_float(value: ir.Value) -> bool:
    """Whether ``value`` holds reals (and not shapes, axes or indices)."""
    return value.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16)


def is_weight(value: ir.Value) -> bool:
    """Whether ``value`` is a weight that comes from the checkpoint."""
    return value.is_initializer() and isinstance(value.const_value, ir.ExternalTensor)


def _owner(name: str, num_layers: int) -> Iterator[int]:
    found = _LAYER.search(name)
    if found:
        yield int(found[1])
    elif name.endswith(".weight"):  # the final norm and the head
        yield num_layers


def _initializer_key(name: str, value: ir.Value) -> str:
    """Weights by name, small constants by value: each trace numbers its constants anew."""
    if is_weight(value) or not is_float(value):
        return f"weight {name}"
    array = np.ascontiguousarray(value.const_value.numpy(), np.float32)
    return f"constant {array.shape} {blake2s(array.tobytes(), digest_size=12).hexdigest()}"
