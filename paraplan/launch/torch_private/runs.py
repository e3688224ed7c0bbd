"""What torch keeps of a run of a script in one process: a script that runs there again is to find none of it.

It runs in ranks, without this package where their interpreters have none. torch has public names for parts of it alone,
and none for all process groups of a process whose peers are gone.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
from typing import Any

_DEFAULT_SEED = 67280421310721
"""What torch's generators begin with in each process (c10/core/GeneratorImpl.h)."""

_TABLES_OF_GROUPS = (
    *("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"),
    "pg_coalesce_state",
)


def restore_settings(*, num_threads: int | None, seeds_anew: bool) -> None:
    """Set what a script may set for its whole process back to what torch begins with, and seed its generators.

    `seeds_anew` seeds by the system, as in ranks that are forked; else as in a process of its own.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.autograd.set_detect_anomaly(False)
    if torch.are_deterministic_algorithms_enabled():  # to ask for less imports the compiler
        torch.use_deterministic_algorithms(False)
    torch.clear_autocast_cache()
    for device in ("cpu", "cuda"):
        torch.set_autocast_enabled(device, False)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    if seeds_anew:
        torch.default_generator.seed()
    else:
        torch.default_generator.manual_seed(_DEFAULT_SEED)
    if torch.cuda.is_initialized():
        torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False
        torch.cuda.manual_seed_all(_DEFAULT_SEED)


def seed_others() -> None:
    """Seed the generators of Python and NumPy by the system, as in a new process."""
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def abort_groups() -> None:
    """End the collectives of this process where the backend can, as NCCL does; gloo ends with its connections.

    It may be called from a thread while the main one waits in a collective.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return
    with contextlib.suppress(Exception):  # a group that the script takes down at this moment
        for group in list(c10d._world.pg_map):
            group.abort()


def forget_groups() -> list[Any]:
    """Have torch.distributed know no process group any more, nor what follows from one; return the groups there were.

    They are to be dropped after all that holds them: the end of a group waits for its threads, which may wait for
    Python's lock, and DDP's reducer keeps that lock where it drops the last reference.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return []
    world = c10d._world
    groups = list(world.pg_map)
    if c10d.is_initialized():
        c10d._abort_process_group()
        return groups
    # Of a group that was being made; its number is part of what ranks call the next one.
    for name in _TABLES_OF_GROUPS:
        getattr(world, name).clear()
    c10d._unregister_all_process_groups()
    world.group_count = 0
    return groups


def forget_run() -> None:
    """Drop what torch keeps beside the groups: the handler of data loaders, hooks of all modules, compiled code."""
    handling: Any = sys.modules.get("torch.utils.data._utils.signal_handling")
    if handling is not None:
        handling._SIGCHLD_handler_set = False
    modules: Any = sys.modules.get("torch.nn.modules.module")
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks"):
        getattr(modules, name, {}).clear()
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()  # what it has compiled is of code that is gone; kernels stay, in memory and on disk
    compiling: Any = sys.modules.get("torch._inductor.async_compile")
    if compiling is not None:
        with contextlib.suppress(Exception):  # its processes have been killed
            compiling.shutdown_compile_workers()


def free_gpus() -> str | None:
    """Give back what no tensor holds on the GPUs; return why they are not usable any more, None where they are."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    except Exception as error:  # after an error of CUDA its context is of no use
        return f"{type(error).__name__} of the GPU"
    return None
