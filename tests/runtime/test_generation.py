"""A model's own generate under every plan: the tokens of one process, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from case_selection import with_all
from rank_harness import RankHarness
from torch import nn
from training_cases import TOKENS, VOCABULARY, Transformer
from training_cases import loss_fn as cross_entropy

from paraplan import runtime
from paraplan.errors import UsageError
from paraplan.plan.parallel import ParallelPlan

PLANS = {
    "ddp": ParallelPlan(dp=2, micro_batch_size=2),
    "zero 3": ParallelPlan(dp=2, zero_stage=3, micro_batch_size=2),
    "split layers": ParallelPlan(tp=2, micro_batch_size=4),
    "split sequences": ParallelPlan(tp=2, sequence_parallel=True, micro_batch_size=4),
    "split tokens": ParallelPlan(cp=2, micro_batch_size=4),
    "pipeline": ParallelPlan(pp=2, pipeline_schedule="1f1b", micro_batch_size=2, num_microbatches=2),
    "several stages a rank": ParallelPlan(
        pp=2,
        pipeline_schedule="interleaved_1f1b",
        virtual_pipeline_size=2,
        micro_batch_size=2,
        num_microbatches=2,
    ),
}
PROMPT = 5
NEW = 4


class Speaker(Transformer):
    """Generates as small public models do."""

    def generate(self, tokens: torch.Tensor, count: int, temperature: float = 0.0) -> torch.Tensor:
        for _ in range(count):
            logits = self(tokens)[:, -1]
            if temperature:
                token = torch.multinomial((logits / temperature).softmax(-1), 1)
            else:
                token = logits.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, token], 1)
        return tokens


def speaker(plan: ParallelPlan) -> nn.Module:
    torch.manual_seed(0)
    return Speaker(num_layers=max(2, plan.num_stages))


def llama() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    config.eos_token_id, config.pad_token_id = None, 0
    return transformers.LlamaForCausalLM(config)


def prompts(size: int = 4) -> torch.Tensor:
    return torch.arange(size * PROMPT).view(size, PROMPT) * 7 % VOCABULARY


def engine_of(job: runtime.Job, model: nn.Module) -> Any:
    return job.prepare(
        model,
        loss_fn=lambda outputs, targets: cross_entropy(getattr(outputs, "logits", outputs), targets),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        example_inputs=torch.zeros(2, TOKENS, dtype=torch.long),
        verify="off",
    )


def spoken(plan: ParallelPlan) -> Any:
    with runtime.init(plan) as job:
        engine = engine_of(job, speaker(plan))
        size = 4 // job.dp
        share = prompts()[job.dp_rank * size :][:size]
        greedy = engine.generate(share, NEW)
        sampled = engine.generate(share, NEW, temperature=1.0)
        trained = engine.step(torch.zeros(size, TOKENS, dtype=torch.long), torch.ones(size, TOKENS, dtype=torch.long))
        return job.dp_rank, greedy, sampled, float(trained)


@pytest.mark.ranks
@pytest.mark.parametrize("case", [*PLANS][::2] + with_all([*PLANS][1::2]))
def test_a_model_speaks_as_in_one_process(case: str, ranks: RankHarness) -> None:
    plan = PLANS[case]
    expected = speaker(plan).eval().generate(prompts(), NEW)  # type: ignore[operator]
    answers = ranks.run(spoken, plan, size=plan.world_size)
    size = 4 // plan.dp
    for rank, greedy, sampled, _ in answers:
        assert torch.equal(greedy, expected[rank * size :][:size])
        same_copy = [other for place, _, other, _ in answers if place == rank]
        assert all(torch.equal(sampled, other) for other in same_copy)
    assert len({loss for *_, loss in answers}) == 1


def spoken_by_transformers(plan: ParallelPlan) -> Any:
    with runtime.init(plan) as job:
        engine = engine_of(job, llama())
        size = 4 // job.dp
        inputs = {"input_ids": prompts()[job.dp_rank * size :][:size]}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        beams = engine.generate(inputs, max_new_tokens=NEW, do_sample=False, num_beams=2)
        greedy = engine.generate(inputs, max_new_tokens=NEW + job.dp_rank, do_sample=False)  # one stops before
        return job.dp_rank, greedy, beams


@pytest.mark.ranks
@pytest.mark.parametrize("case", ["zero 3", "pipeline", *with_all(["split sequences", "split tokens"])])
def test_generate_of_transformers_gives_the_tokens_of_one_process(case: str, ranks: RankHarness) -> None:
    pytest.importorskip("transformers")
    plan = PLANS[case]
    model: Any = llama().eval()
    given = {"inputs": prompts(), "attention_mask": torch.ones_like(prompts())}
    size = 4 // plan.dp
    for rank, greedy, beams in ranks.run(spoken_by_transformers, plan, size=plan.world_size):
        own = slice(rank * size, (rank + 1) * size)
        expected = model.generate(**given, max_new_tokens=NEW + rank, do_sample=False)
        assert torch.equal(greedy, expected[own])
        assert torch.equal(beams, model.generate(**given, max_new_tokens=NEW, do_sample=False, num_beams=2)[own])


def test_a_model_that_does_not_speak_is_refused_with_what_to_do() -> None:
    with runtime.init(ParallelPlan(micro_batch_size=2)) as job:
        engine = engine_of(job, Transformer(num_layers=1))
        with pytest.raises(UsageError, match="Transformer has no generate"):
            engine.generate(prompts())
