"""What parameter servers, workers and the coordinator say to each other, and how it stands on the wire.

One frame a message; never a pickle:

    0   4 bytes   magic "MWPS"
    4   u16       version of the protocol
    6   u32       bytes of the header
    10  u64       bytes of all tensors
    18            header: one JSON object {"kind": ..., "fields": {...}, "tensors": [[dtype, elements], ...]}
                  tensors: raw little-endian elements, one after the other

Numbers are big-endian. The first frame of a connection is a ``hello``; until it has been accepted, frames are small
and carry no tensors, so a stranger can make us hold nothing.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import MeshwrightError

MAGIC = b"MWPS"
VERSION = 2
PREFIX = struct.Struct("!4sHIQ")

STRANGER_HEADER_BYTES = 4096
"""Most bytes of a header before the peer is known."""
HEADER_BYTES = 16 * 2**20
"""Most bytes of any header."""
TENSOR_BYTES = 1 << 40
"""Most bytes of the tensors of one message; more is a broken header."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class ProtocolError(MeshwrightError):
    """A peer said what it may not; the connection is closed and nothing of it was applied."""


class Refused(ProtocolError):
    """The other side would not have us; the message is its sentence."""

    exit_code = 2


@dataclass
class Message:
    """One message: its kind, JSON fields, and flat tensors on the host."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    tensors: Sequence[Tensor] = ()

    def __getitem__(self, key: str) -> Any:
        """A field.

        Raises:
            ProtocolError: it is missing.
        """
        try:
            return self.fields[key]
        except KeyError:
            raise ProtocolError(f"message {self.kind!r} has no field {key!r}") from None

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


def handler_of(machine: object, who: str, sender: str, message: Message) -> Callable[[str, Message], Any]:
    """The method of ``machine`` for this kind of message: ``_on_new_view`` takes ``new-view``.

    Raises:
        ProtocolError: ``who`` has none.
    """
    handler: Callable[[str, Message], Any] | None = getattr(machine, f"_on_{message.kind.replace('-', '_')}", None)
    if handler is None:
        raise ProtocolError(f"{sender} sent {message.kind!r}, which {who} does not know")
    return handler


def encode(message: Message) -> list[memoryview]:
    """The frame of a message as buffers to send one after the other; tensors are not copied."""
    described = [[_NAMES[tensor.dtype], tensor.numel()] for tensor in message.tensors]
    text = {"kind": message.kind, "fields": message.fields, "tensors": described}
    header = json.dumps(text, separators=(",", ":")).encode()
    if len(header) > HEADER_BYTES:
        raise ProtocolError(f"header of {message.kind!r} has {len(header)} bytes; at most {HEADER_BYTES} are legal")
    prefix = PREFIX.pack(MAGIC, VERSION, len(header), message.tensor_bytes)
    return [memoryview(prefix + header), *(_bytes(tensor) for tensor in message.tensors if tensor.numel())]


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def decode(receive: Callable[[memoryview], None], *, stranger: bool = False) -> Message:
    """Read one frame.

    Args:
        receive: fills a buffer from the connection.
        stranger: the peer has not been accepted yet.

    Raises:
        ProtocolError: it is not a frame of this version, or it is too large.
        EOFError: from ``receive``, when the connection ends.
    """
    prefix = bytearray(PREFIX.size)
    receive(memoryview(prefix))
    magic, version, header_bytes, tensor_bytes = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise ProtocolError("the peer does not speak the parameter servers' protocol; check the address")
    if version != VERSION:
        raise ProtocolError(
            f"the peer speaks version {version} of the parameter servers' protocol, this side version {VERSION}; "
            "use the same meshwright on both"
        )
    if header_bytes > (STRANGER_HEADER_BYTES if stranger else HEADER_BYTES):
        raise ProtocolError(f"a header of {header_bytes} bytes is too long")
    if tensor_bytes > (0 if stranger else TENSOR_BYTES):
        raise ProtocolError(f"{tensor_bytes} bytes of tensors are too many")
    text = bytearray(header_bytes)
    receive(memoryview(text))
    kind, fields, described = _parsed(bytes(text))
    if tensor_bytes != sum(elements * dtype.itemsize for dtype, elements in described):
        raise ProtocolError(f"message {kind!r} announces {tensor_bytes} bytes of tensors but describes others")
    tensors = []
    for dtype, elements in described:
        tensor = torch.empty(elements, dtype=dtype)
        if elements:
            receive(_bytes(tensor))
        tensors.append(tensor)
    return Message(kind, fields, tensors)


def _parsed(text: bytes) -> tuple[str, dict[str, Any], list[tuple[torch.dtype, int]]]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise ProtocolError("a header is malformed: it is no JSON, or nested too deep") from None
    if not isinstance(header, dict):
        raise ProtocolError("a header is malformed: it is no object")
    kind, fields, tensors = (header.get(name) for name in ("kind", "fields", "tensors"))
    if not (isinstance(kind, str) and isinstance(fields, dict) and isinstance(tensors, list)):
        raise ProtocolError("a header is malformed: it has no kind, fields and tensors of the right types")
    return kind, fields, [_described(tensor) for tensor in tensors]


def _described(tensor: object) -> tuple[torch.dtype, int]:
    """A tensor's type and number of elements, from its entry in a header."""
    match tensor:
        case [str(name), int(elements)] if name in _DTYPES and type(elements) is int and elements >= 0:
            return _DTYPES[name], elements
    raise ProtocolError(f"a header is malformed: a tensor is no type of {', '.join(_DTYPES)} with a number of elements")


@dataclass(frozen=True)
class Run:
    """What two processes must share to talk: the run's secret and the job's fingerprint.

    Attributes:
        timeout: ``sync.server_timeout``; each side goes by its own.
    """

    token: str = field(repr=False)
    job: str
    timeout: float = 10.0

    @property
    def given_up_after(self) -> float:
        """Seconds without a sign of life after which one whom nobody can stand in for is given up."""
        return GIVEN_UP * self.timeout


GIVEN_UP = 6
"""So many times ``sync.server_timeout``."""

INSTANCE = secrets.token_hex(8)
"""This process, for those it talks to: by it one that connects again is told from another under the same name."""
NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
"""What the name of a process must be: it stands in file names and sentences."""
BEAT = "/beat"
"""Ends the name of a connection that only carries signs of life."""


def hello(run: Run, name: str, instance: str = INSTANCE) -> Message:
    """The first message of a connection."""
    return Message("hello", {"token": run.token, "job": run.job, "name": name, "instance": instance})


def refusal(run: Run, message: Message) -> str | None:
    """Why a first message is not accepted, in one sentence; None if it is. The comparison takes constant time."""
    token, job, name, instance = (message.fields.get(key) for key in ("token", "job", "name", "instance"))
    if message.kind != "hello" or not isinstance(name, str) or not NAME.fullmatch(name.removesuffix(BEAT)):
        return f"the first message was {message.kind[:40]!r}; it must be a hello with a name"
    if not isinstance(token, str) or not hmac.compare_digest(ascii(token).encode(), ascii(run.token).encode()):
        return f"{name}: its token is not this run's; take the one the run was started with"
    if job != run.job:
        theirs = job[:16] if isinstance(job, str) else "without a fingerprint"
        return f"{name}: it works on job {theirs}, this run is job {run.job}; start it from this run's directory"
    if not isinstance(instance, str):
        return f"{name}: it does not say which process it is; use the same meshwright on both sides"
    return None
