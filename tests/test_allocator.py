"""Memory that a step frees stays with the process."""

import pytest

from unisono.cluster.environment import sets_allocator


def faults_of_equal_steps() -> tuple[int, list[int]]:
    """Return page faults of a round of 16 blocks, and of eight more once the process keeps its memory."""
    import resource

    import torch

    from unisono.allocator import keep_freed_memory

    def allocate() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [torch.ones(2**20) for _ in range(16)]
        del blocks
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    allocate()
    faulting = allocate()
    assert keep_freed_memory()
    return faulting, [allocate() for _ in range(8)]


def faults_beside_something_else(gap_bytes: int) -> tuple[int, list[int]]:
    """Return the same where the heap can grow by `gap_bytes` only and has to go on elsewhere."""
    import ctypes
    import mmap

    libc = ctypes.CDLL(None)
    libc.sbrk.restype = libc.mmap.restype = ctypes.c_void_p
    end = -(-libc.sbrk(0) // mmap.PAGESIZE) * mmap.PAGESIZE
    place, page = ctypes.c_void_p(end + gap_bytes), ctypes.c_size_t(mmap.PAGESIZE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
    assert libc.mmap(place, page, 0, flags, -1, ctypes.c_long(0)) == place.value
    return faults_of_equal_steps()


def test_steps_find_their_memory_again(launch) -> None:
    ((before, after),) = launch(faults_of_equal_steps, 1)
    assert min(after) < before / 100, after  # at first blocks may not fit where others were


@pytest.mark.parametrize("gap_mb", [0, 30, 47])
def test_steps_find_their_memory_again_where_the_heap_is_in_pieces(launch, gap_mb: int) -> None:
    ((before, after),) = launch(faults_beside_something_else, 1, gap_mb * 2**20)
    assert min(after) < before / 100, after


def test_a_users_own_choice_of_allocator_is_left_alone() -> None:
    assert sets_allocator({"MALLOC_ARENA_MAX": "1"})
    assert sets_allocator({"LD_PRELOAD": "libjemalloc.so"})
    assert not sets_allocator({"PATH": "/bin"})
