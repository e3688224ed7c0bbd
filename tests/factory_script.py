"""A user's script with factories of a small model, good and bad, as text."""

from __future__ import annotations

FACTORY = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, hidden):
        return hidden + self.down(torch.relu(self.up(hidden)))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(256, 64)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))
        self.head = torch.nn.Linear(64, 256)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

def build():
    return Model()

def build_with(size):
    return Model()

def build_on_gpu():
    return Model().to("cuda")

def build_from_file():
    return open("weights that are not there")
"""
