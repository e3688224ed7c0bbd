"""What CUDA, NCCL and torch say about GPUs, in their own texts: cause, reason and advice.

The texts have the form of torch 2.11's libraries (libtorch_cuda.so, libc10_cuda.so), of NCCL 2.28 and libcudart 13.0,
which hold them as strings; torch's are made in CUDACachingAllocator.cpp, NCCLUtils.cpp and ProcessGroupNCCL.cpp.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from paraplan.launch.faults.failures import Cause, RankFailure, first_failure, read_failure
from paraplan.launch.faults.gpu_errors import advice
from paraplan.launch.faults.report import ReportContext, render_failures
from paraplan.launch.ranks.spawning import RankExit

CONTEXT = ReportContext(hostname="node7", num_nodes=1)


def nccl_error(what: str, kind: str, last: str) -> str:
    return (
        f"DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {what}, "
        f"NCCL version 2.28.9\n{kind}\nLast error:\n{last}"
    )


SYSTEM_ERROR = nccl_error(
    "unhandled system error (run with NCCL_DEBUG=INFO for details)",
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. ",
    "socketPollConnect: connect to 10.0.0.2<34567> returned Connection refused, exceeded error retry count",
)
REMOTE_ERROR = nccl_error(
    "remote process exited or there was a network error",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "NET/Socket : peer 10.0.0.2<34567> closed connection",
)
CUDA_ERROR = nccl_error(
    "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    "ncclUnhandledCudaError: Call to CUDA function failed.",
    "Cuda failure 2 'out of memory'",
)
DUPLICATE = nccl_error(
    "invalid usage (run with NCCL_DEBUG=WARN for details)",
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device c1000",
)
OUT_OF_MEMORY = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 7.30 GiB. GPU 3 has a total capacity of 79.11 GiB of "
    "which 12.75 MiB is free. Process 4242 has 30.00 GiB memory in use. Including non-PyTorch memory, this process has "
    "49.09 GiB memory in use. Of the allocated memory 48.20 GiB is allocated by PyTorch, with 64.00 MiB allocated in "
    "private pools (e.g., CUDA Graphs), and 210.11 MiB is reserved by PyTorch but unallocated. If reserved but "
    "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
WATCHDOG = (
    "[rank{rank}]:[E1218 20:27:21.426415540 ProcessGroupNCCL.cpp:693] [Rank {rank}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=5, OpType=_ALLGATHER_BASE, NumelIn=131072000, NumelOut=262144000, "
    "Timeout(ms)=600000) ran for 600081 milliseconds before timing out."
)
FRAMES = "".join(f"frame #{number}: <unknown function> + 0xdbbf4 (0x7f in libstdc++.so.6)\n" for number in range(9))
DEVICE = (
    "CUDA error: an illegal memory access was encountered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions.\n\nException raised from c10_cuda_check_implementation at "
    f"/pytorch/c10/cuda/CUDAException.cpp:43 (most recent call first):\n{FRAMES}"
)
TERMINATE = "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  "
THREAD = "[PG ID 0 PG GUID 0(default_pg) Rank {rank}] Process group watchdog thread terminated with exception: "


def failed(
    folder: Path, rank: int, *, message: str = "", stderr: str = "", code: int = 1, time_ns: int = 100
) -> RankFailure:
    own = folder / str(rank)
    own.mkdir()
    (own / "stderr.log").write_text(stderr)
    if message:
        extra = {"py_callstack": message, "timestamp": "1", "timestamp_ns": str(time_ns)}
        (own / "error.json").write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    end = RankExit(local_rank=rank, code=code, time_ns=time_ns, max_rss_bytes=0)
    return read_failure(rank=rank, pid=1000 + rank, exit=end, error_file=str(own / "error.json"), was_stopped=False)


def test_an_error_of_nccl_is_this_ranks_own_or_its_peers(tmp_path: Path) -> None:
    messages = [SYSTEM_ERROR, REMOTE_ERROR, CUDA_ERROR, DUPLICATE]
    failures = [failed(tmp_path, rank, message=message) for rank, message in enumerate(messages)]
    lost, own = Cause.COMMUNICATION, Cause.OWN_ERROR
    assert [failure.cause for failure in failures] == [lost, lost, own, own]
    assert first_failure(failures).rank == 2
    report = render_failures(failures[:1], CONTEXT)
    assert report.splitlines()[-1].strip().startswith("socketPollConnect: connect to 10.0.0.2<34567>")


@pytest.mark.parametrize(
    "message",
    [
        OUT_OF_MEMORY,
        CUDA_ERROR,
        "AcceleratorError: CUDA error: out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_a_gpu_without_memory_is_told_from_whatever_says_so(tmp_path: Path, message: str) -> None:
    failure = failed(tmp_path, 0, message=message)
    assert failure.record is not None
    assert failure.record.is_out_of_gpu_memory
    report = render_failures([failure], CONTEXT)
    assert "paraplan recommend MODEL finds plans that fit" in report
    assert ("it asked for 7.30 GiB; 12.75 MiB of 79.11 GiB were free" in report) is (message is OUT_OF_MEMORY)


def test_a_rank_that_nccls_watchdog_ended_waited_in_the_collective_that_it_names(tmp_path: Path) -> None:
    def said(rank: int) -> str:
        line = WATCHDOG.format(rank=rank)
        what = THREAD.format(rank=rank) + line.partition("] ")[2]
        return f"{line}\n{FRAMES}\n{TERMINATE}{what}\nException raised from checkTimeout at /pytorch/:693\n{FRAMES}"

    failures = [failed(tmp_path, rank, stderr=said(rank), code=-signal.SIGABRT) for rank in (0, 1)]
    assert [failure.cause for failure in failures] == [Cause.ABORT, Cause.ABORT]
    first = render_failures(failures, CONTEXT).splitlines()[0]
    assert first == "paraplan: a collective timed out: ranks 0-1 waited 600 s in _allgather_base number 5"


def test_a_rank_that_cuda_aborted_is_told_with_the_reason_and_not_with_frames_of_cpp(tmp_path: Path) -> None:
    prefix = "[rank2]:[E1218 20:27:21.4 ProcessGroupNCCL.cpp:2068] " + THREAD.format(rank=2)
    text = f"{prefix}{DEVICE}\n{TERMINATE}{THREAD.format(rank=2)}{DEVICE}"
    failure = failed(tmp_path, 2, stderr=text, code=-signal.SIGABRT)
    report = render_failures([failure], CONTEXT)
    assert report.splitlines()[0] == (
        "paraplan: rank 2 failed: killed by SIGABRT (it aborted itself): CUDA error: an illegal memory access was "
        "encountered"
    )
    assert "hint: a kernel failed" in report
    assert "frame #" not in report


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("AcceleratorError: CUDA error: no kernel image is available for execution on the device", "no code for"),
        ("RuntimeError: The NVIDIA driver on your system is too old (found version 12040). Please", "update the"),
        ("CUDA error: CUDA driver version is insufficient for CUDA runtime version", "update the driver"),
        ("CUDA error: the provided PTX was compiled with an unsupported toolchain.", "update the driver"),
        (DUPLICATE, "LOCAL_RANK"),
        ("AcceleratorError: CUDA error: invalid device ordinal", "one rank for each GPU"),
        ("AcceleratorError: CUDA error: device-side assert triggered", "CUDA_LAUNCH_BLOCKING=1"),
        ("AcceleratorError: CUDA error: uncorrectable ECC error encountered", "dmesg | grep Xid"),
        ("CUDA error: uncorrectable NVLink error detected during the execution", "faulty"),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", "nvidia-smi shows both"),
        ("RuntimeError: CUDA error: system not yet initialized", "fabric manager"),
        ("ValueError: the system is busy", None),
    ],
)
def test_what_to_do_about_an_error_of_cuda_is_said(message: str, told: str | None) -> None:
    assert (told or "") in (advice(message) or "")
    assert (advice(message) is None) is (told is None)
