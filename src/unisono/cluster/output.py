"""Where the workers' output goes: rank 0's to the terminal, the others' to files; or all, line by line."""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

Mode = Literal["first", "all"]


class LineCutter:
    """Cuts a stream of bytes into text, whole lines each with a prefix; passes text through without one.

    Args:
        prefix: put before every line.
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, data: bytes, *, final: bool = False) -> str:
        """Return what can be shown now."""
        text = self._rest + self._decoder.decode(data, final)
        if not self._prefix:
            return text
        lines = text.split("\n")
        self._rest = "" if final else lines.pop()
        if final and not lines[-1]:
            lines.pop()
        return "".join(f"{self._prefix}{line}\n" for line in lines)


@dataclass
class _Pipe:
    cutter: LineCutter
    sink: TextIO
    broken: bool = False


@dataclass(frozen=True)
class OutputPlan:
    """What is done with output.

    Args:
        mode: ``"first"`` shows rank 0's, ``"all"`` everybody's with the rank before each line.
        keep: keep the output that is not shown, in files (``rank-1.log``), instead of dropping it.
        directory: where it is kept; None is a new folder for temporary files, removed when all went well.
        inherit: rank 0 gets our own standard streams instead of a pipe that we read.
    """

    mode: Mode = "first"
    keep: bool = False
    directory: Path | None = None
    inherit: bool = False


class Outputs:
    """The output of all workers of one job.

    Args:
        plan: what to do with it.
        out: where shown standard output is written.
        err: where shown standard error is written.
    """

    def __init__(self, plan: OutputPlan, *, out: TextIO, err: TextIO) -> None:
        self._plan = plan
        self._sinks = (out, err)
        self._pipes: dict[int, _Pipe] = {}
        self._directory = plan.directory
        self._files: list[Path] = []

    @contextmanager
    def descriptors(self, rank: int) -> Iterator[tuple[int, int]]:
        """Lend the standard output and error of a worker, to be passed on."""
        pair = self._open(rank)
        try:
            yield pair
        finally:
            for descriptor in pair:
                os.close(descriptor)

    @property
    def readable(self) -> list[int]:
        """Descriptors to be given to `pump` when they are readable."""
        return list(self._pipes)

    @property
    def temporary_folders(self) -> list[str]:
        """Folders of our own in which output is kept until the job has ended."""
        ours = self._directory is not None and self._plan.directory is None
        return [str(self._directory)] if ours else []

    @property
    def logs(self) -> list[Path]:
        """Files in which output was kept."""
        return [path for path in self._files if path.exists()]

    def pump(self, descriptor: int) -> bool:
        """Show what has arrived; return False at the end of that pipe, which is then closed."""
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return True
        pipe = self._pipes[descriptor]
        _show(pipe, pipe.cutter.feed(data, final=not data))
        if not data:
            os.close(descriptor)
            del self._pipes[descriptor]
        return bool(data)

    def close(self, *, failed: bool = True) -> None:
        """Show the rest of what has arrived, without waiting for more, and remove files nobody needs.

        Args:
            failed: the job failed: what it wrote to our own folder is needed.
        """
        for descriptor in self.readable:
            while _has_data(descriptor) and self.pump(descriptor):
                pass
        for descriptor, pipe in self._pipes.items():
            _show(pipe, pipe.cutter.feed(b"", final=True))
            os.close(descriptor)
        self._pipes.clear()
        self._tidy(failed=failed)

    def _open(self, rank: int) -> tuple[int, int]:
        if self._plan.mode == "all":
            return self._pipe(0, f"[{rank}] "), self._pipe(1, f"[{rank}] ")
        if rank > 0:
            return self._file(rank)
        if self._plan.inherit:
            return os.dup(1), os.dup(2)
        return self._pipe(0, ""), self._pipe(1, "")

    def _pipe(self, sink: int, prefix: str) -> int:
        read, write = os.pipe()
        os.set_blocking(read, False)
        self._pipes[read] = _Pipe(LineCutter(prefix), self._sinks[sink])
        return write

    def _file(self, rank: int) -> tuple[int, int]:
        path = Path(os.devnull)
        if self._plan.keep:
            if self._directory is None:
                self._directory = Path(tempfile.mkdtemp(prefix="unisono-"))
            path = self._directory / f"rank-{rank}.log"
            self._files.append(path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        return descriptor, os.dup(descriptor)

    def _tidy(self, *, failed: bool) -> None:
        ours = self._directory is not None and self._plan.directory is None
        for path in self.logs:
            if path.stat().st_size == 0 or (ours and not failed):
                path.unlink()
        if ours and self._directory is not None:
            with contextlib.suppress(OSError):  # something is in it
                self._directory.rmdir()


def _show(pipe: _Pipe, text: str) -> None:
    if text and not pipe.broken:
        try:
            pipe.sink.write(text)
            pipe.sink.flush()
        except (BrokenPipeError, ValueError):  # nobody reads it any more; the job is not to blame
            pipe.broken = True


def _has_data(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
