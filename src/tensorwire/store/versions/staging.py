"""A version on its way into a module: tensors over what was read, and the copy that changes the module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from tensorwire._native import gather
from tensorwire.errors import ArgumentError
from tensorwire.sizes import listed
from tensorwire.store.versions.read_spans import Chosen, ReadSpan, Selection
from tensorwire.store.versions.sources import Bytes, OpenVersion
from tensorwire.store.versions.version_layout import FileTensor, Version, VersionLayout

_LARGE = 1 << 20  # bytes
Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # what changes, and what it becomes


def whole_file(layout: VersionLayout) -> Selection:
    """All tensors, as far from the first one as in the file."""
    tensors = {name: Chosen(held.dtype, held.shape, held.start - layout.data) for name, held in layout.held.items()}
    nbytes = layout.nbytes - layout.data
    return Selection(tensors, (ReadSpan(layout.data, 0, nbytes),) if nbytes else (), nbytes)


def views(memory: Bytes, selection: Selection) -> dict[str, torch.Tensor]:
    """The tensors of a selection over the memory that it was read into."""
    found = {}
    for name, (dtype, shape, start) in selection.tensors.items():
        kind: torch.dtype = getattr(torch, dtype)
        count = torch.Size(shape).numel() * kind.itemsize
        found[name] = (
            torch.from_numpy(memory[start : start + count]).view(kind).view(shape)
            if count
            else torch.empty(shape, dtype=kind)
        )
    return found


def match(module: torch.nn.Module, held: Mapping[str, FileTensor], *, strict: bool) -> dict[str, torch.Tensor]:
    """The module's tensors that a version changes, by name.

    A tensor that the module has under two names is in a version under one. Raises `ArgumentError` where shapes or
    kinds of numbers differ, and with ``strict`` where names do.
    """
    mine: dict[str, torch.Tensor] = module.state_dict(keep_vars=True)
    found = {name: mine[name] for name in held if name in mine}
    covered = {_memory(tensor) for tensor in found.values()}
    missing = [name for name, tensor in mine.items() if name not in found and _memory(tensor) not in covered]
    strange = [name for name in held if name not in mine]
    if strict and (missing or strange):
        raise ArgumentError(
            "the version is not one of this module: "
            + "; ".join(
                f"{what} {listed([*map(repr, n)])}" for what, n in (("it lacks", missing), ("it has", strange)) if n
            )
            + ": load what it lacks by other means, and pass strict=False"
        )
    for name, tensor in found.items():
        dtype: torch.dtype = getattr(torch, held[name].dtype)
        if tuple(tensor.shape) != held[name].shape:
            raise ArgumentError(
                f"{name!r} is {list(tensor.shape)} in the module, {list(held[name].shape)} in the version"
            )
        if tensor.dtype.is_floating_point != dtype.is_floating_point:
            raise ArgumentError(f"{name!r} is {tensor.dtype} in the module, and {dtype} in the version")
    return found


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def copy_into(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copies values of the same shape. Large ones by our own copy, which takes the same time wherever the two lie in
    their pages: the C library's and PyTorch's can take four times as long."""
    alike = target.dtype == value.dtype and target.is_cpu and value.is_cpu and target.nbytes >= _LARGE
    if alike and target.is_contiguous() and value.is_contiguous() and target.data_ptr() != value.data_ptr():
        gather(target.detach().reshape(-1).view(torch.uint8).numpy(), value.detach(), True)
        mark_changed([target])
    else:
        target.copy_(value)


def mark_changed(tensors: Iterable[torch.Tensor]) -> None:
    """Tells autograd what PyTorch cannot see: that the memory of tensors was written."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


class Staged:
    """A version that was read and checked, until the reader stages the next one, or ``close()``.

    Attributes:
        version (Version): Its name.
        tensors (dict[str, torch.Tensor]): Its tensors by name. Copy what is to outlive this object.
    """

    def __init__(
        self,
        opened: OpenVersion,
        tensors: dict[str, torch.Tensor],
        held: Mapping[str, FileTensor],
        take: Callable[[Version, Pairs], None],
    ) -> None:
        """``take`` copies, and remembers the version."""
        self._opened, self._held, self._take = opened, held, take
        self.version = opened.manifest.version
        self.tensors = tensors
        # By id, with the module: another one could have its id later.
        self._prepared: dict[int, tuple[torch.nn.Module, Pairs]] = {}
        self._closed = False

    def convert_for(self, module: torch.nn.Module, *, strict: bool = True) -> None:
        """Checks that ``module`` can take the version, and converts dtypes, so that ``commit`` need not.

        Args:
            module: The model.
            strict: As for `Reader.stage`.

        Raises:
            ArgumentError: It cannot.
        """
        targets = match(module, self._held, strict=strict)
        pairs = [(t.detach(), self.tensors[name].to(t.dtype)) for name, t in targets.items()]
        self._prepared[id(module)] = module, pairs

    def commit(self, module: torch.nn.Module, *, strict: bool = True) -> Version:
        """Copies the version into a module, under the reader's lock. It may be repeated, also for other modules.

        Args:
            module: The model.
            strict: As for `Reader.stage`, where the module was not given there.

        Returns:
            The version.

        Raises:
            ArgumentError: The module does not fit, and is unchanged; or another version was staged since.
        """
        if self._closed:
            raise ArgumentError(f"version {self.version} is not staged any more: stage a version, and commit that")
        if id(module) not in self._prepared:
            self.convert_for(module, strict=strict)
        _, pairs = self._prepared[id(module)]
        self._take(self.version, pairs)
        return self.version

    def close(self) -> None:
        """Gives the version back. Idempotent."""
        if not self._closed:
            self._closed = True
            self.tensors, self._prepared = {}, {}
            self._opened.close()
