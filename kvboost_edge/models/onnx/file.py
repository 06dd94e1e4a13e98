"""Reader for ONNX files that returns the graph and the byte range of each tensor.

Everything is checked against the sizes of the files. These fields of the format (onnx.proto) are
read:

    ModelProto      1 ir_version, 2 producer_name, 7 graph, 8 opset_import
    GraphProto      1 node, 5 initializer, 11 input, 12 output, 15 sparse_initializer
    NodeProto       1 input, 2 output, 3 name, 4 op_type, 5 attribute, 7 domain
    AttributeProto  1 name, 2 f, 3 i, 4 s, 5 t, 6 g, 7 floats, 8 ints, 11 graphs
    TensorProto     1 dims, 2 data_type, 4 float_data, 5 int32_data, 7 int64_data, 8 name, 9
                    raw_data, 13 external_data (1 key, 2 value), 14 data_location
    ValueInfoProto  1 name, 2 type: 1 tensor_type: 1 elem_type, 2 shape: 1 dim: 1 dim_value, 2
                    dim_param
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.host.file_memo import FileStamp
from kvboost_edge.models.onnx.protobuf import Message

__all__ = [
    "DTYPE_BITS",
    "OnnxFile",
    "OnnxModel",
    "OnnxNode",
    "OnnxTensor",
    "OnnxValue",
    "read_onnx",
]

_MAX_PROTO_BYTES = (1 << 31) - 1  # protobuf's limit; larger models store weights as external data
_MAX_NAME = 4096
_MAX_NODES = 200_000
_MAX_ITEMS = 65_536  # limit for inputs and attributes of a node, and for numbers in an attribute
_MAX_DIMS = 8
_EXTERNAL = 1
_LOCATION_BYTES = 1024

_DTYPES = {
    1: "F32",
    2: "U8",
    3: "I8",
    4: "U16",
    5: "I16",
    6: "I32",
    7: "I64",
    9: "BOOL",
    10: "F16",
    11: "F64",
    12: "U32",
    13: "U64",
    16: "BF16",
    21: "U4",
    22: "I4",
}
DTYPE_BITS = {
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "F16": 16,
    "BF16": 16,
    "I16": 16,
    "U16": 16,
    "U8": 8,
    "I8": 8,
    "BOOL": 8,
    "U4": 4,
    "I4": 4,
}
"""Bits per element, for each type whose data can be read."""


@dataclasses.dataclass(frozen=True, slots=True)
class OnnxTensor:
    """Location of a tensor.

    The data is stored in bytes [start, stop) of `path`, in little-endian order.

    Attributes:
        values: values of a small integer tensor that the file stores as numbers. The byte range of
            such a tensor is empty.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    stop: int
    values: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class OnnxNode:
    """Operator of the graph.

    An attribute is an int, float, str, list of numbers or OnnxTensor. It is None if its type is not
    supported.
    """

    index: int
    name: str
    op: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    has_graph: bool = False

    def __str__(self) -> str:
        return f"node {self.name or self.index!r} of type {self.op}"


@dataclasses.dataclass(frozen=True, slots=True)
class OnnxValue:
    """Input or output of the graph.

    Attributes:
        shape: sizes, where a name stands for an unknown size; None if the graph gives no shape.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...] | None


class OnnxFile(NamedTuple):
    """One of the files of a model.

    Attributes:
        stamp: stamp of the file when the graph was read. If the file now has another stamp, the
            byte ranges are invalid.
    """

    path: Path
    stamp: FileStamp


@dataclasses.dataclass(frozen=True, slots=True)
class OnnxModel:
    """Contents of an ONNX model without tensor data.

    Attributes:
        files: the ONNX file, then the files with external data.
    """

    path: Path
    files: tuple[OnnxFile, ...]
    opsets: Mapping[str, int]
    nodes: tuple[OnnxNode, ...]
    tensors: Mapping[str, OnnxTensor]
    inputs: Mapping[str, OnnxValue]
    outputs: Mapping[str, OnnxValue]


def read_onnx(path: Path | str) -> OnnxModel:
    """Return the contents of an ONNX file.

    Raises:
        ModelFormatError: the file is invalid; the message names the tensor or node.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            if size < 16:
                raise ModelFormatError(
                    f"{path} has {size} bytes, too few for an ONNX file; it is truncated"
                )
            if size > _MAX_PROTO_BYTES:
                raise ModelFormatError(
                    f"{path} has {size} bytes, more than protobuf's limit of {_MAX_PROTO_BYTES}; "
                    "export it again with external data"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                return _Reader(path, FileStamp.of_open(file, path), mapped).model()
    except OSError as error:
        raise ModelFormatError(f"{path} cannot be read: {error}") from error


class _Reader:
    def __init__(self, path: Path, stamp: FileStamp, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.files: dict[str, OnnxFile] = {"": OnnxFile(path, stamp)}

    def model(self) -> OnnxModel:
        whole = Message(self.data, str(self.path), 0, len(self.data), "the model")
        graph: Message | None = None
        opsets: dict[str, int] = {}
        for field in whole.fields():
            if field.number == 7:
                if graph is not None:
                    raise whole.error("contains two graphs")
                graph = whole.inner(field, "the graph")
            elif field.number == 8 and len(opsets) < _MAX_NAME:
                opsets.update(self._opset(whole.inner(field, "an opset")))
        if graph is None:
            raise whole.error("contains no graph")
        nodes: list[OnnxNode] = []
        tensors: dict[str, OnnxTensor] = {}
        inputs: dict[str, OnnxValue] = {}
        outputs: dict[str, OnnxValue] = {}
        for field in graph.fields():
            if field.number == 1:
                nodes.append(self._node(graph.inner(field, f"node {len(nodes)}"), len(nodes)))
            elif field.number == 5:
                tensor = self._tensor(graph.inner(field, f"initializer {len(tensors)}"))
                if tensor.name in tensors:
                    raise ModelFormatError(f"{self.path}: tensor {tensor.name!r} appears twice")
                tensors[tensor.name] = tensor
            elif field.number in (11, 12):
                value = self._value(graph.inner(field, "an input or output"))
                (inputs if field.number == 11 else outputs)[value.name] = value
            elif field.number == 15:
                raise ModelFormatError(
                    f"{self.path} contains sparse tensors, which are not supported"
                )
            if max(len(nodes), len(tensors), len(inputs), len(outputs)) > _MAX_NODES:
                raise graph.error(
                    f"contains more than {_MAX_NODES} nodes, tensors, inputs or outputs"
                )
        for name in tensors:
            inputs.pop(name, None)  # in older files, the inputs include the weights
        return OnnxModel(
            self.path,
            tuple(self.files.values()),
            opsets,
            tuple(nodes),
            MappingProxyType(tensors),
            inputs,
            outputs,
        )

    def _opset(self, message: Message) -> dict[str, int]:
        domain = ""
        version = 0
        for field in message.fields():
            if field.number == 1:
                domain = message.text(field, _MAX_NAME)
            elif field.number == 2:
                version = message.number(field)
        return {domain: version}

    def _node(self, message: Message, index: int) -> OnnxNode:
        texts = {3: "", 4: "", 7: ""}
        inputs: list[str] = []
        outputs: list[str] = []
        attributes: dict[str, Any] = {}
        has_graph = False
        for field in message.fields():
            if field.number in texts:
                texts[field.number] = message.text(field, _MAX_NAME)
            elif field.number in (1, 2):
                (inputs if field.number == 1 else outputs).append(message.text(field, _MAX_NAME))
            elif field.number == 5:
                name, value, is_graph = self._attribute(
                    message.inner(field, f"an attribute of node {index}")
                )
                attributes[name] = value
                has_graph |= is_graph
            if max(len(inputs), len(outputs), len(attributes)) > _MAX_ITEMS:
                raise message.error(
                    f"contains more than {_MAX_ITEMS} inputs, outputs or attributes"
                )
        domain = "" if texts[7] == "ai.onnx" else texts[7]
        return OnnxNode(
            index, texts[3], texts[4], domain, tuple(inputs), tuple(outputs), attributes, has_graph
        )

    def _attribute(self, message: Message) -> tuple[str, Any, bool]:
        name = ""
        has_graph = False
        value: Any = None
        many: list[Any] = []
        for field in message.fields():
            if field.number == 1:
                name = message.text(field, _MAX_NAME)
            elif field.number == 2:
                value = message.real(field)
            elif field.number == 3:
                value = message.number(field)
            elif field.number == 4 and field.stop - field.start <= _MAX_NAME:
                value = message.text(field, _MAX_NAME)
            elif field.number == 5:
                value = self._tensor(message.inner(field, f"the tensor of attribute {name!r}"))
            elif field.number == 7:
                many += message.reals(field, _MAX_ITEMS)
            elif field.number == 8:
                many += message.numbers(field, _MAX_ITEMS)
            elif field.number in (6, 11):
                has_graph = True
            if len(many) > _MAX_ITEMS:
                raise message.error(f"contains more than {_MAX_ITEMS} numbers")
        return name, many or value, has_graph

    def _tensor(self, message: Message) -> OnnxTensor:
        name = ""
        number = 0
        location = 0
        dims: list[int] = []
        raw: tuple[int, int] | None = None
        values: list[int] | None = None
        external: dict[str, str] = {}
        for field in message.fields():
            if field.number == 1:
                dims += message.numbers(field, _MAX_DIMS)
                if len(dims) > _MAX_DIMS:
                    raise message.error(f"has more than {_MAX_DIMS} dimensions")
            elif field.number == 2:
                number = message.number(field)
            elif field.number == 8:
                name = message.text(field, _MAX_NAME)
            elif field.number == 9 or (field.number == 4 and number == 1 and field.wire == 2):
                inner = message.inner(field, "the data")
                raw = (inner.start, inner.stop)  # packed floats have the same bytes as raw data
            elif field.number in (5, 7):
                values = (values or []) + message.numbers(field, _MAX_ITEMS)
            elif field.number == 13:
                external.update(self._entry(message.inner(field, "the external data")))
            elif field.number == 14:
                location = message.number(field)
        dtype = _DTYPES.get(number, f"type {number}")
        what = f"{self.path}: tensor {name!r}"
        if any(size < 0 for size in dims) or math.prod(dims) >= 1 << 62:
            raise ModelFormatError(f"{what} has invalid shape {tuple(dims)}")
        needed = -(-math.prod(dims) * DTYPE_BITS[dtype] // 8) if dtype in DTYPE_BITS else None
        if location == _EXTERNAL:
            path, start, stop = self._external(what, external, needed)
        elif location:
            raise ModelFormatError(f"{what} has data_location={location}, which is not supported")
        elif raw is None and values is not None:
            if len(values) != math.prod(dims):
                raise ModelFormatError(
                    f"{what} contains {len(values)} numbers, which do not fit its shape "
                    f"{tuple(dims)}"
                )
            return OnnxTensor(name, dtype, tuple(dims), self.path, 0, 0, tuple(values))
        else:
            path = self.path
            (start, stop) = raw or (0, 0)
        if needed is not None and stop - start != needed:
            raise ModelFormatError(
                f"{what} of type {dtype} and shape {tuple(dims)} needs {needed} bytes, but "
                f"{stop - start} are stored"
            )
        return OnnxTensor(name, dtype, tuple(dims), path, start, stop)

    def _entry(self, message: Message) -> dict[str, str]:
        texts = {1: "", 2: ""}
        for field in message.fields():
            if field.number in texts:
                texts[field.number] = message.text(field, _LOCATION_BYTES)
        return {texts[1]: texts[2]}

    def _external(
        self, what: str, fields: Mapping[str, str], needed: int | None
    ) -> tuple[Path, int, int]:
        """Return the file and the byte range of an external tensor.

        The file must be in the directory of the model.
        """
        location = fields.get("location", "")
        if not location or location in (".", "..") or any(char in location for char in "/\\:\0"):
            raise ModelFormatError(
                f"{what} is stored in {location!r}; external data must be in the model's "
                "directory, named without a path"
            )
        if location not in self.files:
            if len(self.files) > _MAX_NAME:
                raise ModelFormatError(
                    f"{self.path} names more than {_MAX_NAME} files of external data"
                )
            path = self.path.parent / location
            if not path.is_file():
                raise ModelFormatError(
                    f"{what} is stored in {path}, which is missing; download this file as well"
                )
            self.files[location] = OnnxFile(path, FileStamp.of(path))
        size = self.files[location].stamp.size
        start = self._size(what, fields.get("offset", "0"), "offset")
        length = fields.get("length")
        left = size - start if needed is None else needed
        count = left if length is None else self._size(what, length, "length")
        if start + count > size:
            raise ModelFormatError(
                f"{what} is stored at bytes {start} to {start + count} of {location}, which has "
                f"{size} bytes; that file is truncated or belongs to another model"
            )
        return self.path.parent / location, start, start + count

    @staticmethod
    def _size(what: str, text: str, key: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            raise ModelFormatError(
                f"{what} has external data {key}={text!r:.40}, which is not a valid size"
            )
        return int(text)

    def _value(self, message: Message) -> OnnxValue:
        name = ""
        dtype = ""
        shape: tuple[int | str, ...] | None = None
        for field in message.fields():
            if field.number == 1:
                name = message.text(field, _MAX_NAME)
            elif field.number == 2:
                kind = message.inner(field, "a type")
                for part in kind.fields():
                    if part.number == 1:
                        dtype, shape = self._tensor_type(kind.inner(part, "a tensor's type"))
        return OnnxValue(name, dtype, shape)

    def _tensor_type(self, message: Message) -> tuple[str, tuple[int | str, ...] | None]:
        dtype = ""
        shape: tuple[int | str, ...] | None = None
        for field in message.fields():
            if field.number == 1:
                number = message.number(field)
                dtype = _DTYPES.get(number, f"type {number}")
            elif field.number == 2:
                inner = message.inner(field, "a shape")
                sizes: list[int | str] = []
                for part in inner.fields():
                    if part.number == 1:
                        sizes.append(self._dimension(inner.inner(part, "a dimension")))
                    if len(sizes) > _MAX_DIMS:
                        raise inner.error(f"has more than {_MAX_DIMS} dimensions")
                shape = tuple(sizes)
        return dtype, shape

    @staticmethod
    def _dimension(message: Message) -> int | str:
        size: int | str = ""
        for field in message.fields():
            if field.number == 1:
                size = message.number(field)
            elif field.number == 2:
                size = message.text(field, _MAX_NAME)
        return size
