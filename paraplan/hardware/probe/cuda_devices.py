"""Which GPUs CUDA shows to a process, and in which order: CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER, and `--gpus`.

The rules are those of the CUDA C++ Programming Guide, section "CUDA Environment Variables": entries are indices or
prefixes of UUIDs; devices from the first invalid entry on are hidden; an empty value hides all. A device named twice
ends the list as an invalid entry does; PyTorch's own count of devices, made without the driver, is then 0, which
`CudaView.notes` says. An entry of another form than the first (a UUID after an index) ends the list, as PyTorch
reads it. Of MIG instances a process sees at most one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paraplan.errors import UsageError
from paraplan.hardware.topology import Gpu
from paraplan.records import Record

FASTEST_FIRST, PCI_BUS_ID = "FASTEST_FIRST", "PCI_BUS_ID"


class CudaDevice(Record):
    """A device as CUDA numbers it, and where NVML has it. `mig_uuid` names the slice where it is one of MIG."""

    cuda_index: int
    nvml_index: int
    uuid: str | None = None
    mig_uuid: str | None = None


class CudaView(Record):
    """The devices that a process sees, in CUDA's order; `notes` says what was hidden, and what could not be known."""

    devices: tuple[CudaDevice, ...]
    order: str
    notes: tuple[str, ...] = ()

    def cuda_index(self, nvml_index: int) -> int | None:
        """Return the CUDA index of a GPU, None where CUDA hides it. A GPU seen as MIG slices counts by its first."""
        return next((device.cuda_index for device in self.devices if device.nvml_index == nvml_index), None)


def cuda_view(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> CudaView:
    """Return what CUDA shows of `gpus` (as NVML lists them) under an environment.

    Raises `UsageError` for a CUDA_DEVICE_ORDER that CUDA does not know.
    """
    order = environment.get("CUDA_DEVICE_ORDER", FASTEST_FIRST) or FASTEST_FIRST
    if order not in (FASTEST_FIRST, PCI_BUS_ID):
        raise UsageError(
            f"CUDA_DEVICE_ORDER={order!r} is neither {FASTEST_FIRST} nor {PCI_BUS_ID}", hint=f"set it to {PCI_BUS_ID}"
        )
    ordered, notes = _in_order(gpus, order)
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        found = [entry for gpu in ordered for entry in _first_of(gpu)]
    else:
        found, ended = _visible(ordered, text)
        notes += [ended] if ended else []
    slices = [entry for entry in found if entry[1] is not None]
    if slices and len(found) > 1:
        # CUDA enumerates a single MIG instance, and no whole GPU beside it.
        found = slices[:1]
        notes.append("CUDA shows one MIG instance to a process; the other devices are hidden")
    devices = tuple(
        CudaDevice(cuda_index=position, nvml_index=gpu.index, uuid=gpu.uuid, mig_uuid=slice_uuid)
        for position, (gpu, slice_uuid) in enumerate(found)
    )
    return CudaView(devices=devices, order=order, notes=tuple(notes))


def select_gpus(gpus: Sequence[Gpu], request: str | None, environment: Mapping[str, str]) -> list[CudaDevice]:
    """Return the devices that `--gpus` asks for among those that CUDA shows, in the order of the request.

    `"2"` asks for the first two; `"0,2"` and `"2,"` for CUDA's devices of those numbers, `"GPU-1a2b"` for those of
    that UUID; None for all. Raises `UsageError` for a request that the visible devices do not meet.
    """
    view = cuda_view(gpus, environment)
    if request is None:
        return list(view.devices)
    entries = [entry.strip() for entry in request.split(",") if entry.strip()]
    if not entries:
        raise UsageError(f"--gpus {request!r} asks for no GPU", hint="write a number of GPUs, or a list such as 0,2")
    if len(entries) == 1 and "," not in request and entries[0].isdecimal():
        return _first_devices(view, int(entries[0]))
    chosen = [_device(view, entry) for entry in entries]
    for position, device in enumerate(chosen):
        if device in chosen[:position]:
            raise UsageError(f"--gpus {request} names device {device.cuda_index} twice", hint="name each device once")
    return chosen


def visible_devices(devices: Sequence[CudaDevice], view: CudaView) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES that shows exactly `devices`, in this order, to a child process.

    UUIDs where all are known, since they mean the same under any order of devices; else indices, which a child counts
    over all GPUs in the order of `view`.
    """
    names = [device.mig_uuid or device.uuid for device in devices]
    if all(name is not None for name in names):
        return ",".join(name for name in names if name is not None)
    if view.order != PCI_BUS_ID:
        raise UsageError(
            "the GPUs have no UUIDs, and without them their numbers depend on the order of devices",
            hint=f"set CUDA_DEVICE_ORDER={PCI_BUS_ID}",
        )
    return ",".join(str(device.nvml_index) for device in devices)


def _in_order(gpus: Sequence[Gpu], order: str) -> tuple[list[Gpu], list[str]]:
    """Return the GPUs as CUDA enumerates them. Which is fastest is CUDA's own estimate: the most recent first here."""
    by_bus = sorted(gpus, key=_bus_key)
    kinds = {(gpu.name, gpu.compute_capability) for gpu in gpus}
    if order == PCI_BUS_ID or len(kinds) < 2:
        return by_bus, []
    fastest = sorted(by_bus, key=lambda gpu: [-number for number in _capability(gpu)])
    note = (
        "the GPUs differ, and CUDA puts those it estimates fastest first: the order is a guess by compute capability; "
        f"CUDA_DEVICE_ORDER={PCI_BUS_ID} makes it certain"
    )
    return fastest, [note]


def _bus_key(gpu: Gpu) -> tuple[list[int], int]:
    """Return what PCI addresses sort by: `domain:bus:device.function` in hexadecimal; without one, NVML's order."""
    address = (gpu.pci_bus_id or "").replace(".", ":").split(":")
    try:
        return [int(part, 16) for part in address], gpu.index
    except ValueError:
        return [], gpu.index


def _capability(gpu: Gpu) -> list[int]:
    parts = (gpu.compute_capability or "0.0").split(".")
    return [int(part) for part in parts] if all(part.isdecimal() for part in parts) else [0, 0]


Entry = tuple[Gpu, str | None]


def _first_of(gpu: Gpu) -> list[Entry]:
    """Return a GPU as CUDA shows it when nothing is asked for: whole, or by its first MIG instance, or not at all."""
    if not gpu.mig_enabled:
        return [(gpu, None)]
    return [(gpu, instance.uuid) for instance in gpu.mig_instances[:1] if instance.uuid is not None]


def _visible(ordered: Sequence[Gpu], text: str) -> tuple[list[Entry], str | None]:
    """Return the devices that a CUDA_VISIBLE_DEVICES names up to its first fault, and what that fault is."""
    if not text.strip():
        return [], "CUDA_VISIBLE_DEVICES is empty: all devices are hidden"
    found: list[Entry] = []
    entries = [entry.strip() for entry in text.split(",")]
    for entry in entries:
        if _form(entry) != _form(entries[0]):
            return found, f"CUDA_VISIBLE_DEVICES ends at {entry!r}, which is of another form than {entries[0]!r}"
        device = _lookup(ordered, entry)
        if device is None:
            return found, f"CUDA_VISIBLE_DEVICES ends at {entry!r}, which is not a device"
        if device in found:
            return found, (
                f"CUDA_VISIBLE_DEVICES ends at {entry!r}, which stands there already; PyTorch may then count none"
            )
        found.append(device)
    return found, None


def _form(entry: str) -> str:
    return entry[:4] if entry.startswith(("GPU-", "MIG-")) else "index"


def _lookup(ordered: Sequence[Gpu], entry: str) -> Entry | None:
    """Return what an entry names: an index, or the only device whose UUID starts so; None for anything else."""
    if entry.startswith("MIG-"):
        matches: list[Entry] = [
            (gpu, instance.uuid)
            for gpu in ordered
            for instance in gpu.mig_instances
            if instance.uuid is not None and instance.uuid.startswith(entry)
        ]
        return matches[0] if len(matches) == 1 else None
    if entry.startswith("GPU-"):
        whole = [gpu for gpu in ordered if gpu.uuid is not None and gpu.uuid.startswith(entry)]
        shown = _first_of(whole[0]) if len(whole) == 1 else []
        return shown[0] if shown else None
    digits = _leading_digits(entry)
    if digits is None or digits >= len(ordered):
        return None
    shown = _first_of(ordered[digits])
    return shown[0] if shown else None


def _leading_digits(entry: str) -> int | None:
    """Return the number that an entry starts with, as C's strtol reads it: `1x` is 1. None for `x`, `-1` and ``."""
    digits = ""
    for character in entry.removeprefix("+"):
        if character not in "0123456789":
            break
        digits += character
    return int(digits) if 0 < len(digits) < 10 else None


def _first_devices(view: CudaView, count: int) -> list[CudaDevice]:
    if not 1 <= count <= len(view.devices):
        raise UsageError(
            f"--gpus {count} asks for {count} GPUs, and CUDA shows {len(view.devices)}",
            hint=f"to name one device write it with a comma: --gpus {count}," if count == 0 else None,
        )
    return list(view.devices[:count])


def _device(view: CudaView, entry: str) -> CudaDevice:
    if entry.isdecimal():
        for device in view.devices:
            if device.cuda_index == int(entry):
                return device
    else:
        named = [device for device in view.devices if _is_named(device, entry)]
        if len(named) == 1:
            return named[0]
    shown = ", ".join(str(device.cuda_index) for device in view.devices) or "none"
    raise UsageError(f"--gpus names {entry!r}, and CUDA shows devices {shown}", hint="paraplan topo lists them")


def _is_named(device: CudaDevice, entry: str) -> bool:
    uuids = [uuid for uuid in (device.uuid, device.mig_uuid) if uuid is not None]
    return entry.startswith(("GPU-", "MIG-")) and any(uuid.startswith(entry) for uuid in uuids)
