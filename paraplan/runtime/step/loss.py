"""The loss of a step: what `loss_fn` returns for each micro-batch, weighed so that all add up to that of the batch.

Every micro-batch brings a term to the loss of the global batch. How much it counts is the rule of the loss: as its
share of the sequences, of the targets that its mean goes over, or in full where the loss is a sum. Where the number of
targets shows only when `loss_fn` has run, terms are sums over a provisional number, and the gradients are brought to
the right one after the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paraplan.errors import UnsupportedPlanError, UsageError
from paraplan.runtime.data.batches import MicroBatch, call_model
from paraplan.runtime.shards.split_tensor import SplitError
from paraplan.runtime.split.context_parallel import Context
from paraplan.runtime.step.global_batch import GlobalBatch
from paraplan.runtime.step.loss_counts import (
    LossFollower,
    Mean,
    Number,
    Part,
    Sum,
    Term,
)

LossFunction = Callable[[Any, Any], Any]
LossKind = Literal["whole", "gathered", "sum", "sequences", "targets", "counted", "probe"]

HINT = (
    "return (loss_sum, count) from loss_fn: the sum over the micro-batch, and over how many targets it goes; "
    "where it compares sequences, job.prepare(gather_outputs=True) gives it the outputs of the global batch; or use a "
    "plan of one rank of dp and one micro-batch"
)


@dataclass(frozen=True)
class LossRule:
    """How much the loss of a micro-batch counts in that of the step.

    - whole: the batch is not divided, its loss is the loss.
    - gathered: so it is, once the outputs of all ranks have been brought together.
    - sum: the loss is a sum over sequences, and so is that of the batch.
    - sequences: a mean that counts as many as the micro-batch has sequences.
    - targets: a mean that counts what `count_targets` says; known before the model runs.
    - counted: a mean over targets whose number shows when it is computed.
    - probe: losses are kept one by one, to find out the rule.

    `in_model` says that the model computes the loss itself. `provisional` is what counted sums are divided by until
    their number is known: a power of two, so that the division rounds nothing. `num_others` means are added to the
    first one, each with a count of its own; `counts` are those of the global batch, of all of them, where they had to
    be known before: micro-batches have them in different proportions. `is_followed`: the code has shown the rule.
    """

    kind: LossKind
    in_model: bool = False
    provisional: float = 1.0
    num_others: int = 0
    counts: torch.Tensor | None = None
    is_followed: bool = False


@dataclass(frozen=True)
class Returned:
    """What `loss_fn` returned for a micro-batch: a number, what it is, and metrics beside it.

    `is_sum` says that the number is a sum over `count` targets by the word of `loss_fn` itself; `is_followed` that its
    code shows it to be made of numbers of single sequences.
    """

    value: torch.Tensor
    term: Term | None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    is_sum: bool = False
    is_followed: bool = False

    @property
    def mean(self) -> torch.Tensor:
        """The loss of the micro-batch by itself."""
        if not self.is_sum or not isinstance(self.term, Mean) or self.term.divisor is None:
            return self.value
        return self.value / self.term.divisor

    @property
    def total_and_count(self) -> tuple[torch.Tensor, Number] | None:
        """The sum over all targets, and their number; None where that is not known."""
        if not isinstance(self.term, Mean) or self.term.count is None or self.term.divisor is None:
            return None
        return (self.value if self.is_sum else self.value * self.term.divisor), self.term.count

    def sums(self, num_sequences: int) -> list[tuple[torch.Tensor, Number]]:
        """Return the sum and the number of targets of each mean that was added, in a micro-batch of so many sequences.

        There is one for a mean by itself, and none where the number of targets is not known.
        """
        if not isinstance(self.term, Mean) or not self.term.parts:
            known = self.total_and_count
            return [] if known is None else [known]
        return [
            (part.value * (num_sequences if part.divisor is None else part.divisor), _or_sequences(part, num_sequences))
            for part in self.term.parts
        ]


def _or_sequences(part: Part, num_sequences: int) -> Number:
    return float(num_sequences) if part.count is None else part.count


@dataclass
class Tally:
    """What the micro-batches of one run of an execution came to on this rank; nothing where it has no end of the model.

    `loss` is the sum of their terms without a gradient, `count` that of the counted targets. `spread` [others, 2] holds
    the smallest ratio (negated) and the largest one that the counts of added means have to that of the first, and
    `parts` [1 + others, 2] the sum and the count of each of these; `metrics` a sum and a count by name.
    """

    loss: torch.Tensor
    count: torch.Tensor
    spread: torch.Tensor
    parts: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    returned: list[Returned] = field(default_factory=list)
    failure: Exception | None = None

    @classmethod
    def empty(cls, device: torch.device, num_others: int = 0) -> Tally:
        """Return a tally of nothing."""
        loss, count = torch.zeros((), device=device), torch.zeros((), device=device)
        spread = torch.full((num_others, 2), -torch.inf, device=device)
        return cls(loss=loss, count=count, spread=spread, parts=torch.zeros(num_others + 1, 2, device=device))


class StepLoss:
    """`loss_fn` as executions call it, under the rule that the engine has found.

    `gradient_factor` multiplies what is differentiated and not what is reported: it undoes that data parallelism takes
    means over ranks, and holds the loss scale of fp16. `loss_fn` runs in the context that `watch` returns. `context` is
    that of the `cp` group, whose ranks have outputs of some tokens each.
    """

    def __init__(self, loss_fn: LossFunction, device: torch.device, batch: GlobalBatch | None = None) -> None:
        self.rule = LossRule(kind="whole")
        self.gradient_factor = 1.0
        self.tally = Tally.empty(device)
        self.loss_fn = loss_fn
        self.watch: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.context: Context | None = None
        self._device = device
        self._batch = batch

    def start(self) -> None:
        """Begin a new tally."""
        self.tally = Tally.empty(self._device, self.rule.num_others)

    @contextmanager
    def replaced(self, loss_fn: LossFunction, rule: LossRule) -> Iterator[None]:
        """Use another loss, under `rule`, in this context; the tally is left as it was."""
        kept = self.loss_fn, self.rule, self.gradient_factor, self.tally
        self.loss_fn, self.rule = loss_fn, rule
        try:
            yield
        finally:
            self.loss_fn, self.rule, self.gradient_factor, self.tally = kept

    @contextmanager
    def under(self, rule: LossRule) -> Iterator[None]:
        """Use `loss_fn` under another rule in this context."""
        with self.replaced(self.loss_fn, rule):
            yield

    def run(self, model: nn.Module, inputs: Any, micro_batch: MicroBatch) -> torch.Tensor:
        """Return the term of `micro_batch` to differentiate, `inputs` of which go into `model`, and tally it."""
        if self.rule.kind == "probe":
            return self._probed(model, inputs, micro_batch)
        returned = self._returned(model, inputs, micro_batch)
        term, weight = self._weighed(returned, micro_batch)
        self.tally.loss += term.detach()
        self._tally_metrics(returned, weight)
        return term * self.gradient_factor

    def _probed(self, model: nn.Module, inputs: Any, micro_batch: MicroBatch) -> torch.Tensor:
        """Keep what `loss_fn` returns, or what it raises: other stages of a pipeline are to finish what they began."""
        follower = LossFollower()
        outputs, micro_batch = self._outputs(model, inputs, micro_batch, follower if self.rule.in_model else None)
        try:
            with self._over_tokens(), follower:
                returned = self._read(outputs, micro_batch, follower)
        except Exception as error:  # raised again by who probes, on every rank
            self.tally.failure = error
            return torch.zeros((), device=self._device)
        self.tally.returned.append(returned)
        return returned.value.float().reshape(())

    def _returned(self, model: nn.Module, inputs: Any, micro_batch: MicroBatch) -> Returned:
        # Of targets that are counted before, the follower keeps a mean over none of them from being NaN.
        follower = LossFollower() if self.rule.kind in ("counted", "targets") else None
        watches: AbstractContextManager[Any] = nullcontext() if follower is None else follower
        outputs, micro_batch = self._outputs(model, inputs, micro_batch, follower if self.rule.in_model else None)
        if self.rule.kind == "gathered":
            assert self._batch is not None
            size = micro_batch.num_sequences
            outputs, targets = self._batch.join(outputs, micro_batch.targets, num_sequences=size)
            micro_batch = replace(micro_batch, targets=targets)
        with self._over_tokens(), watches:
            return self._read(outputs, micro_batch, follower)

    def _outputs(
        self, model: nn.Module, inputs: Any, micro_batch: MicroBatch, follower: LossFollower | None
    ) -> tuple[Any, MicroBatch]:
        """Return what the model returns, followed where it computes the loss, and the micro-batch with its targets."""
        watches: AbstractContextManager[Any] = nullcontext() if follower is None else follower
        if self.context is None:
            with watches:
                return call_model(model, inputs), micro_batch
        with self.context.passing(is_watched=follower is not None), watches:
            outputs = call_model(model, inputs)
        if self.context.is_local:
            micro_batch = replace(micro_batch, targets=self.context.cut_targets(micro_batch.targets))
        return outputs, micro_batch

    def _over_tokens(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.context is None else self.context.summing()

    def _read(self, outputs: Any, micro_batch: MicroBatch, follower: LossFollower | None) -> Returned:
        try:
            with self.watch():
                returned = self.loss_fn(outputs, micro_batch.targets)
            return read_loss(returned, follower)
        except SplitError as error:
            raise loss_split_error(error) from error
        except (RuntimeError, ValueError, IndexError) as error:
            if self.context is None or not self.context.is_local:
                raise
            raise UnsupportedPlanError(
                f"loss_fn does not run on some tokens of each sequence: {(str(error).splitlines() or [''])[0]}",
                hint="compute it token by token, with targets that have an entry for each token; or use cp=1",
            ) from error

    def _weighed(self, returned: Returned, micro_batch: MicroBatch) -> tuple[torch.Tensor, Number]:
        """Return the term of a micro-batch, and what its metrics count."""
        if self.rule.kind == "counted":
            return self._counted(returned, micro_batch)
        weight = micro_batch.weight
        assert weight is not None
        value = returned.mean.float()
        if not isinstance(weight, torch.Tensor) and weight:
            return value * weight, weight
        # A micro-batch whose targets are all masked has no mean: its loss is NaN, and its gradients are 0.
        is_counted = torch.as_tensor(weight, device=self._device) > 0
        return torch.where(is_counted, value * weight, 0.0), weight

    def _counted(self, returned: Returned, micro_batch: MicroBatch) -> tuple[torch.Tensor, Number]:
        found = returned.sums(micro_batch.num_sequences)
        if len(found) != 1 + self.rule.num_others:
            raise UsageError(
                "loss_fn returned a mean over a known number of targets at first, and now something else", hint=HINT
            )
        counts = torch.stack([self._number(count) for _, count in found])
        if not micro_batch.num_sequences:  # a piece of zeros
            counts = torch.zeros_like(counts)
        sums = torch.where(counts > 0, torch.stack([total.float() for total, _ in found]), 0.0)
        self.tally.count += counts[0]
        if len(found) > 1:
            ratios = counts[1:] / counts[0]
            bounds = torch.stack([-ratios, ratios], dim=1)
            bounds = torch.where(ratios[:, None].isnan(), -torch.inf, bounds)  # without a target of either
            self.tally.spread = torch.maximum(self.tally.spread, bounds)
            self.tally.parts += torch.stack([sums.detach(), counts], dim=1)
        if self.rule.counts is not None:
            known = self.rule.counts
            return torch.where(known > 0, sums / known.clamp(min=torch.finfo(known.dtype).tiny), 0.0).sum(), counts[0]
        # As one mean: that of the sums that the others would have over as many targets as the first.
        shares = torch.where(counts > 0, counts[0] / counts, 0.0)
        return (sums * shares).sum() / self.rule.provisional, counts[0]

    def _number(self, value: Number) -> torch.Tensor:
        return torch.as_tensor(value, dtype=torch.float32, device=self._device).reshape(())

    def _tally_metrics(self, returned: Returned, weight: Number) -> None:
        for name, value in returned.metrics.items():
            number, count = value if isinstance(value, tuple) else (value, None)
            own = torch.as_tensor(number, device=self._device).detach().float().reshape(())
            by = torch.as_tensor(weight if count is None else count, dtype=torch.float32, device=self._device)
            own = torch.where(by > 0, own * by if count is None else own, 0.0)
            pair = torch.stack([own, by])
            self.tally.metrics[name] = self.tally.metrics.get(name, torch.zeros_like(pair)) + pair


def read_loss(returned: Any, follower: LossFollower | None = None) -> Returned:
    """Return what `loss_fn` returned, in one form.

    That is a mean, or a sum with its count `(loss_sum, count)`; each may have a dict of metrics behind it. Raises
    `UsageError` for anything else, and where the loss has no gradient in training.
    """
    metrics: Mapping[str, Any] = {}
    parts = list(returned) if isinstance(returned, tuple) else [returned]
    if len(parts) > 1 and isinstance(parts[-1], Mapping):
        metrics = _checked_metrics(parts.pop())
    loss, *rest = parts
    if len(rest) > 1:
        raise UsageError(
            f"loss_fn returned {len(parts)} values", hint="return the mean loss, (loss_sum, count), or these and a dict"
        )
    value = scalar_loss(loss)
    if not rest:
        term = None if follower is None else follower.term_of(loss)
        return Returned(value=value, term=term, metrics=metrics, is_followed=_is_followed(follower, loss))
    count, is_followed = _count(rest[0]), _is_followed(follower, loss)
    term = Mean(divisor=count, count=count)
    return Returned(value=value, term=term, metrics=metrics, is_sum=True, is_followed=is_followed)


def _is_followed(follower: LossFollower | None, loss: Any) -> bool:
    return follower is not None and not follower.mixes and isinstance(follower.term_of(loss), (Mean, Sum))


def _count(value: Any) -> Number:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise UsageError(f"loss_fn returned {found} as its count, not one number", hint="return (loss_sum, count)")


def _checked_metrics(metrics: Mapping[Any, Any]) -> Mapping[str, Any]:
    for name, value in metrics.items():
        numbers = value if isinstance(value, tuple) else (value,)
        fits = all(
            isinstance(number, (int, float)) or (isinstance(number, torch.Tensor) and number.numel() == 1)
            for number in numbers
        )
        if not isinstance(name, str) or len(numbers) > 2 or not fits:
            raise UsageError(
                f"loss_fn returned the metric {name!r} as {type(value).__name__}, not as a number",
                hint="a metric is a mean over the micro-batch, or (sum, count)",
            )
    return metrics


def loss_split_error(error: SplitError) -> UnsupportedPlanError:
    """Return what a user can understand of a loss that needs what several ranks hold."""
    return UnsupportedPlanError(
        f"loss_fn mixes logits of the whole vocabulary, and each rank of tp has only a part: {error.message}",
        hint="use torch.nn.functional.cross_entropy, or tp=1",
    )


def split_error(error: SplitError) -> UnsupportedPlanError:
    """Return what a user can understand of a model that needs what several ranks hold."""
    return UnsupportedPlanError(
        f"the model brings together what the ranks of tp hold each a part of: {error.message}",
        hint="use a plan without sequence parallelism, or tp=1",
    )


def scalar_loss(loss: Any) -> torch.Tensor:
    """Return `loss` as a tensor without dimensions; raise `UsageError` where it is not a number to train by."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UsageError(
            f"loss_fn returned {found}, not one number",
            hint="return the mean loss over the micro-batch, or (sum, count)",
        )
    if isinstance(loss, DTensor):
        raise UnsupportedPlanError(
            "loss_fn computes with a weight of the model, of which ranks have shards",
            hint="compute it in the model's forward, or use weight_decay of the optimizer in place of a penalty",
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise UsageError(
            "loss_fn returned a number that has no gradient",
            hint="compute it from the model's outputs, without detach, item or torch.no_grad",
        )
    return loss.reshape(())


def term_kind(returned: Returned) -> LossKind | None:
    """Return the rule that fits what is known of a loss, None where nothing is."""
    if returned.total_and_count is not None:
        return "counted"
    if isinstance(returned.term, Mean):
        return "sequences"
    return "sum" if isinstance(returned.term, Sum) and returned.term.raw is None else None
