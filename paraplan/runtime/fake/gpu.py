"""A GPU that a script sees and no machine has: tensors on it have shapes and no values.

torch runs everything on the CPU: `FakeTensor`s are what lies on the GPU, and models on the host, too large for values;
other tensors of the host are real. What Python asks of a tensor's device is answered as on a GPU. A storage is
the host's where `PlacedTracker` says so: a result is where its operands are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from paraplan.runtime.fake.storage_tracking import (
    DEVICE_OF,
    Phase,
    StorageTracker,
    StorageUse,
)
from paraplan.runtime.fake.torch_private import (
    COPY_TO,
    READ_VALUE,
    DataDependentOutputException,
    FakeTensorMode,
    in_backward,
    local_tensor,
    replaced,
    shape_mode,
)
from paraplan.runtime.torch_private import (
    FakeTensor,
    TorchDispatchMode,
    dtensor_like,
    pytree,
    storage_key,
)

Place = Literal["device", "host"]

_MAY_MIX = ("copy_", "_to_copy", "index", "index_put", "set_", "is_same_size", "_fused_", "_has_compatible", "lift")
_MAKERS_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)


class PlacedTracker(StorageTracker):  # type: ignore[no-untyped-call]  # torch leaves its base untyped
    """Follows the storages of tensors without values, those of the host apart in `host`."""

    def __init__(self, uses_now: Callable[[], dict[int, StorageUse]]) -> None:
        super().__init__(uses_now)
        self.host = StorageTracker(uses_now)
        self.target: Place | None = None

    def anew(self, uses_now: Callable[[], dict[int, StorageUse]]) -> PlacedTracker:
        """Ask `uses_now` from now on, and begin again with the setup."""
        self._uses_now = self.host._uses_now = uses_now
        self.enter("setup")
        return self

    def place_of(self, tensor: Tensor) -> Place:
        """Return where `tensor` lies; one with values is the host's."""
        if isinstance(tensor, DTensor):
            return self.place_of(local_tensor(tensor))
        if not isinstance(tensor, FakeTensor):
            return "host"
        return "host" if storage_key(tensor) in self.host._live else "device"

    def see(self, out: Any, func: Any, args: Any) -> None:
        """Take note of what an operator returned."""
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, FakeTensor):
                self._add(leaf, func, args)

    def enter(self, phase: Phase) -> None:
        """Say what is done from now on; "forward" stands for whole passes."""
        super().enter(phase)
        self.host.enter(phase)

    def settle(self) -> None:
        """Write down what is live now if it is the most there was."""
        super().settle()
        self.host.settle()

    def forget_peak(self) -> None:
        """Begin anew with what is live now."""
        super().forget_peak()
        self.host.forget_peak()

    def mark(self, uses: dict[int, StorageUse]) -> None:
        """Fix the use of storages that are live."""
        super().mark(uses)
        self.host.mark(uses)

    def _add(self, tensor: Tensor, func: Any, args: tuple[Any, ...]) -> None:
        if not isinstance(tensor, FakeTensor) or storage_key(tensor) in self.host._live:
            return
        if (self.target or self._place_of_new(args)) == "host":
            self.host._add(tensor, func, args)
        else:
            super()._add(tensor, func, args)

    def _place_of_new(self, args: Any) -> Place:
        operands = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, FakeTensor)]
        return "host" if operands and all(self.place_of(one) == "host" for one in operands) else "device"


class FakeGpu:
    """The GPU of index `index` of this process: enter it to have it."""

    def __init__(self, index: int, tracker: PlacedTracker) -> None:
        self.device = torch.device("cuda", index)
        self.tracker = tracker
        self.is_on = True
        self.num_operators_open = 0
        self.makes = False
        self.calls_on_gpu: bool | None = None  # the call of Python's that runs has something on the GPU; None: no call
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._stack = ExitStack()

    def __enter__(self) -> FakeGpu:
        self._stack.enter_context(_devices_as_seen(self))
        self._stack.enter_context(self.calls())
        self._stack.enter_context(_Operators(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def calls(self) -> TorchFunctionMode:
        """Return the mode that answers Python, to enter where autograd has left modes out."""
        return _Calls(self)

    @contextmanager
    def making(self, place: Place) -> Iterator[None]:
        """Make tensors without values in this context, in `place`: of nothing, or of tensors elsewhere."""
        before = self.tracker.target, self.makes
        self.tracker.target, self.makes = place, True
        try:
            yield
        finally:
            self.tracker.target, self.makes = before

    def without_values(self, tensor: Tensor, place: Place, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor without values that is like `tensor`, in `place`."""
        with torch.no_grad(), self.making(place), self.mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype)
            self.tracker.see(made, None, ())
        return made

    @contextmanager
    def placing(self, place: Place | None) -> Iterator[None]:
        """Say where what the tracker sees in this context is, None for where its operands are."""
        before, self.tracker.target = self.tracker.target, self.tracker.target or place
        try:
            yield
        finally:
            self.tracker.target = before

    def move(self, tensor: Tensor, place: Place, dtype: torch.dtype | None = None) -> Tensor:
        """Return `tensor` copied to `place`."""
        if isinstance(tensor, DTensor):
            local = self.move(local_tensor(tensor), place, dtype)
            return dtensor_like(local, tensor, requires_grad=tensor.requires_grad)
        if tensor.is_meta:
            raise NotImplementedError("Cannot copy out of meta tensor; no data! Use to_empty() to move the module.")
        if not isinstance(tensor, FakeTensor):
            return self.without_values(tensor, place, dtype).requires_grad_(tensor.requires_grad)
        with self.making(place):
            moved: Tensor = COPY_TO(tensor, dtype=dtype or tensor.dtype)
        return moved

    def sees(self, value: Any) -> bool:
        """Whether `value` is a tensor on this GPU."""
        is_fake = isinstance(value, FakeTensor | DTensor)
        return is_fake and not value.is_meta and self.tracker.place_of(value) == "device"


class _Calls(TorchFunctionMode):
    """Answers what Python asks of torch: devices, moves between them, numbers."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu
        self._answers: dict[Any, Callable[..., Any]] = {
            Tensor.to: self._to,
            Tensor.cuda: lambda tensor, *_, **__: self._to(tensor, gpu.device),
            Tensor.cpu: lambda tensor, *_, **__: self._to(tensor, "cpu"),
            Tensor.type_as: lambda tensor, other: self._to(tensor, other),
            Tensor.pin_memory: lambda tensor, *_: tensor,
            Tensor.is_pinned: lambda *_: False,
            Tensor.record_stream: lambda *_: None,
            Tensor.tolist: self._to_list,
            Tensor.numpy: self._to_array,
            Tensor.__array__: self._to_array,
            Tensor.__format__: self._format,
            Tensor.is_cuda.__get__: gpu.sees,  # type: ignore[attr-defined]  # torch types it as bool
            Tensor.device.__get__: self._device_of,
            Tensor.get_device: lambda tensor: gpu.device.index if gpu.sees(tensor) else -1,
            Tensor.new_tensor: self._new_tensor,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, gpu = kwargs or {}, self._gpu
        if not gpu.is_on or gpu.num_operators_open:
            return func(*args, **kwargs)
        answer = self._answers.get(func)
        if answer is not None:
            self._plain = func
            return answer(*args, **kwargs)
        place = place_named(kwargs.get("device"))
        if func in _MAKERS_FROM_DATA:
            made = func(*args, **{name: value for name, value in kwargs.items() if name != "device"})
            return made if place is None else self._to(made, kwargs["device"])
        if place == "device":
            with gpu.making("device"):
                return func(*args, **kwargs | {"device": "cpu"})
        return self._called(func, args, kwargs, place)

    def _called(self, func: Any, args: Any, kwargs: Any, place: Place | None = None) -> Any:
        gpu = self._gpu
        before = gpu.calls_on_gpu
        gpu.calls_on_gpu = any(gpu.sees(leaf) for leaf in pytree.tree_leaves((args, kwargs)))
        try:
            with gpu.placing(place):
                return func(*args, **kwargs)
        finally:
            gpu.calls_on_gpu = before

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        device, dtype, copies, rest = _parsed_move(args, kwargs)
        gpu = self._gpu
        if isinstance(device, Tensor):
            dtype = device.dtype
            place: Place | None = gpu.tracker.place_of(device)
        else:
            place = place_named(device)
        if device is not None and place is None:  # to meta, for one
            return self._called(Tensor.to, (tensor, *args), kwargs)
        if place is None or place == gpu.tracker.place_of(tensor) or (tensor.is_meta and place == "host"):
            if dtype in (None, tensor.dtype) and not copies and not rest:
                return tensor
            return self._called(Tensor.to, (tensor,), {"dtype": dtype or tensor.dtype, "copy": copies} | rest)
        return gpu.move(tensor, place, dtype)

    def _device_of(self, tensor: Tensor) -> torch.device:
        plain: torch.device = Tensor.device.__get__(tensor)
        return self._gpu.device if plain.type == "cpu" and self._gpu.sees(tensor) else plain

    def _to_list(self, tensor: Tensor) -> Any:
        return torch.zeros(tensor.shape, dtype=tensor.dtype).tolist() if _is_fake(tensor) else Tensor.tolist(tensor)

    def _to_array(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _is_fake(tensor):
            return self._plain(tensor, *args, **kwargs)
        if self._gpu.sees(tensor):
            raise TypeError(
                f"can't convert {self._gpu.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
                "host memory first."
            )
        return torch.zeros(tensor.shape, dtype=tensor.dtype).numpy()

    def _format(self, tensor: Tensor, form: str) -> str:
        return format(tensor.item() if _is_fake(tensor) and tensor.dim() == 0 else tensor.detach(), form)

    def _new_tensor(self, tensor: Tensor, data: Any, **kwargs: Any) -> Any:
        device = kwargs.pop("device", None)
        made = torch.tensor(data, **{"dtype": tensor.dtype} | kwargs)
        return self._to(made, tensor if device is None and "dtype" not in kwargs else device or self._device_of(tensor))


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Runs operators: without values where they are the GPU's, and shows the tracker what they made."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu, kwargs = self._gpu, kwargs or {}
        if func is DEVICE_OF and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if any(issubclass(kind, DTensor) for kind in types):
            if _fills_at_random(func) and gpu.is_on:  # torch would ask for the generator of a real GPU
                return args[0]
            return NotImplemented  # it comes back with its local tensors
        if not gpu.is_on or self._is_of_others():
            return func(*args, **kwargs)
        place: Place | None = None  # what C++ calls the CPU may be the GPU
        if place_named(kwargs.get("device")) == "device":
            place, kwargs = "device", kwargs | {"device": torch.device("cpu")}
        operands = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        fakes = [one for one in operands if isinstance(one, FakeTensor)]
        if func is READ_VALUE and fakes:
            return _number(func, args)
        if fakes:
            self._check_places(func, operands)
        gpu.num_operators_open += 1
        try:
            if not fakes:  # of operands without values the result is where they are
                place = place or gpu.tracker.target or ("device" if self._is_of_gpu(operands) else "host")
            with gpu.mode if (gpu.makes or place == "device") and not fakes else nullcontext():
                out = func(*args, **kwargs)
            with torch.DisableTorchFunction(), gpu.placing(place):
                gpu.tracker.see(out, func, (args, kwargs))
        finally:
            gpu.num_operators_open -= 1
        return out

    def _is_of_gpu(self, operands: list[Tensor]) -> bool:
        """Whether an operator none of whose operands is without values makes something on the GPU."""
        gpu = self._gpu
        if operands:
            return False
        if gpu.calls_on_gpu is None:  # autograd's own code, of which gradients are on the GPU
            return in_backward()
        return gpu.calls_on_gpu

    def _is_of_others(self) -> bool:
        """Whether torch is asking for the shapes of results, by tensors without values of its own."""
        mode = shape_mode()
        return mode is not None and mode is not self._gpu.mode

    def _check_places(self, func: Any, operands: list[Tensor]) -> None:
        if func.namespace != "aten" or func.name().partition("::")[2].startswith(_MAY_MIX):
            return
        tracker = self._gpu.tracker
        places = {tracker.place_of(one) for one in operands if one.dim() and not one.is_meta}
        if len(places) > 1:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{self._gpu.device} and cpu! (operator {func})"
            )


@contextmanager
def _devices_as_seen(gpu: FakeGpu) -> Iterator[None]:
    """Let tensors without values say in Python, outside of operators, that they are on the GPU."""
    kind: Any = FakeTensor
    plain = kind.device

    def device(tensor: FakeTensor) -> torch.device:
        found: torch.device = plain.fget(tensor)
        if gpu.num_operators_open or not gpu.is_on or found.type != "cpu":
            return found
        return gpu.device if gpu.tracker.place_of(tensor) == "device" else found

    with replaced((kind, "device", property(device, plain.fset))):
        yield


def place_named(device: Any) -> Place | None:
    """Return the place that `device`, as scripts write it, names; None for none and for others, as meta."""
    if isinstance(device, bool) or device is None:
        return None
    if isinstance(device, int):
        return "device"
    kind = device.type if isinstance(device, torch.device) else str(device).partition(":")[0]
    return {"cuda": "device", "cpu": "host"}.get(kind)  # type: ignore[return-value]  # one of the two places


def _parsed_move(args: Any, kwargs: Any) -> tuple[Any, torch.dtype | None, bool, dict[str, Any]]:
    """Return the device (or another tensor), the type, whether a copy is asked for, and the rest of `Tensor.to`."""
    device, dtype, flags = kwargs.get("device", kwargs.get("other")), kwargs.get("dtype"), []
    for argument in args:
        if isinstance(argument, torch.dtype):
            dtype = argument
        elif isinstance(argument, bool):
            flags.append(argument)
        elif argument is not None:
            device = argument
    rest = {"memory_format": kwargs["memory_format"]} if kwargs.get("memory_format") is not None else {}
    return device, dtype, bool(kwargs.get("copy", flags[1] if len(flags) > 1 else False)), rest


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor | DTensor)


def _fills_at_random(func: Any) -> bool:
    """Whether an operator writes random numbers into its first operand, and does nothing else."""
    return torch.Tag.nondeterministic_seeded in func.tags and func.name().partition(".")[0].endswith("_")


def _number(read: Any, args: Any) -> Any:
    """Return the number in a tensor: one that torch knows, else 0 of floating-point ones and 1 of whole ones."""
    try:
        return read(*args)
    except DataDependentOutputException:
        tensor = args[0]
        return 0.0 if tensor.is_floating_point() else False if tensor.dtype is torch.bool else 1
