"""Errors of CUDA, NCCL and torch's allocator about a GPU, and the remedies.

Texts of cudaGetErrorString (libcudart 13.0), of NCCL 2.28's ncclGetErrorString and its warnings, and of torch 2.11
(c10/cuda/CUDACachingAllocator.cpp, CUDAFunctions.cpp; NCCLUtils.cpp and ProcessGroupNCCL.cpp of c10d), as the libraries
hold them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from paraplan.launch.torch_private.texts import NO_NAME_OF_CLIENT, WATCHDOG

OUT_OF_MEMORY = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|Cuda failure (?:\d+ )?'out of memory'"
)
"""A GPU is out of memory, by torch's allocator, CUDA, cuBLAS or NCCL."""

OWN_NCCL_ERROR = re.compile(r"ncclUnhandledCudaError|ncclInvalidUsage|ncclInvalidArgument")
"""Errors of NCCL that are this rank's own, and not those of a peer or of the way to it."""

_ABORTED = re.compile(r"^\s*what\(\):\s+(?P<reason>.*)$")
_PREFIX = re.compile(r"^(?:\[[^\]]*\]\s*)+(?:Process group watchdog thread terminated with exception:\s*)?")
_NATIVE_FRAME = re.compile(r"^\s*(?:frame #\d+: |<omitting python frames>|Exception raised from )")

_ADVICE = {
    r"no kernel image is available": "this build of torch has no code for this GPU (torch.cuda.get_arch_list()): "
    "install one that has",
    r"NVIDIA driver on your system is too old|CUDA driver version is insufficient|unsupported toolchain": "update the "
    "driver, or install a torch that is built for the CUDA that nvidia-smi shows",
    r"Duplicate GPU detected|invalid device ordinal": "each rank needs a GPU of its own: "
    "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), one rank for each GPU",
    r"device-side assert triggered": "often an index outside of a table, as a token beyond the vocabulary; "
    "CUDA_LAUNCH_BLOCKING=1 shows the line",
    r"an illegal (?:memory access|instruction) was encountered|unspecified launch failure|CUDA error: misaligned": "a "
    "kernel failed, maybe before this line: CUDA_LAUNCH_BLOCKING=1 shows which; dmesg | grep Xid, if the GPU did",
    r"uncorrectable (?:ECC|NVLink) error": "this GPU is faulty: dmesg | grep Xid and nvidia-smi -q tell more; go on "
    "without it (--gpus)",
    r"CUDA-capable device\(s\) is/are busy or unavailable": "another process has the GPU, or its compute mode lets one "
    "process in: nvidia-smi shows both",
    r"CUDA.* system not yet initialized": "GPUs with NVSwitch need their fabric manager: systemctl status "
    "nvidia-fabricmanager",
}


def advice(message: str) -> str | None:
    """Return what to do about an error of a GPU; None where nothing is known."""
    return next((hint for pattern, hint in _ADVICE.items() if re.search(pattern, message)), None)


def abort_reason(lines: Sequence[str]) -> str | None:
    """Return why C++ ended the process, from the last lines that it wrote: `CUDA error: ...`; None where it is silent.

    The exception that nobody caught is what std::terminate prints; NCCL's watchdog wraps those of its thread.
    """
    reasons = [match["reason"] for match in map(_ABORTED.match, lines) if match is not None]
    return _PREFIX.sub("", reasons[-1]).strip() or None if reasons else None


def telling_lines(lines: Sequence[str], number: int) -> tuple[str, ...]:
    """Return the last `number` lines without frames of C++, and before them why NCCL or C++ gave up, if earlier."""
    plain = [line for line in lines if not _NATIVE_FRAME.match(line) and NO_NAME_OF_CLIENT not in line]
    reasons = [line for line in plain[:-number] if WATCHDOG in line or _ABORTED.match(line)]
    watchdogs = [line for line in reasons if WATCHDOG in line]
    return (*(watchdogs or reasons)[-1:], *plain[-number:])
