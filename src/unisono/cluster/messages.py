"""What travels between launcher, fork server and workers: plain data, no pickle, with a size limit.

Messages are msgpack; on a stream each is preceded by its length. Nothing here knows what carries them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from unisono.cluster.failure import Failure
from unisono.cluster.position import Sighting
from unisono.errors import TransportError

CONTROL_LIMIT_BYTES = 16 << 20
RESULT_LIMIT_BYTES = (1 << 32) - 1
_HEADER = struct.Struct("<I")


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of everything that is sent."""


# --- worker to master, over the control channel


class Hello(Message, frozen=True):
    """First message of a worker that joins the run."""

    run_id: str
    rank: int
    pid: int


class At(Message, frozen=True):
    """Heartbeat: where the worker's main thread is, and for how long."""

    step: int
    operation: str
    age_s: float


class Failed(Message, frozen=True):
    """The worker failed."""

    failure: Failure


class Left(Message, frozen=True):
    """The worker leaves the run in order."""


class SetKey(Message, frozen=True):
    ticket: int
    key: str
    value: bytes


class GetKeys(Message, frozen=True):
    """Answered once all keys exist."""

    ticket: int
    keys: list[str]


class CheckKeys(Message, frozen=True):
    ticket: int
    keys: list[str]


class AddToKey(Message, frozen=True):
    ticket: int
    key: str
    amount: int


class AppendToKey(Message, frozen=True):
    ticket: int
    key: str
    value: bytes


class CompareSet(Message, frozen=True):
    ticket: int
    key: str
    expected: bytes
    desired: bytes


class DeleteKey(Message, frozen=True):
    ticket: int
    key: str


class ListKeys(Message, frozen=True):
    ticket: int


class WhoIsWhere(Message, frozen=True):
    ticket: int


Request = (
    SetKey | GetKeys | CheckKeys | AddToKey | AppendToKey | CompareSet | DeleteKey | ListKeys | WhoIsWhere
)
ToMaster = Hello | At | Failed | Left | Request


# --- master to worker


class Welcome(Message, frozen=True):
    """Answer to `Hello`: the settings of the command line."""

    flags: dict[str, Any]


class Values(Message, frozen=True):
    ticket: int
    values: list[bytes]


class Number(Message, frozen=True):
    ticket: int
    number: int


class Keys(Message, frozen=True):
    ticket: int
    keys: list[str]


class Whereabouts(Message, frozen=True):
    """What is known of all workers."""

    ticket: int
    sightings: list[Sighting]


class Refused(Message, frozen=True):
    """The request could not be done."""

    ticket: int
    reason: str


class Stop(Message, frozen=True):
    """The run ends: stop waiting."""

    reason: str


Reply = Values | Number | Keys | Whereabouts | Refused
ToWorker = Welcome | Reply | Stop


# --- launcher to the worker process it started, and back


class Task(Message, frozen=True):
    """What a started process is to do: a script, or a function given as a cloudpickle of our own."""

    run_id: str
    rank: int
    world_size: int
    grace_s: float
    argv: list[str]
    script: str | None
    function: bytes | None
    directory: str
    path: list[str]
    variables: dict[str, str]
    shows_traceback: bool


class Raised(Message, frozen=True):
    """The program ended with an exception."""

    failure: Failure


class Returned(Message, frozen=True):
    """The program ended; `value` is what the function returned, pickled, empty for a script."""

    value: bytes


FromProcess = Raised | Returned


# --- launcher to fork server, and back


class Start(Message, frozen=True):
    """Start a worker; carries descriptors: control channel, task channel, standard output, standard error.

    `folders` are temporary ones, to be removed if the launcher is killed.
    """

    rank: int
    fresh: bool
    folders: tuple[str, ...] = ()


class Signal(Message, frozen=True):
    """Send a signal to a worker, if it still runs."""

    rank: int
    signal: int


class Sweep(Message, frozen=True):
    """Kill whatever the workers left behind."""


ToServer = Start | Signal | Sweep


class Ready(Message, frozen=True):
    """The fork server has imported what it was told to."""


class Started(Message, frozen=True):
    rank: int
    pid: int


class Exited(Message, frozen=True):
    """A worker ended: exit code, or minus the number of the signal that killed it."""

    rank: int
    pid: int
    code: int


class Swept(Message, frozen=True):
    """Nothing is left of the job; `killed` processes were."""

    killed: int


FromServer = Ready | Started | Exited | Swept


def encode(message: Message) -> bytes:
    """Return the bytes of one message. Pure."""
    return msgspec.msgpack.encode(message)


def frame(payload: bytes) -> bytes:
    """Return `payload` preceded by its length. Pure."""
    return _HEADER.pack(len(payload)) + payload


class FrameReader:
    """Cuts a stream of bytes into payloads.

    Args:
        limit_bytes: longest payload that is accepted.
    """

    def __init__(self, limit_bytes: int = CONTROL_LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add `data`; yield every payload that is complete.

        Raises:
            TransportError: a payload is announced as longer than the limit.
        """
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            if length > self._limit_bytes:
                raise TransportError(
                    f"message of {length} bytes announced, at most {self._limit_bytes} are accepted: "
                    "the other end is not a worker of this run, or stored too large a value"
                )
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield payload
