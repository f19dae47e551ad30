"""The float graphs of an export, opened: their structure, and sessions of changed copies of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir
import onnxruntime as ort
from google.protobuf.message import DecodeError
from onnx_ir.passes.common import ShapeInferencePass

from calibration.structure import Groups, Structure
from meki_edge.errors import UserError
from meki_edge.graph_spec import Graph, GraphSpec, Part


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


def session(model: ir.Model | Path, folder: Path, *, prepack: bool = True) -> ort.InferenceSession:
    """A CPU session of ``model``, whose external data lies in ``folder``.

    Q/DQ pairs are computed as they stand, in float32, never fused into integer kernels: this is the
    oracle of what the quantized graph means. Without ``prepack`` the weights stay where they are
    mapped from instead of being copied into another layout.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3  # errors only
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    options.add_session_config_entry("session.disable_prepacking", "0" if prepack else "1")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    source = model if isinstance(model, Path) else ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def sessions(directory: Path, graph: Graph, *, prepack: bool) -> list[ort.InferenceSession]:
    """The sessions of a graph's parts, whose files lie in ``directory``."""
    return [session(directory / part.file, directory, prepack=prepack) for part in graph.parts]
