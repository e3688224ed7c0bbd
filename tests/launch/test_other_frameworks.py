"""Scripts of other frameworks run unchanged: a device mesh with distributed checkpoints, and Lightning where it is."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from launching import ForkedLaunch, Launch, WriteScript
from torch import nn

pytestmark = pytest.mark.ranks

MESH = """
    import os, sys
    import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def state_of(model, optimizer, step):
        weights, states = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": states, "step": step}

    @record
    def main(folder, breaks_after):
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, int(os.environ["WORLD_SIZE"]) // 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        first = 0
        if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
            state = state_of(model, optimizer, 0)
            dcp.load(state, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            first = state["step"]
        for step in range(first, 4):
            torch.manual_seed(10 * step + mesh["dp"].get_local_rank())
            inputs = torch.randn(4, 8)
            loss = (model(inputs) - inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step + 1 == breaks_after and first == 0:
                dcp.save(state_of(model, optimizer, step + 1), checkpoint_id=folder)
                raise RuntimeError("this attempt ends here")
        os.write(1, f"rank {dist.get_rank()} loss {loss.item():.6f}\\n".encode())
        dist.destroy_process_group()

    if __name__ == "__main__":
        main(sys.argv[1], int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    "num_ranks", [2, pytest.param(4, marks=pytest.mark.with_all)]
)  # what restarts is the launcher's
def test_a_script_with_a_device_mesh_goes_on_from_its_distributed_checkpoint_after_a_restart(
    num_ranks: int, tmp_path: Path, script: WriteScript, launch_forked: ForkedLaunch
) -> None:
    train = script(MESH)
    broken = launch_forked("--nproc-per-node", num_ranks, "--max-restarts", 1, train, tmp_path / "checkpoint", 2)
    assert broken.returncode == 0, broken.stderr
    assert "started 2 times" in broken.stderr
    assert (tmp_path / "checkpoint" / ".metadata").exists()
    found = {int(words[1]): float(words[3]) for words in map(str.split, broken.stdout.splitlines())}
    first, second = losses_in_one_process()
    assert abs(first - second) > 1e-3
    expected = {rank: first if rank < num_ranks // 2 else second for rank in range(num_ranks)}
    assert found == pytest.approx(expected, abs=2e-5)  # printed with six digits


def losses_in_one_process() -> list[float]:
    """Return the last loss of each replica of the script's training, which nothing interrupts here."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            losses = []
            for replica in range(2):
                torch.manual_seed(10 * step + replica)
                inputs = torch.randn(4, 8)
                losses.append((model(inputs) - inputs).square().mean())
            torch.stack(losses).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [loss.item() for loss in losses]


LIGHTNING = """
    import os
    import lightning
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(8, 1)
        def training_step(self, batch, index):
            return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(32, 8)
    off = dict.fromkeys(["logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"], False)
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **off)
    model = Net()
    trainer.fit(model, DataLoader(TensorDataset(inputs, inputs[:, :1]), batch_size=4))
    weight = model.net.weight.detach().sum().item()
    environment = type(trainer.strategy.cluster_environment).__name__
    os.write(1, f"{trainer.global_rank} of {trainer.world_size} {environment} {weight:.6f}\\n".encode())
"""


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_lightning_takes_the_ranks_for_torchruns(script: WriteScript, launch: Launch) -> None:
    done = launch("--nproc-per-node", 2, script(LIGHTNING))
    assert done.returncode == 0, done.stderr
    first, second = sorted(done.stdout.splitlines())
    assert first.startswith("0 of 2 TorchElasticEnvironment ")
    assert second == first.replace("0 of 2", "1 of 2")
