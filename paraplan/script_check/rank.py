"""One process of a check of a script: the script as it is, with a recorder around it.

python -m paraplan.launch --nproc-per-node 4 -m paraplan.script_check.rank request.json
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from paraplan.script_check.entries import follow_arrays, follow_loaders
from paraplan.script_check.exchanges import follow_exchanges
from paraplan.script_check.reading_plan import INPUTS_FILE, READ_FILE, START_FILE
from paraplan.script_check.readings import Given, Replay
from paraplan.script_check.recording import Recorder
from paraplan.script_check.records import ALONE, Inputs, ScriptRequest
from paraplan.script_check.torch_private import around_groups, be_one_process, use_gloo

_NAMES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "MASTER_PORT")
_SIZES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
_ONE_PROCESS = dict.fromkeys(_NAMES, "0") | dict.fromkeys(_SIZES, "1") | {"TORCHELASTIC_USE_AGENT_STORE": "False"}
"""The variables of a process that is alone, with a store of its own at any port."""


def main(path: str) -> None:
    """Run the script of the request at `path` until it has made its steps, and write what was noted."""
    request = ScriptRequest.model_validate_json(Path(path).read_text(encoding="utf-8"))
    if request.role != "ranks":
        request = _alone(request)
    torch.compiler.set_stance("force_eager")  # a variable would be for each process to set before it imports torch
    recorder = Recorder(request, _given(request) if request.role != "ranks" else None)
    use_gloo()
    if request.role == "ranks":
        around_groups(recorder.note_group)
    else:
        be_one_process()
    follow_loaders(recorder.sources)
    follow_arrays(recorder.sources)
    follow_exchanges(recorder.sources)
    if request.shrink_for:
        from paraplan.script_check.smaller_models import SmallerModels  # transformers, which few scripts need

        inside = recorder.sources.inside
        SmallerModels(request.shrink_for, Path(request.folder), note=recorder.note_smaller, inside=inside).follow()
    sys.argv[:] = [request.script, *request.arguments]
    recorder.follow()
    try:
        if request.is_module:
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(request.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(request.script).resolve().parent))
            runpy.run_path(request.script, run_name="__main__")
    finally:
        recorder.stop()


def _alone(request: ScriptRequest) -> ScriptRequest:
    """Return what this process is to do of the processes that run the script alone, and have it be one."""
    role = ALONE[int(os.environ["LOCAL_RANK"])]
    os.environ.update(_ONE_PROCESS)
    folder = Path(request.folder) / role
    folder.mkdir()
    return request.replace(role=role, folder=str(folder))


def _given(request: ScriptRequest) -> Given:
    folder = Path(request.inputs)
    inputs = Inputs.model_validate_json((folder / INPUTS_FILE).read_text(encoding="utf-8"))
    start = load_file(folder / START_FILE)
    if request.role == "shaken":
        signs = torch.Generator().manual_seed(0)
        for name, value in start.items():
            if value.is_floating_point():
                sign = torch.randint(0, 2, value.shape, generator=signs).to(value.dtype).mul_(2).sub_(1)
                start[name] = value * (1 + sign * max(torch.finfo(value.dtype).eps, request.shake))
    tensors = load_file(folder / READ_FILE)
    read: dict[tuple[str, int], list[list[tuple[str, torch.Tensor]]]] = {}
    for number, (place, time, rank) in enumerate(inputs.read):
        parts = read.setdefault((place, time), [])
        assert rank == len(parts)
        leaves = sorted((int(key.split("/")[1]), key) for key in tensors if key.startswith(f"{number}/"))
        parts.append([(key.split("/", 2)[2], tensors[key]) for _, key in leaves])
    replay = Replay(read, set(inputs.ended), inputs.width, inputs.times_a_batch)
    return Given(start, replay, inputs.rates)


if __name__ == "__main__":
    main(sys.argv[1])
