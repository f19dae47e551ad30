"""The float graphs of an export, opened: their structure, and sessions of changed copies of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir
import onnxruntime as ort
from google.protobuf.message import DecodeError
from onnx_ir.passes.common import ShapeInferencePass

from calibration.structure import Groups, Structure
from export.onnx_decoder import cpu_session
from meki_edge.errors import UserError
from meki_edge.graph_spec import GraphSpec, Part


class FloatGraphs:
    """The graphs in an export directory. What is loaded is a copy: change it as you like."""

    def __init__(self, directory: Path, spec: GraphSpec) -> None:
        self.directory, self.spec = directory, spec
        self.groups = Groups()
        self._hidden_keys: dict[str, str] = {}
        for part in self.parts():
            self.load(part)

    def parts(self) -> Iterator[Part]:
        """The parts of prefill, then those of decode."""
        for graph in self.spec.graphs.values():
            yield from graph.parts

    def load(self, part: Part) -> tuple[ir.Model, Structure]:
        """A part's graph (its weights stay in their file) and structure; another file is a :class:`UserError`."""
        path = self.directory / part.file
        try:
            model = ir.load(path, format="protobuf")
        except (OSError, DecodeError, ValueError, ir.serde.SerdeError) as error:
            what = f"the graph cannot be read ({type(error).__name__})"
            raise UserError(what, where=path, fix="export again with --force") from None
        ShapeInferencePass()(model)  # the exporter leaves some types out
        structure = Structure(model, self.groups, self._hidden_keys, self.spec.num_hidden_layers)
        structure.join_states((*part.inputs, *part.outputs))
        return model, structure


def session(model: ir.Model, folder: Path, *, prepack: bool = True) -> ort.InferenceSession:
    """As :func:`export.onnx_decoder.cpu_session`, of a model in memory, whose weights lie in ``folder``."""
    return cpu_session(ir.to_proto(model).SerializeToString(), folder, prepack=prepack)
