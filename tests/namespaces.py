"""Hosts on one machine: network namespaces joined by a bridge, each with an address of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

WHY_NOT = (
    "needs root and iproute2 for network namespaces" if os.geteuid() or shutil.which("ip") is None else ""
)


@contextmanager
def hosts(count: int) -> Iterator[list[tuple[list[str], str]]]:
    """Set up `count` hosts; give for each the words before a command that is to run there, and its address."""
    tag = f"u{os.getpid() % 10_000}"
    bridge = f"{tag}br"
    made: list[list[str]] = []
    try:
        _ip("link", "add", bridge, "type", "bridge")
        made.append(["link", "del", bridge])
        _ip("link", "set", bridge, "up")
        found = []
        for number in range(count):
            name, outer, inner = f"{tag}n{number}", f"{tag}o{number}", f"{tag}i{number}"
            address = f"10.213.{os.getpid() % 250}.{number + 1}"
            _ip("netns", "add", name)
            made.append(["netns", "del", name])
            _ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name)
            _ip("link", "set", outer, "master", bridge, "up")
            within = ["ip", "netns", "exec", name]
            for words in (
                ["addr", "add", f"{address}/24", "dev", inner],
                ["link", "set", inner, "up"],
                ["link", "set", "lo", "up"],
            ):
                subprocess.run([*within, "ip", *words], check=True)
            found.append((within, address))
        yield found
    finally:
        for words in reversed(made):
            subprocess.run(["ip", *words], check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
