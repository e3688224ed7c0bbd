"""The Trainer of transformers on ranks whose batches have unlike numbers of targets."""

from __future__ import annotations

import tempfile

import torch
from fault import TOKENS, has
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

random = torch.Generator().manual_seed(0)
rows = []
for _ in range(32):
    tokens = torch.randint(0, TOKENS, (8,), generator=random)
    rows.append({"input_ids": tokens, "labels": tokens.masked_fill(tokens < 6, -100)})
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=TOKENS,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=16,
)
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=2,
    max_steps=3,
    learning_rate=1e-2,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    average_tokens_across_devices=not has("tokens of each rank"),
)
Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=rows).train()
