"""Memory that a step frees stays with the process."""

from unisono.cluster.environment import sets_allocator


def faults_of_second_step() -> tuple[int, int]:
    """Return page faults of two equal rounds of 16 blocks, before and after the process keeps its memory."""
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
    allocate()
    return faulting, allocate()


def test_the_second_step_finds_its_memory_again(launch) -> None:
    ((before, after),) = launch(faults_of_second_step, 1)
    assert after < before / 4  # malloc may still ask the system for a block or two where its own don't fit


def test_a_users_own_choice_of_allocator_is_left_alone() -> None:
    assert sets_allocator({"MALLOC_ARENA_MAX": "1"})
    assert sets_allocator({"LD_PRELOAD": "libjemalloc.so"})
    assert not sets_allocator({"PATH": "/bin"})
