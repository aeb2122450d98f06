"""One short hash of everything a model is: what two runs are compared by.

Not named like its function, which the package offers under that name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


def fingerprint(model: nn.Module) -> str:
    """Return 16 hex digits over names, dtypes, shapes and bytes of all parameters and persistent buffers.

    Non-persistent buffers are caches and don't count. Reads every byte once; copies from an accelerator.
    """
    return digest_of(named_state(model)).hexdigest()[:16]


def named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers with their names; one that has two names comes once."""
    yield from model.named_parameters()
    transient = {
        id(buffer)
        for module in model.modules()
        for key, buffer in module.named_buffers(recurse=False)
        if key in module._non_persistent_buffers_set
    }
    yield from ((name, buffer) for name, buffer in model.named_buffers() if id(buffer) not in transient)


def digest_of(named: Iterable[tuple[str, Tensor]]) -> hashlib._Hash:
    """Return the SHA-256 over names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(raw_bytes(tensor))
    return digest


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the elements of `tensor` in row-major order as bytes on the host; no copy where it is so already."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    if flat.numel() == 1:  # any stride is contiguous then, but not to `view`
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8).numpy().data
