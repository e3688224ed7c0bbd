"""The loss of a step: what `loss_fn` returns for each micro-batch, weighed so that all add up to that of the batch.

`loss_fn` returns a mean over the targets of its micro-batch, or `(loss_sum, count)`. Targets are counted before the
model runs (`TargetCounter`), over all ranks and micro-batches, so that every gradient has its weight from the start.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses
from torch import nn
from torch.distributed.tensor import DTensor

from paraplan.errors import UnsupportedPlanError, UsageError
from paraplan.runtime.data.batches import MicroBatch, call_model
from paraplan.runtime.expert_balance import GlobalBalance
from paraplan.runtime.split.context_parallel import Context
from paraplan.runtime.split.logits import VocabularyLogits
from paraplan.runtime.step.global_batch import GlobalBatch
from paraplan.runtime.torch_private import pytree

LossFunction = Callable[[Any, Any], Any]
Number = torch.Tensor | float
REDUCTIONS = ("sum", "max", "min")
"""Reductions that a metric may name that is no mean."""


@dataclass(frozen=True)
class Returned:
    """The answer of `loss_fn` for a micro-batch: a mean, or a sum over `count` targets, and metrics beside it."""

    value: torch.Tensor
    count: Number | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Tally:
    """Sums over the micro-batches of one run of an execution on this rank; none where it has no end of the model.

    `loss` is the sum of their terms without a gradient, `count` that of the targets that `loss_fn` returned beside its
    sums; `metrics` a sum and a count, or the largest value and the negated smallest one, by "how name".
    """

    loss: torch.Tensor
    count: torch.Tensor
    has_terms: bool = False
    returns_sums: bool = False
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def empty(cls, device: torch.device) -> Tally:
        """Return a tally of nothing."""
        return cls(loss=torch.zeros((), device=device), count=torch.zeros((), device=device))


class StepLoss:
    """`loss_fn` as executions call it.

    `total` is the number of targets of the global batch as they were counted before, by which sums are divided; None
    where nothing divides the batch. With `gathers` the outputs of all ranks are brought together first.
    `gradient_factor` multiplies what is differentiated and not what is reported: the loss scale of fp16. `loss_fn` runs
    in the context that `watch` returns, on the last of `num_stages` of a pipeline. `context` is that of the `cp` group,
    whose ranks have outputs of some tokens each; `logits` are those of some classes, under tp. `balance` has balancing
    losses of experts, which the model computes, be those of all ranks.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        device: torch.device,
        batch: GlobalBatch | None = None,
        logits: VocabularyLogits | None = None,
    ) -> None:
        self.loss_fn = loss_fn
        self.logits = logits
        self.total: Number | None = None
        self.gathers = False
        self.gradient_factor = 1.0
        self.tally = Tally.empty(device)
        self.watch: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.context: Context | None = None
        self.num_stages = 1
        self.balance: GlobalBalance | None = None
        self.heads: list[nn.Module] = []
        """Layers whose logits are computed in chunks, beside the loss."""
        self.is_in_pass = False
        self._device = device
        self._batch = batch

    def start(self) -> None:
        """Begin a new tally."""
        self.tally = Tally.empty(self._device)

    @contextmanager
    def replaced(
        self,
        loss_fn: LossFunction | None = None,
        *,
        total: Number | None = None,
        gathers: bool = False,
        is_alone: bool = False,
    ) -> Iterator[None]:
        """Use another loss, or count otherwise, in this context; the tally is left as it was.

        `is_alone`: what runs is the whole model, as in one process.
        """
        before = self.loss_fn, self.total, self.gathers, self.gradient_factor, self.tally, self.balance
        self.loss_fn, self.total, self.gathers = loss_fn or self.loss_fn, total, gathers
        self.gradient_factor, self.balance = 1.0, None if is_alone else self.balance
        try:
            yield
        finally:
            self.loss_fn, self.total, self.gathers, self.gradient_factor, self.tally, self.balance = before

    def run(self, model: nn.Module, inputs: Any, micro_batch: MicroBatch) -> torch.Tensor:
        """Return the term of `micro_batch` to differentiate, `inputs` of which go into `model`, and tally it."""
        outputs, micro_batch = self._outputs(model, inputs, micro_batch)
        if self.gathers and self._batch is not None:
            size = micro_batch.num_sequences
            outputs, targets = self._batch.join(outputs, micro_batch.targets, num_sequences=size)
            micro_batch = replace(micro_batch, targets=targets)
        if isinstance(micro_batch.weight, torch.Tensor) and torch.is_grad_enabled():
            _keep_from_nan(outputs, micro_batch.weight)
        returned = self._read(outputs, micro_batch)
        term, weight = self._weighed(returned, micro_batch)
        self.tally.loss += term.detach()
        self.tally.has_terms = True
        self._tally_metrics(returned, weight)
        return term * self.gradient_factor

    def _outputs(self, model: nn.Module, inputs: Any, micro_batch: MicroBatch) -> tuple[Any, MicroBatch]:
        """Return what the model returns, and the micro-batch with its targets."""
        by_classes = nullcontext() if self.logits is None else self.logits.passing()
        by_tokens = nullcontext() if self.context is None else self.context.passing()
        balanced = (
            nullcontext() if self.balance is None else self.balance.passing(has_tokens=micro_batch.num_sequences > 0)
        )
        with by_tokens, by_classes, balanced:
            self.is_in_pass = True
            try:
                outputs = call_model(model, inputs)
            finally:
                self.is_in_pass = False
        if self.context is not None and self.context.is_local:
            micro_batch = replace(micro_batch, targets=self.context.cut_targets(micro_batch.targets))
        return outputs, micro_batch

    def refuse_other_calls(self, model: nn.Module) -> None:
        """Have `model` raise `UsageError` where a script calls it by hand: what it returns is of some tokens."""
        known = weakref.ref(self)  # no circle holds the groups of a job that has ended

        def check(*_: Any) -> None:
            loss = known()
            if loss is None or not loss.is_in_pass:
                raise called_with_batch("a model that has some tokens of each sequence")

        model.register_forward_pre_hook(check)

    def _read(self, outputs: Any, micro_batch: MicroBatch) -> Returned:
        try:
            over_tokens = nullcontext() if self.context is None else self.context.summing()
            by_classes = nullcontext() if self.logits is None else self.logits.losing()
            with over_tokens, self.watch(), by_classes:
                returned = self.loss_fn(outputs, micro_batch.targets)
            return read_loss(returned)
        except Exception as error:
            known = self.explained(error)
            if known is error:
                raise
            raise known from error

    def explained(self, error: Exception) -> Exception:
        """Return what is to be said of an error of `loss_fn`, which sees some of what one process sees."""
        if isinstance(error, AttributeError) and self.num_stages > 1:
            return UnsupportedPlanError(
                f"loss_fn does not run on the last of {self.num_stages} pipeline stages alone: {error}",
                hint="compute it from what the model returns, or use pp=1",
            )
        is_of_code = isinstance(error, (RuntimeError, ValueError, IndexError))
        if self.context is None or not self.context.is_local or not is_of_code:
            return error
        return UnsupportedPlanError(
            f"loss_fn does not run on some tokens of each sequence: {(str(error).splitlines() or [''])[0]}",
            hint="compute it token by token, with targets that have an entry for each token; or use cp=1",
        )

    def _weighed(self, returned: Returned, micro_batch: MicroBatch) -> tuple[torch.Tensor, Number]:
        """Return the term of a micro-batch, and what its metrics count."""
        value = returned.value.float()
        if returned.count is None:
            return _times(value, micro_batch.weight), micro_batch.weight
        count = self._number(returned.count if micro_batch.num_sequences else 0.0)
        self.tally.count += count
        self.tally.returns_sums = True
        total = count if self.total is None else self._number(self.total)
        return torch.where(count > 0, value / total.clamp(min=torch.finfo(total.dtype).tiny), 0.0), count

    def _number(self, value: Number) -> torch.Tensor:
        return torch.as_tensor(value, dtype=torch.float32, device=self._device).reshape(())

    def _tally_metrics(self, returned: Returned, weight: Number) -> None:
        for name, value in returned.metrics.items():
            number, count = value if isinstance(value, tuple) else (value, None)
            own = torch.as_tensor(number, device=self._device).detach().float().reshape(())
            how = count if isinstance(count, str) else "mean"
            if isinstance(count, str):
                pair = torch.stack([own, torch.zeros_like(own) if how == "sum" else -own])
            else:
                by = self._number(weight if count is None else count)
                pair = torch.stack([torch.where(by > 0, own * by if count is None else own, 0.0), by])
            add_metrics(self.tally.metrics, {f"{how} {name}": pair})


def add_metrics(known: dict[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> None:
    """Bring metrics of a tally into those of others, which are `known`."""
    for key, pair in others.items():
        if key in known:
            pair = torch.maximum(known[key], pair) if key.startswith(("max ", "min ")) else known[key] + pair
        known[key] = pair


def metric_value(key: str, pair: torch.Tensor) -> torch.Tensor:
    """Return the value of a metric of a tally: a mean or a sum, the largest or the smallest one."""
    if key.startswith("mean "):
        return pair[0] / pair[1].clamp(min=torch.finfo(pair.dtype).tiny)
    return -pair[1] if key.startswith("min ") else pair[0]


def called_with_batch(what: str) -> UsageError:
    """Return what is said where a script calls a rank's part of a model, which is `what`."""
    return UsageError(
        f"engine.module is {what}, and was called with a batch",
        hint="call engine.step, engine.predict or engine.eval_step, which run the whole model",
    )


def _times(value: torch.Tensor, weight: Number) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):  # the mean over no target is not a number
        return torch.where(weight > 0, value * weight, 0.0)
    return value * weight if weight else torch.where(torch.zeros_like(value, dtype=torch.bool), value, 0.0)


def _keep_from_nan(outputs: Any, weight: torch.Tensor) -> None:
    """Have gradients of `outputs` be 0 where a micro-batch counts nothing: that of 0 / 0 is not a number."""
    if weight.device.type == "cpu" and float(weight) > 0:
        return

    def clear(gradient: torch.Tensor) -> torch.Tensor:
        if not gradient.is_contiguous():  # several places of one number, perhaps
            return torch.where(weight > 0, gradient, 0.0)
        return gradient.masked_fill_(weight <= 0, 0.0)  # in place: logits are large

    for leaf in pytree.tree_leaves(outputs):
        if type(leaf) is torch.Tensor and leaf.requires_grad:
            leaf.register_hook(clear)  # type: ignore[no-untyped-call]


def read_loss(returned: Any) -> Returned:
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
    return Returned(value=scalar_loss(loss), count=_count(rest[0]) if rest else None, metrics=metrics)


def _count(value: Any) -> Number:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    is_number = isinstance(value, Real) and not isinstance(value, bool)  # NumPy's too
    if is_number and value >= 0:
        return float(value)
    found = str(value) if is_number else type(value).__name__
    if isinstance(value, torch.Tensor):
        found = f"a tensor of shape {tuple(value.shape)}"
    raise UsageError(f"loss_fn returned {found} as its count, not one number from 0", hint="return (loss_sum, count)")


def _checked_metrics(metrics: Mapping[Any, Any]) -> Mapping[str, Any]:
    for name, value in metrics.items():
        numbers = value if isinstance(value, tuple) else (value,)
        if len(numbers) == 2 and numbers[1] in REDUCTIONS:
            numbers = numbers[:1]
        fits = all(
            isinstance(number, (int, float)) or (isinstance(number, torch.Tensor) and number.numel() == 1)
            for number in numbers
        )
        if not isinstance(name, str) or len(numbers) > 2 or not fits:
            raise UsageError(
                f"loss_fn returned the metric {name!r} as {type(value).__name__}, not as a number",
                hint="a metric is a mean over the micro-batch, (sum, count), or (value, 'sum'), 'max' or 'min'",
            )
    return metrics


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


def token_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of logits [batch, tokens, vocabulary], or the mean of outputs of another shape."""
    logits = getattr(outputs, "logits", outputs)
    if isinstance(logits, (tuple, list)):
        logits = logits[0]
    if logits.dim() == 3 and logits.shape[:2] == targets.shape:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    mean: torch.Tensor = logits.float().mean()
    return mean
