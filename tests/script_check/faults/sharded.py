"""Parameters in shards: both of torch's FSDP."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fault import FAULT, RANK, TOKENS, WORLD, batch, count_of, has, reduce_gradients, sum_of_losses
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

FIRST = ("one rank a shard", "ignored module", "decay by dimensions")
IS_HYBRID = FAULT == "unlike replicas"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 8)
        self.norm = nn.LayerNorm(8)
        self.adapter = nn.Linear(8, 8)
        self.head = nn.Linear(8, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embedding(tokens))
        return self.head(hidden + self.adapter(hidden).tanh())


class Muon(torch.optim.Optimizer):
    """Steps by the gradient made more orthogonal: one step of Newton and Schulz from a matrix of norm 1."""

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            whole = parameter.grad.to_local() if has("orthogonal shards") else parameter.grad.full_tensor()
            if whole.ndim == 2:
                matrix = whole / whole.norm()
                whole = 1.5 * matrix - 0.5 * matrix @ matrix.T @ matrix
            local = parameter.to_local()
            change = whole if len(whole) == len(local) else whole.chunk(WORLD)[RANK]
            local.sub_(change, alpha=0.1)


dist.init_process_group("nccl")
torch.manual_seed(RANK if has("unlike replicas") else 0)
net = Net()
late = net.adapter
if FAULT == "one rank a shard":
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard"))
    strategy = ShardingStrategy.HYBRID_SHARD if has("one rank a shard") else ShardingStrategy.NO_SHARD
    model = FullyShardedDataParallel(
        net,
        device_mesh=mesh if has("one rank a shard") else None,
        sharding_strategy=strategy,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
elif FAULT in FIRST:
    ignored = [net.adapter] if has("ignored module") else None
    model = FullyShardedDataParallel(net, ignored_modules=ignored, use_orig_params=True, device_id=torch.device("cpu"))
else:
    if FAULT == "added later":
        net.adapter = nn.Identity()
    sizes = (2, WORLD // 2) if IS_HYBRID else (WORLD,)
    names = ("replicate", "shard") if IS_HYBRID else ("shard",)
    model = fully_shard(net, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))
    if FAULT == "added later":
        net.adapter = late

decays = [one for name, one in model.named_parameters() if name.endswith("weight") and "norm" not in name]
if has("decay by dimensions"):
    decays = [one for name, one in model.named_parameters() if one.ndim > 1]
plain = [one for one in model.parameters() if all(one is not other for other in decays)]
groups = [{"params": decays, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)
if FAULT == "orthogonal shards":
    optimizer = Muon(model.parameters(), {"lr": 0.1})

for _ in range(3):
    optimizer.zero_grad()
    tokens = batch()
    labels = tokens.roll(-1, 1).masked_fill(tokens < 5, -100)
    count = count_of(labels) / WORLD
    if has("mean of each rank"):
        count = float((labels >= 0).sum())
    (sum_of_losses(model(tokens), labels) / count).backward()
    if FAULT == "added later" and not has(FAULT):
        reduce_gradients(late.parameters(), divide_by=WORLD)
    if FAULT == "norm of a shard":
        gradients = [one.grad.to_local() if has(FAULT) else one.grad for one in model.parameters()]
        norm = nn.utils.get_total_norm(gradients)
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm)
    if FAULT == "own clipping":
        whole = torch.stack([one.grad.full_tensor().square().sum() for one in model.parameters()]).sum().sqrt()
        part = torch.stack([one.grad.to_local().square().sum() for one in model.parameters()]).sum().sqrt()
        for parameter in model.parameters():
            parameter.grad.mul_(0.05 / (part if has("own clipping") else whole))
    optimizer.step()
