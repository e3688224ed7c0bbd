"""`paraplan check --script`, with real ranks: right scripts are equal, and faults are found and named."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_checks import checked
from rank_harness import RankHarness
from typer.testing import CliRunner

from paraplan.api.checking import check_script
from paraplan.cli.main import app
from paraplan.errors import UsageError
from paraplan.script_check.plans import CheckRunError

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

fault = sys.argv[1]
dist.init_process_group("nccl")
torch.manual_seed(0)
rows = TensorDataset(torch.randn(32, 6), torch.randint(0, 3, (32,)))
loader = DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows) if fault != "same rows" else None)
plain = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
model = DistributedDataParallel(plain)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for inputs, targets in loader:
    if fault == "never":
        break
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    if fault == "scaled":
        for parameter in plain[3].parameters():
            parameter.grad.mul_(dist.get_world_size())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""

pytestmark = pytest.mark.ranks


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_right_script_is_equal_to_one_process_and_says_what_was_switched_off(script: str) -> None:
    done = CliRunner().invoke(app, ["check", "--script", script, "--ranks", "2", "--", "none"])
    assert done.exit_code == 0, done.output
    assert "equal" in done.output
    assert "NOT EQUAL" not in done.output
    assert "dropout is switched off" in done.output
    assert "batch statistics" in done.output


def test_a_layer_that_is_scaled_is_named_with_its_factor(script: str, ranks: RankHarness) -> None:
    found = checked(ranks, script, "scaled", num_steps=1).difference
    assert found is not None
    assert (found.kind, found.name, found.ranks, found.step) == ("scaled", "3.weight", (0, 1), 1)
    assert found.factor == pytest.approx(2.0)


def test_ranks_that_read_the_same_rows_are_named_and_that_nothing_was_made_smaller(
    script: str, ranks: RankHarness
) -> None:
    pytest.importorskip("transformers")
    report = checked(ranks, script, "same rows", num_steps=1, shrink=True)
    assert report.difference is not None
    assert (report.difference.kind, report.difference.ranks) == ("same rows", (0, 1))
    assert sum("no model was made smaller" in note for note in report.notes) == 1


def test_a_script_that_never_steps_and_one_that_is_not_there_say_so(script: str, ranks: RankHarness) -> None:
    with pytest.raises(CheckRunError, match="without a step of a torch optimizer"):
        checked(ranks, script, "never", num_steps=1)
    with pytest.raises(UsageError, match="there is no script nowhere"):
        check_script("nowhere.py")
    with pytest.raises(UsageError, match="one process with itself"):
        check_script(script, num_ranks=1)
