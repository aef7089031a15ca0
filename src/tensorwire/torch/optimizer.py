"""``StoreOptimizer``: a torch optimizer whose parameters and state live in the store."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tensorwire.errors import ArgumentError, ParameterModified, TensorwireError, Unsupported
from tensorwire.launch import Job, current
from tensorwire.observe import counters, ranges, spans
from tensorwire.observe.spans import clock
from tensorwire.store import StoreClient, TensorSpec
from tensorwire.store.plan import BUCKET_BYTES, PAGE, Bucket, Plan
from tensorwire.store.rounds import Operation
from tensorwire.store.rules import (
    IMPLEMENTATION,
    is_whole,
    rule_name,
    tensor_over,
    versions,
    with_implementation,
)
from tensorwire.store.wiring import StoreSpec
from tensorwire.torch.loading import watch_loading

Params = Iterable[tuple[str, torch.nn.Parameter]] | Iterable[dict[str, Any]]
_log = logging.getLogger("tensorwire")
# Group entries that are not options of the optimizer.
_NOT_OPTIONS = ("params", "param_names")


class StoreOptimizer(torch.optim.Optimizer):
    """Applies ``optimizer_class`` on the job's servers to the mean of all workers' gradients.

    ``named_parameters``: ``model.named_parameters()``, or groups whose ``params`` are (name, parameter) pairs.
    ``options`` are those of the class; ``step()`` reads them again from ``param_groups``, and worker 0's count.

    After construction every worker's parameters have worker 0's values and live in the store: their memory shows the
    version that the last ``step()`` ended with, and changes in no other moment. Changing them in place or moving them
    (``.to()``, ``.half()``) raises `ParameterModified` in the next ``step()``; ``load_state_dict`` works, on every
    worker, and takes effect in the store with the next ``step()`` (worker 0's values win).

    Raises `ArgumentError` (no ``init()``, names missing or doubled, parameters not on the CPU), `Unsupported`
    (an optimizer that servers cannot apply, a dtype), `PlanMismatch` or `JobEnded` (workers' models differ).
    """

    def __init__(
        self,
        named_parameters: Params,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        **options: Any,
    ) -> None:
        self._job: Job = current()
        rule = rule_name(optimizer_class)
        groups = _named_groups(named_parameters)
        chosen = with_implementation(optimizer_class, options)
        super().__init__(groups, _defaults(optimizer_class, chosen))
        self._names = [name for group in self.param_groups for name in group["param_names"]]
        self._params: list[torch.nn.Parameter] = [p for group in self.param_groups for p in group["params"]]
        tensors = [
            _spec(name, p, g)
            for g, group in enumerate(self.param_groups)
            for name, p in zip(group["param_names"], group["params"], strict=False)
        ]
        fixed = [{k: _plain(k, v) for k, v in g.items() if k not in _NOT_OPTIONS} for g in self.param_groups]
        self._numeric = _numeric(fixed)
        self._fixed = fixed
        spec = StoreSpec(versions(), tensors, rule, fixed, self._numeric, bucket_bytes, is_whole(rule))
        self._client = self._connect(spec)
        if self._job.rank == 0:
            _log.info("%s: %s", self._client.name, self._client.plan.summary(self._job.num_workers))
        self._job.at_close(self._client.finish)
        self._slots = {id(b): self._views(b) for b in self._client.order}
        self._written: set[str] = set()
        self._pages_seen = True  # whether the kernel tells which pages of the window were written to
        self._pid = os.getpid()
        self._assign()
        self._move_in()
        self._left = clock()
        watch_loading(self._params, self._note_loaded)

    def _connect(self, spec: StoreSpec) -> StoreClient:
        job = self._job
        plan = spec.plan(job.num_servers)  # refused here, it has not taken a name that servers wait for
        try:
            return StoreClient(job.member, job.next_store(), spec, plan, job.num_workers)
        except TensorwireError as error:
            raise job.member.explain(error) from None

    def _views(self, bucket: Bucket) -> list[torch.Tensor]:
        memory = self._client.memory(bucket)
        tensors = self._client.plan.tensors
        return [tensor_over(memory, tensors[p.tensor].dtype, p.offset, p.stop - p.start) for p in bucket.pieces]

    def _move_in(self) -> None:
        """Parameters become what the window shows: one storage each, so that saving one writes one."""
        window = memoryview(self._client.window)
        for p, spec, offset in zip(self._params, self._client.plan.tensors, self._client.plan.offsets, strict=False):
            p.data = tensor_over(window, spec.dtype, offset, spec.elements).view(spec.shape)
        self._remember()

    def _remember(self) -> None:
        self._marks = [(p.data_ptr(), p._version) for p in self._params]

    # ---- a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Pushes the gradients, waits for the new version of every parameter.

        A parameter without a gradient here counts as zero; without one anywhere it stays as it is.
        Raises `ParameterModified`, `JobEnded`, `WaitTimeout`, `Unsupported` (sparse gradients) or `ArgumentError`.
        """
        if os.getpid() != self._pid:
            raise ArgumentError("this optimizer belongs to the parent process: a forked child cannot step it")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        start = clock()
        options = self._current_options()
        self._check_parameters()
        gradients = self._gradients()
        if self._written:
            self._assign()
            self._client.window.refresh(0, self._client.window.nbytes)
            self._written = set()
            self._remember()
        step = self._client.step + 1
        spans.add("compute", step, self._left, start)
        try:
            present = bytes(g is not None for g in gradients)
            self._client.begin(Operation.UPDATE, options, present)
            with ranges.named(ranges.PUSH):
                for bucket in self._client.order:
                    self._push(bucket, gradients)
            spans.add("push", step, start, clock())
            with ranges.named(ranges.WAIT):
                self._client.wait()
        except TensorwireError as error:
            raise self._job.member.explain(error) from None
        self._left = clock()
        return loss

    def _push(self, bucket: Bucket, values: list[torch.Tensor | None]) -> None:
        self._client.slot(bucket)
        for piece, slot in zip(bucket.pieces, self._slots[id(bucket)], strict=False):
            value = values[piece.tensor]
            if value is None:
                continue
            slot.copy_(value[piece.start : piece.stop])
            counters.add(copies=1, copied_bytes=slot.nbytes)
        self._client.send(bucket)

    def _gradients(self) -> list[torch.Tensor | None]:
        """Every parameter's gradient as one flat row, or None."""
        found: list[torch.Tensor | None] = []
        for name, p in zip(self._names, self._params, strict=False):
            g = p.grad
            if g is None:
                found.append(None)
                continue
            if g.layout != torch.strided:
                raise Unsupported(f"parameter {name!r} has a sparse gradient: build its embedding with sparse=False")
            if g.shape != p.shape or g.dtype != p.dtype or g.device.type != "cpu":
                raise ArgumentError(
                    f"the gradient of {name!r} is {g.dtype} {list(g.shape)} on {g.device}, "
                    f"its parameter {p.dtype} {list(p.shape)} on {p.device}"
                )
            found.append(g.reshape(-1))
        return found

    # ---- values that come from users

    def _assign(self) -> None:
        """A round in which worker 0's present values become the store's."""
        client = self._client
        try:
            client.begin(Operation.ASSIGN, self._current_options(), bytes(len(self._params)))
            if self._job.rank == 0:
                values: list[torch.Tensor | None] = [p.detach().reshape(-1) for p in self._params]
                for bucket in client.order:
                    self._push(bucket, values)
            client.wait()
        except TensorwireError as error:
            raise self._job.member.explain(error) from None

    def write_parameters(self) -> None:
        """What the parameters hold now becomes the store's values with the next ``step()``.

        For intended changes in place (averaging, re-initialising, pruning). Call it on every worker; worker 0's win.
        """
        self._note_loaded(self._names)

    def _note_loaded(self, names: Iterable[str] | Iterable[torch.nn.Parameter]) -> None:
        by_id = {id(p): n for n, p in zip(self._names, self._params, strict=False)}
        for item in names:
            self._written.add(item if isinstance(item, str) else by_id[id(item)])

    def _check_parameters(self) -> None:
        """Raises `ParameterModified` for values that changed without the store."""
        changed = []
        for name, p, (address, version) in zip(self._names, self._params, self._marks, strict=False):
            if p.data_ptr() != address:
                raise ParameterModified(
                    f"parameter {name!r} was moved out of the store's memory (.to(), .half(), .data =): "
                    "convert or move the model before constructing the optimizer"
                )
            if p._version != version and name not in self._written:
                changed.append(name)
        if not changed and not self._written:
            changed = self._stray()
        if changed:
            which = " or ".join(repr(name) for name in changed)
            raise ParameterModified(
                f"parameter {which} was changed in place; its values live in the store and only step() changes "
                "them: call optimizer.write_parameters() on every worker after an intended change"
            )

    def _stray(self) -> list[str]:
        """Who lies in the first page that was written to through the window, past autograd's own version count."""
        try:
            pages = self._client.window.modified(1)
        except OSError as error:
            if self._pages_seen:
                self._pages_seen = False
                _log.warning("changes of parameters through .data will go unnoticed here: %s", error)
            return []
        tensors, offsets = self._client.plan.tensors, self._client.plan.offsets
        return [
            name
            for page in pages
            for name, t, start in zip(self._names, tensors, offsets, strict=True)
            if start < page + PAGE and page < start + t.nbytes
        ]

    def _current_options(self) -> list[float]:
        """The numbers of all groups' options, in the order of ``_numeric``."""
        for group, fixed in zip(self.param_groups, self._fixed, strict=False):
            for key, was in fixed.items():
                if not _is_number(was) and not _is_numbers(was) and _plain(key, group[key]) != was:
                    raise Unsupported(f"option {key!r} was {was!r} at construction and cannot become {group[key]!r}")
        values = []
        for g, key, index in self._numeric:
            value = self.param_groups[g][key]
            value = value if index < 0 else value[index]
            if not _is_number(value):
                raise Unsupported(f"option {key!r} must stay a plain number, not {value!r}")
            values.append(float(value))
        return values

    # ---- the rest of torch's interface

    @property
    def plan(self) -> Plan:
        """Where every parameter lies; ``plan.summary(job.num_workers)`` says it in a line."""
        return self._client.plan

    def __getstate__(self) -> dict[str, Any]:
        """Raises `Unsupported`: copying and pickling it are not there yet."""
        raise Unsupported("a StoreOptimizer is one worker's end of a store: copying and pickling it are not there yet")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only during construction: the plan of a store is made once. Raises `Unsupported` later."""
        if hasattr(self, "_client"):
            raise Unsupported("a store's plan is made once: give StoreOptimizer all parameter groups at construction")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Raises `Unsupported`: the optimizer's state lives on the servers, and saving it is not there yet."""
        raise Unsupported("the optimizer's state lives on the servers; saving it is not there yet (the model's works)")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises `Unsupported`, see ``state_dict``."""
        raise Unsupported("the optimizer's state lives on the servers; loading it is not there yet (the model's works)")


def _named_groups(named_parameters: Params) -> list[dict[str, Any]]:
    items: list[Any] = list(named_parameters)
    if not items:
        raise ArgumentError("StoreOptimizer got no parameters")
    groups = items if isinstance(items[0], dict) else [{"params": items}]
    for group in groups:
        group["params"] = list(group["params"])
        for item in group["params"]:
            if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
                raise ArgumentError("StoreOptimizer needs names: pass model.named_parameters(), not model.parameters()")
    return groups


def _defaults(optimizer_class: type[torch.optim.Optimizer], options: dict[str, Any]) -> dict[str, Any]:
    """The class's own defaults and validation, at the price of one element."""
    known = inspect.signature(optimizer_class).parameters
    unknown = [k for k in options if k not in known]
    if unknown:
        raise ArgumentError(f"{optimizer_class.__name__} has no option {unknown[0]!r}")
    try:
        shape = (1, 1) if optimizer_class.__name__ == "Muon" else (1,)
        return dict(optimizer_class([torch.nn.Parameter(torch.zeros(shape))], **options).defaults)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ArgumentError(f"{optimizer_class.__name__}: {error}") from None


def _spec(name: str, p: torch.nn.Parameter, group: int) -> TensorSpec:
    if p.device.type != "cpu":
        raise ArgumentError(f"parameter {name!r} is on {p.device}; this version's store holds CPU parameters only")
    if p.layout != torch.strided or isinstance(p, torch.nn.parameter.UninitializedParameter):
        raise Unsupported(f"parameter {name!r} is not an ordinary dense tensor")
    return TensorSpec(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), group)


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


def _is_numbers(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) > 0 and all(_is_number(v) for v in value)


def _plain(key: str, value: Any) -> Any:
    """``value`` as it can travel without pickle."""
    if isinstance(value, (tuple, list)):
        return tuple(_plain(key, v) for v in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise Unsupported(f"option {key!r} is a {type(value).__name__}; servers take numbers, strings and None")


def _numeric(groups: list[dict[str, Any]]) -> list[tuple[int, str, int]]:
    """Which options are numbers that may change from step to step."""
    found = []
    for g, group in enumerate(groups):
        for key in sorted(group):
            if key in IMPLEMENTATION:
                continue
            if _is_number(group[key]):
                found.append((g, key, -1))
            elif _is_numbers(group[key]):
                found.extend((g, key, i) for i in range(len(group[key])))
    return found
