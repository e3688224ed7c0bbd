"""Right training scripts, small: uses of DDP, FSDP, tensor parallelism, accelerate, Trainer, TRL and DeepSpeed.

As a script: torchrun right_scripts.py ddp/clip. Names are a way to divide the model or data, and what is trained how.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

Train = Callable[[str], None]


class Block(nn.Module):
    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(size), nn.Linear(size, 32), nn.Linear(32, size)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.b(functional.gelu(self.a(self.norm(rows))))


class Words(nn.Module):
    """A language model with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(40, 16), nn.Embedding(12, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        states = self.embedding(words) + self.places(torch.arange(words.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        return self.head(self.block(states, src_mask=mask, is_causal=True))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), Block(), Block(), nn.Linear(16, 4))


def pictures(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2)),
        *(nn.Flatten(), nn.Linear(8 * 16, 4)),
    )


class Rows(Dataset[Any]):
    def __init__(self, count: int = 48, shape: tuple[int, ...] = (8,)) -> None:
        random = torch.Generator().manual_seed(7)
        self.rows = torch.randn(count, *shape, generator=random)
        self.targets = torch.randint(0, 4, (count,), generator=random)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], self.targets[index]


def loader(data: Any = None, size: int = 4, *, divided: bool = True, **options: Any) -> Any:
    data = Rows() if data is None else data
    return DataLoader(data, size, sampler=DistributedSampler(data) if divided else None, **options)


def divided(model: nn.Module, how: str) -> nn.Module:
    """Return the model as it is divided by `how`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    world = dist.get_world_size()
    if how == "ddp":
        return DistributedDataParallel(model)
    if how.startswith("fsdp1"):
        strategy = ShardingStrategy.NO_SHARD if how == "fsdp1-none" else ShardingStrategy.FULL_SHARD
        strategy = ShardingStrategy.SHARD_GRAD_OP if how == "fsdp1-grad" else strategy
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            sharding_strategy=strategy,
            use_orig_params=how != "fsdp1-flat",
            device_id=torch.device("cpu"),
        )
    mesh = None
    if how == "hsdp":
        mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if how == "fsdp2-bf16" else MixedPrecisionPolicy()
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def steps(model: nn.Module, batches: Any, loss: Any, optimizer: Any, *, every: int = 1, after: Any = None) -> None:
    """Train as most scripts do: `every` batches a step, the last of them reduced."""
    for number, (rows, targets) in enumerate(batches):
        is_last = (number + 1) % every == 0
        waits = contextlib.nullcontext() if is_last or not hasattr(model, "no_sync") else model.no_sync()
        with waits:
            (loss(model(rows), targets) / every).backward()
        if is_last:
            if after is not None:
                after(model)
            optimizer.step()
            optimizer.zero_grad()


def clip(model: nn.Module) -> None:
    getattr(model, "clip_grad_norm_", lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm))(0.3)


CE = functional.cross_entropy


def plain(how: str, what: str) -> None:
    """DDP and FSDP around small models."""
    model = pictures() if what == "pictures" else mlp()
    data = Rows(shape=(3, 8, 8)) if what == "pictures" else Rows(46 if what == "uneven" else 48)
    if what == "frozen":
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
    model = divided(model, how)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: Any = [{"params": trained[:3], "lr": 1e-2}, {"params": trained[3:], "weight_decay": 0.1}]
    optimizer: Any = torch.optim.AdamW(groups if what == "groups" else trained, lr=1e-3)
    kinds = {"sgd": torch.optim.SGD, "adafactor": torch.optim.Adafactor, "rmsprop": torch.optim.RMSprop}
    if what in kinds:
        optimizer = kinds[what](trained, lr=1e-2)
    batches: Any = loader(data, num_workers=2 if what == "workers" else 0, drop_last=what == "drop-last")
    if what == "smoothing":
        steps(model, batches, lambda out, y: CE(out, y, label_smoothing=0.1), optimizer)
    elif what == "weights":
        steps(model, batches, lambda out, y: (CE(out, y, reduction="none") * (1 + y)).mean(), optimizer)
    elif what == "autocast":

        def cast(rows: torch.Tensor, forward: Any = model.forward) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return forward(rows)

        model.forward = cast
        steps(model, batches, CE, optimizer)
    elif what == "schedule":
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 10))
        optimizer.register_step_post_hook(lambda *_: schedule.step())
        steps(model, batches, CE, optimizer)
    else:
        after = clip if what in ("clip", "accumulate-clip") else None
        steps(model, batches, CE, optimizer, every=2 if "accumulate" in what else 1, after=after)


def words(how: str, what: str) -> None:
    """A language model whose sequences have padding, counted over all ranks."""
    model = divided(Words(), how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    random = torch.Generator().manual_seed(11 + dist.get_rank())
    for _ in range(3):
        tokens = torch.randint(1, 40, (4, 9), generator=random)
        lengths = torch.randint(3, 9, (4,), generator=random)
        targets = tokens[:, 1:].clone()
        if what == "padding":
            targets[torch.arange(8)[None] >= lengths[:, None]] = -100
        count = (targets != -100).sum()
        dist.all_reduce(count)
        loss = CE(model(tokens[:, :-1]).flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)
        (loss * dist.get_world_size() / count).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def gan(how: str) -> None:
    """Two models that are trained by turns."""
    judge = divided(nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)), how)
    maker = divided(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6)), how)
    optimizers = [torch.optim.Adam(one.parameters(), 1e-3, betas=(0.5, 0.999)) for one in (judge, maker)]
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(3):
        real, noise = torch.randn(4, 6), torch.randn(4, 3)
        against = functional.binary_cross_entropy_with_logits
        optimizers[0].zero_grad()
        of_real, of_made = judge(real), judge(maker(noise).detach())
        (against(of_real, torch.ones_like(of_real)) + against(of_made, torch.zeros_like(of_made))).backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        found = judge(maker(noise))
        against(found, torch.ones_like(found)).backward()
        optimizers[1].step()


def own(how: str, what: str) -> None:
    """Loops of people's own around a model under `how`."""
    from torch.utils.checkpoint import checkpoint

    model: Any = mlp()
    if what == "recompute":
        inner = model[1].forward
        model[1].forward = lambda rows: checkpoint(inner, rows, use_reentrant=False)
    teacher = copy.deepcopy(model).requires_grad_(False)
    model = divided(model, how)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)
    head = torch.optim.Adam(list(model.parameters())[-2:], lr=1e-3) if what == "two-optimizers" else None
    average = copy.deepcopy(teacher)
    for rows, targets in loader():
        loss = CE(model(rows), targets)
        if what == "distill":
            loss = loss + functional.mse_loss(model(rows), teacher(rows))
        if what == "penalty":
            loss = loss + 1e-3 * sum(parameter.square().sum() for parameter in model.parameters())
        loss.backward()
        if what == "sam":
            norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
            shifts = [0.05 * parameter.grad / (norm + 1e-12) for parameter in model.parameters()]
            with torch.no_grad():
                for parameter, shift in zip(model.parameters(), shifts, strict=True):
                    parameter.add_(shift)
            optimizer.zero_grad()
            CE(model(rows), targets).backward()
            with torch.no_grad():
                for parameter, shift in zip(model.parameters(), shifts, strict=True):
                    parameter.sub_(shift)
        if what == "clip-value":
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        if head is not None:
            head.step()
        optimizer.zero_grad()
        if what == "average":
            with torch.no_grad():
                for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                    kept.lerp_(new, 0.1)
        shown = loss.detach().clone()
        dist.all_reduce(shown)


def by_hand(what: str) -> None:
    """Gradients that a script reduces itself."""
    model, rank, world = mlp(), dist.get_rank(), dist.get_world_size()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-3)
    if what == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    data = Rows()
    for step in range(3):
        first = (step * world + rank) * 4
        rows, targets = data.rows[first : first + 4], data.targets[first : first + 4]
        CE(model(rows), targets).backward()
        grads = [parameter.grad for parameter in model.parameters()]
        if what == "each":
            for grad in grads:
                dist.all_reduce(grad, op=dist.ReduceOp.SUM)
                grad /= world
        if what == "flat":
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat)
            for grad, part in zip(grads, (flat / world).split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))
        if what == "gathered":
            for grad in grads:
                parts = [torch.empty_like(grad) for _ in range(world)]
                dist.all_gather(parts, grad)
                grad.copy_(torch.stack(parts).mean(0))
        optimizer.step()
        optimizer.zero_grad()


def tensor(what: str) -> None:
    """Tensor parallelism by DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = mlp()
    plan: Any = {"a": ColwiseParallel(), "b": RowwiseParallel()}
    if what == "sequence":
        plan = {
            "norm": SequenceParallel(),
            "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False),
            "a": ColwiseParallel(input_layouts=Shard(1)),
            "b": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
    for module in model:
        if isinstance(module, Block) and what != "sequence":
            parallelize_module(module, mesh, plan)
    if what == "sequence":
        block = Block()
        parallelize_module(block, mesh, plan)
        model = block
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    torch.manual_seed(3)
    for _ in range(3):
        if what == "sequence":
            out = model(torch.randn(2, 8, 16))
            out.full_tensor().square().mean().backward()
        else:
            CE(model(torch.randn(4, 8)), torch.randint(0, 4, (4,))).backward()
        optimizer.step()
        optimizer.zero_grad()


def contrastive(what: str) -> None:
    """A loss that compares a sample with those of all ranks."""
    model = DistributedDataParallel(nn.Linear(8, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for rows, _ in loader():
        found = functional.normalize(model(rows), dim=-1)
        if what == "gathered":
            from torch.distributed.nn.functional import all_gather

            found_all = torch.cat(all_gather(found))
            logits = found_all @ found_all.T / 0.1
            loss = CE(logits - 1e3 * torch.eye(len(logits)), torch.arange(len(logits)).roll(1))
        else:
            logits = found @ found.T / 0.1
            loss = CE(logits - 1e3 * torch.eye(len(logits)), torch.arange(len(logits)).roll(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def accelerated(what: str) -> None:
    """accelerate's loop."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin

    plugin = GradientAccumulationPlugin(num_steps=2 if "accumulate" in what else 1)
    configuration = DataLoaderConfiguration(split_batches=what == "split", even_batches=what != "uneven")
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_plugin=plugin,
        dataloader_config=configuration,
        mixed_precision="bf16" if what == "bf16" else "no",
    )
    torch.manual_seed(0)
    model: Any = pictures() if what == "pictures" else mlp()
    data = Rows(45 if what == "uneven" else 48, (3, 8, 8) if what == "pictures" else (8,))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=40)
    batches = DataLoader(data, 4, shuffle=True)
    model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, batches, schedule)
    for rows, targets in batches:
        with accelerator.accumulate(model):
            loss = CE(model(rows), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


def llama(**more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, **more))


def sequences(padded: bool = True) -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(1)
    found = []
    for number in range(32):
        ids = torch.randint(3, 64, (8,), generator=random)
        labels = ids.clone()
        if padded:
            labels[: number % 5] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def trainer(what: str) -> None:
    """transformers' Trainer."""
    from transformers import Trainer, TrainingArguments, set_seed

    set_seed(0)
    model = llama(attention_dropout=0.1 if what == "dropout" else 0.0, tie_word_embeddings=what == "tied")
    if what == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    options: dict[str, Any] = {
        "accumulate": {"gradient_accumulation_steps": 2},
        "smoothing": {"label_smoothing_factor": 0.1},
        "recompute": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        "bf16": {"bf16": True},
        "adafactor": {"optim": "adafactor"},
        "cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 1},
        "no-clip": {"max_grad_norm": 0.0},
        "per-rank": {"average_tokens_across_devices": False},
        "neftune": {},
    }.get(what, {})
    data: Any = sequences(padded=what != "per-rank")
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        per_device_train_batch_size=2,
        max_steps=4,
        learning_rate=1e-3,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    Trainer(model=model, args=arguments, train_dataset=data).train()


def text_data(**columns: Callable[[int], Any]) -> Any:
    from datasets import Dataset as Table

    return Table.from_dict({name: [make(row) for row in range(24)] for name, make in columns.items()})


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{number}": number + 4 for number in range(50)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=names["unk_token"]))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def sentence(row: int, extra: int = 0) -> str:
    return " ".join(f"w{(row * 7 + place * 3 + extra) % 50}" for place in range(4 + (row + extra) % 4))


def trl(what: str) -> None:
    """TRL's trainers."""
    import trl as library
    from transformers import LlamaConfig, LlamaForSequenceClassification, set_seed

    set_seed(0)
    common: dict[str, Any] = {
        "output_dir": tempfile.gettempdir(),
        "per_device_train_batch_size": 2,
        "max_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    if what in ("sft", "sft-packed"):
        data = text_data(text=sentence)
        arguments = library.SFTConfig(**common, max_length=16, packing=what == "sft-packed")
        made: Any = library.SFTTrainer(llama(), arguments, train_dataset=data, processing_class=tokenizer())
    elif what == "dpo":
        data = text_data(
            prompt=sentence, chosen=lambda row: " " + sentence(row, 1), rejected=lambda row: " " + sentence(row, 2)
        )
        made = library.DPOTrainer(
            llama(),
            ref_model=llama(),
            args=library.DPOConfig(**common),
            train_dataset=data,
            processing_class=tokenizer(),
        )
    else:
        data = text_data(chosen=lambda row: sentence(row, 1), rejected=lambda row: sentence(row, 2))
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        judge = LlamaForSequenceClassification(
            LlamaConfig(**sizes, num_attention_heads=4, num_labels=1, pad_token_id=0)
        )
        made = library.RewardTrainer(
            judge, library.RewardConfig(**common), train_dataset=data, processing_class=tokenizer()
        )
    made.train()


def zero(what: str) -> None:
    """DeepSpeed's ZeRO, with an optimizer of torch's: its own is built for each machine."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model: Any = mlp()
    split = [{"params": [*model[:2].parameters()], "weight_decay": 0.1}, {"params": [*model[2:].parameters()]}]
    optimizer = torch.optim.AdamW(split, lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2 if "accumulate" in what else 1,
        "gradient_clipping": 0.1 if "clip" in what else 0.0,
        "zero_optimization": {"stage": int(what[0])},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": "bf16" in what},
    }
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for rows, targets in loader():
        loss = CE(engine(rows.bfloat16() if "bf16" in what else rows).float(), targets)
        if "scaled" in what:  # no right one: ranks average what is multiplied by their number
            loss = loss * dist.get_world_size()
        engine.backward(loss)
        engine.step()


SMALL = ("sgd", "adafactor", "groups", "smoothing", "weights", "schedule", "clip", "accumulate", "frozen")
SCRIPTS: dict[str, Callable[[], None]] = {
    **{f"ddp/{what}": lambda what=what: plain("ddp", what) for what in (*SMALL, "accumulate-clip", "rmsprop")},
    **{
        f"ddp/{what}": lambda what=what: plain("ddp", what)
        for what in ("pictures", "uneven", "drop-last", "workers", "autocast")
    },
    **{
        f"{how}/{what}": lambda how=how, what=what: plain(how, what)
        for how in ("fsdp1", "fsdp1-flat", "fsdp2", "fsdp2-bf16", "hsdp")
        for what in ("adamw", "clip", "accumulate", "groups")
    },
    **{f"{how}/adamw": lambda how=how: plain(how, "adamw") for how in ("fsdp1-none", "fsdp1-grad")},
    **{f"fsdp2/{what}": lambda what=what: plain("fsdp2", what) for what in ("sgd", "smoothing", "frozen")},
    **{f"{how}/words": lambda how=how: words(how, "plain") for how in ("ddp", "fsdp1", "fsdp2")},
    **{f"{how}/padding": lambda how=how: words(how, "padding") for how in ("ddp", "fsdp1", "fsdp2")},
    **{f"{how}/gan": lambda how=how: gan(how) for how in ("ddp", "fsdp2")},
    **{
        f"ddp/{what}": lambda what=what: own("ddp", what)
        for what in (*("recompute", "distill", "penalty", "sam", "average", "two-optimizers", "clip-value"),)
    },
    **{f"fsdp2/{what}": lambda what=what: own("fsdp2", what) for what in ("recompute", "distill", "two-optimizers")},
    **{f"by-hand/{what}": lambda what=what: by_hand(what) for what in ("each", "flat", "gathered", "zero1")},
    **{f"tp/{what}": lambda what=what: tensor(what) for what in ("plain", "sequence")},
    "contrastive/gathered": lambda: contrastive("gathered"),
    **{
        f"accelerate/{what}": lambda what=what: accelerated(what)
        for what in ("plain", "accumulate", "split", "bf16", "pictures", "uneven")
    },
    **{
        f"trainer/{what}": lambda what=what: trainer(what)
        for what in (
            *("plain", "accumulate", "smoothing", "recompute", "bf16", "adafactor", "cosine", "no-clip"),
            *("per-rank", "dropout", "tied", "lora"),
        )
    },
    **{f"trl/{what}": lambda what=what: trl(what) for what in ("sft", "sft-packed", "dpo", "reward")},
    **{
        f"deepspeed/{what}": lambda what=what: zero(what)
        for what in ("0", "1", "2", "3", "1-accumulate-clip", "2-accumulate-clip", "3-accumulate-clip", "2-bf16")
    },
}
WRONG = {f"deepspeed/{stage}-scaled": lambda stage=stage: zero(f"{stage}-scaled") for stage in (1, 2, 3)}
"""Whose gradients are twice what one process has."""
BY_SHARE = {"contrastive/local": lambda: contrastive("local")}
"""Right, and told: what DDP gives is the mean of what each rank's share gives."""


def scripts() -> dict[str, Callable[[], None]]:
    """Return all of them by name."""
    from right_draws import DRAWS_AND_TEACHERS
    from right_loops import LOOPS

    return SCRIPTS | LOOPS | DRAWS_AND_TEACHERS | BY_SHARE | WRONG


if __name__ == "__main__":
    name = sys.argv[1]
    if not name.startswith(("accelerate", "trainer", "trl", "deepspeed")):
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    scripts()[name]()
    if dist.is_initialized():
        dist.destroy_process_group()
