"""Real processes with one end of a transport each."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def start_worker(transport, rank, store_file, body, *, inherited=()):
    """Start one of two Python processes, which runs `body` with a connected `transport` of this class."""
    program = f"""
import os, sys, time
import torch
from torch import distributed
from unisono.errors import WorkerLostError
from {transport.__module__} import {transport.__name__}

store = distributed.FileStore({str(store_file)!r}, 2)
transport = {transport.__name__}(store, {rank}, 2, timeout_s=30)
{textwrap.dedent(body)}
"""
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, pass_fds=inherited
    )
