"""One end of a stream of messages that an event loop serves: never blocks, buffers what can't go out yet."""

from __future__ import annotations

import contextlib
import selectors
import socket

from unisono.cluster.messages import CONTROL_LIMIT_BYTES, FrameReader, Message, encode, frame


class Channel:
    """A connected stream socket as messages in and out.

    Args:
        sock: taken over; made non-blocking.
        limit_bytes: longest message accepted.
    """

    def __init__(self, sock: socket.socket, *, limit_bytes: int = CONTROL_LIMIT_BYTES) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._reader = FrameReader(limit_bytes)
        self._unsent = bytearray()
        self.closed = False

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def events(self) -> int:
        """What to wait for in a selector."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)

    def send(self, message: Message) -> None:
        """Queue a message and send what goes out at once. A peer that is gone is noticed by `receive`."""
        if not self.closed:
            self._unsent += frame(encode(message))
            self.flush()

    def flush(self) -> None:
        """Send what goes out without waiting."""
        try:
            while self._unsent:
                sent = self._sock.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:  # the reading side reports the end
            self._unsent.clear()

    def receive(self) -> list[bytes]:
        """Return the messages that have arrived; sets `closed` at the end of the stream.

        Raises:
            TransportError: a message is too long.
        """
        payloads: list[bytes] = []
        try:
            while data := self._sock.recv(1 << 18):
                payloads += self._reader.feed(data)
            self.closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        return payloads

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            self._sock.close()
