"""What QNN's error numbers mean, and what helped others.

Names and numbers are those of Qualcomm's public headers (QnnCommon.h, QnnContext.h, QnnGraph.h,
QnnDevice.h: a component's errors start at 1000, 5000, 6000 and 14000); each remedy says where it
comes from.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NEAR = re.compile(r"(?:qnn|htp|context|graph|device|skel|transport|fastrpc|binary)", re.IGNORECASE)
_CODE = re.compile(r"(?:error|err|code|status)\D{0,12}(\d{4,5})\b", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class QnnError:
    """One error: its name, what it says, what to do, and the source of that advice."""

    code: int
    name: str
    meaning: str
    fix: str
    source: str


_VERSION = "use QNN libraries at least as new as those that compiled the binary, and the binary of this very chip"
_SPLIT = "split the model into smaller parts (`meki-edge export --parts`) or use a shorter --context-length"
_HEADER = "the header's comment"

ERRORS = {
    error.code: error
    for error in (
        QnnError(
            code=1000,
            name="QNN_COMMON_ERROR_NOT_SUPPORTED",
            meaning="a feature that this backend does not have was asked for",
            fix=_VERSION,
            source=_HEADER,
        ),
        QnnError(
            code=1002,
            name="QNN_COMMON_ERROR_MEM_ALLOC",
            meaning="memory could not be had: most often the weights cannot be mapped to the NPU",
            fix=_SPLIT,
            source="github.com/pytorch/executorch issues 4517 and 18862 (a large buffer cannot be mapped)",
        ),
        QnnError(
            code=1003,
            name="QNN_COMMON_ERROR_SYSTEM",
            meaning="a service of the phone failed, often after the NPU's own process crashed",
            fix="look for a crash of cdsp in the log, restart the phone, and check the graph's inputs",
            source=_HEADER,
        ),
        QnnError(
            code=1007,
            name="QNN_COMMON_ERROR_SYSTEM_COMMUNICATION",
            meaning="the connection to the NPU's process broke",
            fix="run it again; if it stays, restart the phone",
            source=_HEADER,
        ),
        QnnError(
            code=1008,
            name="QNN_COMMON_ERROR_INCOMPATIBLE_BINARIES",
            meaning="QNN's libraries are of different versions",
            fix="take all of QNN's libraries from one package, and sideload again",
            source=_HEADER,
        ),
        QnnError(
            code=4000,
            name="transport (no public name)",
            meaning="the skeleton library could not be loaded onto the NPU",
            fix="sideload again with QNN_SDK_ROOT set: the NPU needs libQnnHtpV…Skel.so of this very chip",
            source="github.com/UbiquitousLearning/mllm issue 134",
        ),
        QnnError(
            code=5000,
            name="QNN_CONTEXT_ERROR_INVALID_ARGUMENT",
            meaning="the binary does not suit this runtime or this chip",
            fix=_VERSION,
            source="github.com/qualcomm/ai-hub-apps issue 148 (a maintainer's answer)",
        ),
        QnnError(
            code=5004,
            name="QNN_CONTEXT_ERROR_BINARY_VERSION",
            meaning="the binary was made by a version of QNN that this runtime cannot read",
            fix=_VERSION,
            source=_HEADER,
        ),
        QnnError(
            code=5005,
            name="QNN_CONTEXT_ERROR_CREATE_FROM_BINARY",
            meaning="the binary could not be loaded: for another chip, with more VTCM, or too large for the NPU",
            fix=f"compile for this chip; else {_SPLIT}",
            source="github.com/qualcomm/ai-hub-models issues 192 and 289 (VTCM made smaller)",
        ),
        QnnError(
            code=5008,
            name="QNN_CONTEXT_ERROR_BINARY_CONFIGURATION",
            meaning="the binary's configuration is not valid here",
            fix=_VERSION,
            source=_HEADER,
        ),
        QnnError(
            code=5011,
            name="QNN_CONTEXT_ERROR_BINARY_SUBOPTIMAL",
            meaning="the binary would run, but was made for a smaller chip",
            fix="run `meki-edge compile` with this phone's --chipset",
            source=_HEADER,
        ),
        QnnError(
            code=6000,
            name="QNN_GRAPH_ERROR_INVALID_ARGUMENT",
            meaning="the graph got inputs that it was not made for",
            fix="check that graph_spec.json and the binary come from the same export; sideload the bundle again",
            source=_HEADER,
        ),
        QnnError(
            code=6001,
            name="QNN_GRAPH_ERROR_INVALID_HANDLE",
            meaning="the graph is gone, most often since the NPU's process crashed before",
            fix="look for a crash of cdsp in the log; compile to a context binary instead of at run time",
            source="github.com/microsoft/onnxruntime issue 25335",
        ),
        QnnError(
            code=6022,
            name="QNN_GRAPH_ERROR_FINALIZE_FAILED",
            meaning="the graph could not be prepared for the NPU",
            fix="compile it offline with `meki-edge compile`, whose log names the operator",
            source="github.com/microsoft/onnxruntime issue 22369",
        ),
        QnnError(
            code=6031,
            name="QNN_GRAPH_ERROR_ABORTED",
            meaning="the run was aborted on the NPU",
            fix="run it again with a cool phone; if it stays, an operator fails on this chip: look for it in the "
            "simulator (`meki-edge compile --verify-steps`)",
            source="ONNX Runtime's tests of the QNN provider name it for a Pad operator in reflect mode",
        ),
        QnnError(
            code=6033,
            name="QNN_GRAPH_ERROR_TIMED_OUT",
            meaning="the run took longer than allowed",
            fix="run it again with a cool phone and nothing else on the NPU",
            source=_HEADER,
        ),
        QnnError(
            code=14001,
            name="QNN_DEVICE_ERROR_INVALID_CONFIG",
            meaning="the NPU could not be opened: the skeleton library is missing or of another chip or version",
            fix="sideload again with QNN_SDK_ROOT set; libQnnHtpV…Skel.so lies in the SDK's lib/hexagon-v…/unsigned",
            source="github.com/UbiquitousLearning/mllm issue 134; the notes on QNN of github.com/alibaba/MNN",
        ),
        QnnError(
            code=14002,
            name="QNN_DEVICE_ERROR_HARDWARE_UNAVAILABLE",
            meaning="this phone's NPU cannot be used",
            fix="check the chip, or that the phone's maker lets programs use the NPU",
            source=_HEADER,
        ),
        QnnError(
            code=30010,
            name="(ExecuTorch's, while it reads a context binary)",
            meaning="the file is no context binary of QNN",
            fix="pack and sideload the bundle again",
            source="github.com/pytorch/executorch issue 6820",
        ),
    )
}


def explain(text: str) -> QnnError | None:
    """The last error of QNN that a log names, by number or by name; None if there is none that is known."""
    for line in reversed(text.splitlines()):
        for error in ERRORS.values():
            if error.name.startswith("QNN_") and error.name in line:
                return error
        if _NEAR.search(line):
            for number in reversed(_CODE.findall(line)):
                if int(number) in ERRORS:
                    return ERRORS[int(number)]
    return None
