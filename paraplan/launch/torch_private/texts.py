"""Texts of torch and its backends in errors and logs: their kinds have no classes, or reach the launcher as text."""

from __future__ import annotations

import re

COMMUNICATION_ERRORS = re.compile(
    r"""
    connection\ (closed|reset)\ by\ peer | broken\ pipe | socket\ timeout | connection\ refused
    | timed\ out\ (waiting|after) | wait\ timeout | failed\ to\ recv,\ got\ 0\ bytes
    | (remote|peer)\ process\ (has\ )?exited | communicator\ was\ aborted | ncclremoteerror | ncclsystemerror
    | the\ client\ socket\ has\ (failed|timed\ out) | unexpected\ end\ of\ stream
    | application\ timeout\ caused\ pair\ closure
    | ^(torch\.distributed\.)?dist(backend|network|store)error | ^collectivetimeouterror
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""Errors of gloo, NCCL and the store on a rank whose peer is gone, and of `paraplan.runtime` on gloo's timeouts.

Texts of torch 2.11 to 2.13 and NCCL 2.2x.
"""

GLOO_TIMEOUT = re.compile(r"Timed out waiting (?P<timeout_ms>\d+)\s?ms for (?:recv|send) operation", re.IGNORECASE)
"""Gloo's error on a rank that waited (transport/tcp/unbound_buffer.cc)."""

WATCHDOG = "Watchdog caught collective operation timeout"
"""The words of NCCL's watchdog on a rank whose collective timed out (ProcessGroupNCCL.cpp of torch 2.11 to 2.13)."""

NCCL_TIMEOUT = re.compile(
    WATCHDOG + r": WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<name>\w+)"
    r".*?Timeout\(ms\)=(?P<timeout_ms>\d+)",
    re.DOTALL,
)
"""The line of NCCL's watchdog, with the collective that timed out."""

FRAME = re.compile(r'^\s*File "(?P<path>[^"]*)", line \d+, in (?P<name>\w+)', re.MULTILINE)
"""A frame in a traceback."""

PIPELINING_FOLDER = "/torch/distributed/pipelining/"
COLLECTIVES_FILE = "/distributed_c10d.py"
POINT_TO_POINT = ("send", "recv", "isend", "irecv")
"""Where torch's frames tell which call raised. gloo's sends and receives are in no flight recorder."""

OUT_OF_GPU_MEMORY = re.compile(
    r"Tried to allocate (?P<tried>[\d.]+ \w+).*?total capacity of (?P<total>[\d.]+ \w+) of which (?P<free>[\d.]+ \w+)"
    r" is free",
    re.DOTALL,
)
"""The numbers of torch's OutOfMemoryError (CUDACachingAllocator.cpp), which has no fields for them."""

SAID_IN_WORDS = {
    "torch.distributed.elastic.agent.server.api": ("death signal", "Error waiting on exit barrier"),
    "torch.distributed.elastic.multiprocessing.api": ("(start_method:",),
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous": (
        "failed to shutdown the",
        "failed to send a keep-alive",
    ),
}
"""Lines of torch's loggers that the launcher reports itself, or that are harmless, as nodes that end one by one."""

NO_NAME_OF_CLIENT = "The hostname of the client socket cannot be retrieved"
"""The warning of torch's sockets where addresses have no names (socket.cpp): it harms nothing."""

PORT_TAKEN = "EADDRINUSE"
CLOSED_RENDEZVOUS = "RendezvousClosed"
LATE_RENDEZVOUS = "RendezvousTimeout"
NOBODY_THERE = ("while trying to connect", "has failed", "refused")
"""Words of the store and the rendezvous about a rendezvous that fails; the store has one class of error for all."""

RECORDER_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Functions that read the flight recorder of a running rank, of `torch._C._distributed_c10d`; torch's reader takes
files."""

GROUPS = "_world"
"""The holder of the names of all groups, as `pg_names`, of `torch.distributed.distributed_c10d`."""

IMPORTED_BY_FIRST_STEP = "torch._dynamo"
"""The module that the first step of an optimizer imports, a second of each rank's start (torch/optim/optimizer.py)."""
