"""Answers of a launcher about the ranks of its node: how they are, where they wait, their logs, and profiles."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from paraplan.launch.elastic.records import JobRecord
from paraplan.launch.faults.collectives import ANSWER_S, ask_for_calls
from paraplan.launch.live.channel import VERSION, read_log
from paraplan.launch.ranks.bootstrap import STACK_SIGNAL
from paraplan.launch.ranks.live import LiveRank, catches, process_state
from paraplan.launch.ranks.stacks import ask_for_stacks, stack_by_py_spy
from paraplan.launch.stragglers.steps import ask_for_profile, last_step, read_profile, trace_path
from paraplan.shared_memory import StatusPage


def answer(job: JobRecord, question: Mapping[str, Any]) -> dict[str, Any]:
    """Return this node's answer to a question; {"error": ...} for one that it does not understand."""
    answers: dict[str, Callable[[JobRecord, Mapping[str, Any]], dict[str, Any]]] = {
        "status": _status,
        "stacks": _stacks,
        "logs": _logs,
        "profile": _profile,
        "profiled": _profiled,
    }
    found = answers.get(str(question.get("ask")))
    if found is None or question.get("version") != VERSION:
        return {"host": socket.gethostname(), "error": "its launcher is of another version of paraplan"}
    try:
        return {"host": socket.gethostname(), "pid": os.getpid()} | found(job, question)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, struct.error) as error:
        return {"host": socket.gethostname(), "error": f"the question is not understood: {error}"}


def _status(job: JobRecord, question: Mapping[str, Any]) -> dict[str, Any]:
    store, page = job.store, job.page
    ranks = {str(rank): _rank_status(one, page) for rank, one in sorted(job.ranks.items())}
    state = "running" if ranks else "starting"
    if ranks and page is not None and page.stop_by:
        state = "saving" if page.stop_by > 0 else "ending"
    return {
        "run": job.run,
        "script": job.script,
        "plan": None if job.plan is None else job.plan.plan.describe(),
        "folder": str(job.kept_folder) if job.kept_folder is not None else None,
        "state": state,
        "elapsed_s": time.time() - job.clock.began,
        "attempt": job.attempts,
        "node": store.node if store is not None else 0,
        "num_nodes": store.num_nodes if store is not None else 1 if ranks else job.max_nodes,
        "world_size": job.world_size,
        "ranks": ranks,
    }


def _rank_status(rank: LiveRank, page: StatusPage | None) -> dict[str, Any]:
    """Return how a rank is; its step as the runtime counts, which goes on after a restart, else as was seen."""
    step, ended_s = last_step(rank.folder) if rank.folder is not None else (0, 0.0)
    if page is not None and page.get(rank.local_rank, "last_step"):
        step, ended_s = int(page.get(rank.local_rank, "last_step")), page.get(rank.local_rank, "last_ended")
    return {
        "pid": rank.pid,
        "state": process_state(rank.pid),
        "step": step or None,
        "since_step_s": time.time() - ended_s if step and ended_s else None,
        "logs": list(rank.logs),
    }


def _chosen(job: JobRecord, question: Mapping[str, Any]) -> dict[int, LiveRank]:
    wanted = question.get("ranks")
    return {rank: one for rank, one in job.ranks.items() if wanted is None or rank in wanted}


def _stacks(job: JobRecord, question: Mapping[str, Any]) -> dict[str, Any]:
    """Return where ranks stand, those that do not answer too, and the collectives that they made last."""
    ranks = _chosen(job, question)
    states = {rank: process_state(one.pid) for rank, one in ranks.items()}
    asked = [one for rank, one in ranks.items() if states[rank] == "running" and catches(one.pid, STACK_SIGNAL)]
    job.num_questions += 1
    try:
        stacks = ask_for_stacks(asked, request_stacks=job.request_stacks, timeout_s=ANSWER_S)
    finally:
        job.num_questions += 1
    for rank, one in ranks.items():
        if rank not in stacks and states[rank] != "ended":
            stacks[rank] = stack_by_py_spy(one.pid)
    return {
        "states": {str(rank): state for rank, state in states.items()},
        "stacks": {str(rank): [[*vars(frame).values()] for frame in stack] for rank, stack in stacks.items()},
        "calls": {str(rank): asdict(found) for rank, found in ask_for_calls(asked).items()},
    }


def _logs(job: JobRecord, question: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the logs of this attempt hold behind `offsets` (by rank, one a file), or behind `default`.

    A negative offset counts from the end; offsets of another attempt than this one count for nothing.
    """
    attempt, ranks = job.attempts, job.ranks
    offsets = question["offsets"] if question["attempt"] == attempt else {}
    chunks = {}
    for rank, one in ranks.items():
        wanted = offsets.get(str(rank)) or [question["default"]] * len(one.logs)
        chunks[str(rank)] = [read_log(path, int(at)) for path, at in zip(one.logs, wanted, strict=False) if path]
    return {
        "attempt": attempt,
        "chunks": chunks,
        "logs": {str(rank): [path for path in one.logs if path] for rank, one in ranks.items()},
        "keeps_logs": any(any(one.logs) for one in ranks.values()),
    }


def _profile(job: JobRecord, question: Mapping[str, Any]) -> dict[str, Any]:
    """Ask ranks for a profile; return the traces that they will write, and why others will write none."""
    chosen, number, seconds = _chosen(job, question), int(question["number"]), float(question["seconds"])
    begin_by_s, traces, refused = time.time() + float(question["wait_s"]), {}, {}
    for rank, one in chosen.items():
        if job.kept_folder is None:
            refused[str(rank)] = "the run keeps no folder (--no-logs)"
        elif process_state(one.pid) != "running":
            refused[str(rank)] = f"its process is {process_state(one.pid)}"
        elif one.folder and ask_for_profile(one.folder, number=number, seconds=seconds, begin_by_s=begin_by_s):
            traces[str(rank)] = str(trace_path(one.folder, rank=rank, number=number))
        else:
            why = "it is alone, or no script of paraplan.runtime and started without --watch-steps"
            refused[str(rank)] = f"it notes no steps: {why}"
    return {"traces": traces, "refused": refused, "pids": {str(rank): one.pid for rank, one in chosen.items()}}


def _profiled(job: JobRecord, question: Mapping[str, Any]) -> dict[str, Any]:
    """Return how far the profiles are, by rank: what the rank says of it, or that it has ended."""
    found = {}
    for rank, one in _chosen(job, question).items():
        number = int(question["number"])
        state, text = read_profile(one.folder, number=number) if one.folder is not None else ("", "")
        process = process_state(one.pid) if state in ("", "began") else "running"
        if one.folder is not None and trace_path(one.folder, rank=rank, number=number).exists():
            state = "done"  # that of a process that ends is written at its end
        elif process != "running":
            state, text = process, f"its process is {process}"
        found[str(rank)] = [state, text]
    return {"profiles": found}
