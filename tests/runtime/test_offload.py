"""An optimizer that does its steps on the host: what it computes, and what others see of it."""

from __future__ import annotations

import torch
from torch import nn

from paraplan.runtime.optimizers.offload import keep_on_host


def trained(*, is_offloaded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model[2].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if is_offloaded:
        keep_on_host(optimizer)
    for step in range(4):
        if step == 2:
            with torch.no_grad():
                model[0].weight.mul_(0.5)  # as loading a checkpoint does
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer


def test_steps_on_the_host_are_those_of_the_optimizer() -> None:
    expected, _ = trained(is_offloaded=False)
    model, _ = trained(is_offloaded=True)
    for name, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


def test_between_steps_groups_state_and_gradients_are_those_of_the_parameters() -> None:
    model, optimizer = trained(is_offloaded=True)
    _, plain = trained(is_offloaded=False)
    assert [held for group in optimizer.param_groups for held in group["params"]] == [*model.parameters()]
    assert set(optimizer.state) == {held for held in model.parameters() if held.requires_grad}
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in plain.param_groups]
    assert all(held.grad is not None for held in optimizer.state)
