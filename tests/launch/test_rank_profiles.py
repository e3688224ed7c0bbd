"""A profile from outside never harms a script: not one that profiles itself, and not one that ends meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import ForkedLaunch, WriteScript

pytestmark = pytest.mark.ranks

SCRIPT = """
    import gc
    import torch
    from torch.profiler import profile, schedule
    from paraplan.launch.torch_private.profiling import start_profile

    x = torch.ones(50, 50)
    waiting = profile(schedule=schedule(wait=0, warmup=2, active=1))
    waiting.start()
    try:
        start_profile("refused.json", seconds=1)
    except RuntimeError as error:
        print(error)
    waiting.stop()
    del waiting
    gc.collect()

    asked = start_profile("ended.json", seconds=600)
    x @ x
    assert not asked.end_step()
    with profile() as own:
        x @ x
    print("aten::mm" in [event.name for event in own.events()])
    assert asked.end_step()

    asked = start_profile("whole.json", seconds=0)
    x @ x
    assert asked.end_step()

    start_profile("end_of_script.json", seconds=600)
    x @ x
"""


def test_a_profile_gives_way_to_the_scripts_own_and_ends_with_the_script(
    launch_forked: ForkedLaunch, script: WriteScript, tmp_path: Path
) -> None:
    done = launch_forked("--no-logs", "--nproc-per-node", 1, script(SCRIPT))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["the script profiles itself", "True"]
    steps = {"ended": 2, "whole": 1, "end_of_script": 1}
    assert sorted(path.stem for path in tmp_path.glob("*.json*")) == sorted(steps)
    for name, count in steps.items():
        names = [event["name"] for event in json.loads((tmp_path / f"{name}.json").read_text())["traceEvents"]]
        assert "aten::mm" in names
        assert len({found for found in names if found.startswith("ProfilerStep#")}) == count
