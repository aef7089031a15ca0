"""``StoreOptimizer``: a torch optimizer whose parameters and state live in the store."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tensorwire.errors import ArgumentError
from tensorwire.launch import current_worker
from tensorwire.observe import ranges, spans
from tensorwire.observe.spans import clock
from tensorwire.store.compression import parse_compression
from tensorwire.store.course import Course
from tensorwire.store.foreign import folders_of, sources_of
from tensorwire.store.function_rules import FunctionOptimizer
from tensorwire.store.modes import DiLoCo, Local, Mode, Sync, check_reduce
from tensorwire.store.rule_names import MEAN, is_foreign
from tensorwire.store.sharding import BUCKET_BYTES
from tensorwire.store.store_client import StoreClient
from tensorwire.store.versions.every import Every, PublishSpec, parse_publish
from tensorwire.store.versions.listing import ReaderState, list_versions
from tensorwire.store.versions.publishing import Publishing
from tensorwire.torch import nonfinite
from tensorwire.torch.alone import Alone
from tensorwire.torch.arguments import (
    Params,
    check_mode_fits,
    largest_norm,
    overlap_of,
    refuse_overlapped,
)
from tensorwire.torch.cautions import Cautions
from tensorwire.torch.describe import describe
from tensorwire.torch.equal_start import make_equal
from tensorwire.torch.loading import find_modules
from tensorwire.torch.local import LocalTraining
from tensorwire.torch.optimizer_state import OptimizerState
from tensorwire.torch.origin import Origin, find_origin
from tensorwire.torch.overlap import Overlap
from tensorwire.torch.owned_stores import OwnedStores
from tensorwire.torch.part import StoreSettings
from tensorwire.torch.state import SavedState
from tensorwire.torch.stepping import Stepping

_SYNC = Sync()


class StoreOptimizer(OptimizerState):
    """Applies an optimizer on the job's servers to the mean of all workers' gradients.

    After construction, every worker's parameters, those of the model that were left out, and its buffers have worker
    0's values. The given ones live in the store: their memory shows the version that the last ``step()`` ended with,
    and changes at no other time. Changing them in place or moving them (``.to()``, ``.half()``) makes the next
    ``step()`` raise `ParameterModified`. ``model.load_state_dict()`` works if every worker calls it; worker 0's values
    reach the store with the next ``step()``.

    Call every method on every worker, in the same order, and from one thread, unless the method says otherwise.

    Args:
        named_parameters: ``model.named_parameters()``, or groups whose ``params`` are (name, parameter) pairs. Or the
            model itself: then hooks are put on its modules, without a search for other modules that have its
            parameters. Or, as the only argument, an optimizer that was built from ``model.named_parameters()``.
            Parameters are dense tensors on the CPU or on accelerators that share no memory, of any shape; complex and
            float8 dtypes are refused.
        optimizer: A class of optimizers, whose options are ``options``; or an optimizer of these parameters, whose
            class, groups, options and state are taken over. Or a function ``(parameter, gradient, state, options)``
            that changes ``parameter`` in place, and may keep tensors and numbers in the dictionary ``state``. Either
            may be given by its import path, ``"package.module:name"``, and an optimizer of torch by its name. Or a
            word: ``"sum"``: the gradient is added to the parameter; ``"assign"``: it takes the parameter's place;
            ``"mean"``: the mean of the workers' does.
        overlap: Push gradients while backward runs, and fetch new values while the next forward runs; ``wait()``
            fetches them at once. Gradients must then stay as backward leaves them: accumulate inside ``no_sync()``, and
            clip by ``max_grad_norm``. None: with `Sync`, where a parameter is on an accelerator.
        max_grad_norm: The norm to which the reduced gradient is clipped: it is multiplied by
            ``max_grad_norm / (norm + 1e-6)`` where that is below 1. ``norm`` is the root of the sum, in float64, of the
            squares of all elements, bucket by bucket. None: no clipping. The attribute may be changed between steps.
        error_if_nonfinite: Where that norm is NaN or inf, with or without ``max_grad_norm``, ``step()`` raises
            `NonFiniteGradient` on every worker, naming workers and parameters, and no parameter and no state changes.
            The attribute may be changed between steps.
        reduce: ``"mean"`` or ``"sum"`` of the workers' gradients.
        bucket_bytes: The size of the store's buckets in bytes, a multiple of 4,096; 4 MiB by default.
        mode: How the workers take turns, the same on all of them: ``tw.store.Sync()``, ``Async()``, ``SSP()``,
            ``EASGD()``, ``LocalSGD()`` or ``DiLoCo()``. In other modes than Sync, each worker uses its own options,
            ``reduce`` means nothing, and the workers may take different numbers of steps. In the last three, the class
            updates the parameters in this worker, and the store is for the exchanges with others.
        compression: By what code workers push, the same on all of them: ``"fp16"``, ``"bf16"``, ``"2bit(threshold)"``,
            ``"topk(fraction)"`` or ``"int8(block)"``. What a code leaves out is kept by the worker, which adds it to
            its next push. None: pushes are not coded. What servers send never is.
        shards: Into how many shards the store is divided, which servers take in turn: at least as many as there are
            servers. None: one per server.
        publish: Whether other processes get versions of the parameters, as files: ``tw.store.Every(steps)`` makes one
            after each ``steps`` steps, True only where ``publish()`` or a reader asks for one. The first has the values
            that the training begins with. All servers are on one machine then.
        **options: Options of the class or the function, such as ``lr``. ``step()`` reads them again from
            ``param_groups``; worker 0's count.

    Attributes:
        grad_norm (float | None): The norm of the last step's reduced gradient before clipping. None before the first
            step, and without ``max_grad_norm`` and ``error_if_nonfinite``.

    Raises:
        ArgumentError: ``init()`` has not been called; names are missing or used twice; parameters are neither on
            the CPU nor on an accelerator, have no memory, or share some; an option is wrong. Nothing was changed.
        Unsupported: The optimizer or function is one that servers cannot apply or import, or the store does not hold
            this dtype or layout.
        PlanMismatch: Models or options of the workers differ; on other workers as the cause of `JobEnded`.
        JobEnded: The job ended; the message says why.
        WaitTimeout: Another worker did not construct its optimizer in time.
    """

    def __init__(
        self,
        named_parameters: Params | torch.nn.Module | torch.optim.Optimizer,
        optimizer: type[torch.optim.Optimizer] | torch.optim.Optimizer | Callable[..., Any] | str | None = None,
        *,
        overlap: bool | None = None,
        max_grad_norm: float | None = None,
        error_if_nonfinite: bool = False,
        reduce: str = "mean",
        bucket_bytes: int = BUCKET_BYTES,
        mode: Mode = _SYNC,
        compression: str | None = None,
        shards: int | None = None,
        publish: Every | bool = False,
        **options: Any,
    ) -> None:
        self._worker = current_worker()
        self._course = Course(self._worker.member)
        self._alone = Alone(self._course, self._go_on)
        check_reduce(reduce)
        every = parse_publish(publish)
        if optimizer == MEAN and reduce != "mean":
            raise ArgumentError("the rule 'mean' takes the workers' mean: use 'assign' with reduce='sum'")
        largest_norm(max_grad_norm)
        self._model = named_parameters if isinstance(named_parameters, torch.nn.Module) else None
        given = named_parameters if self._model is None else self._model.named_parameters()
        origin = find_origin(given, optimizer, options, here=isinstance(mode, Local))
        self._class = origin.optimizer_class
        overlap = overlap_of(overlap, mode, origin.groups)
        check_mode_fits(mode, overlap, origin.defaults)
        self._settings = replace(
            _settings(origin, bucket_bytes, reduce, overlap, mode),
            compression=str(parse_compression(compression) or ""),
            shards=shards,
            publish=None if every is None else PublishSpec(every.buffers),
        )
        self.max_grad_norm = max_grad_norm
        self.error_if_nonfinite = error_if_nonfinite
        self.grad_norm: float | None = None
        _ = self._clip
        self._saved = SavedState(self, self._class, self._settings.rule, origin.arguments)
        this = weakref.proxy(self)  # what ends with this optimizer must not keep it
        self._steps = Stepping(self._worker, self._course, self._saved, lambda: this._clip)
        self._parts, self._rows = self._steps.parts, self._steps.rows
        super().__init__(origin.groups, origin.defaults)
        if origin.state is not None:
            self._saved.check(origin.state)
        self._overlap = self._steps.overlap = Overlap(self._steps.open, self._alone) if overlap else None
        self._owned = OwnedStores(self._worker, self, self._course, self._steps)
        self._pid = os.getpid()
        params = [p for group in self.param_groups for p in group["params"]]
        modules = find_modules(params, self._model)
        self._cautions = Cautions(self._worker, params, modules)
        self._local: LocalTraining | None = None
        self._inner: torch.optim.Optimizer | None = None
        self._publishing: Publishing | None = None
        if isinstance(mode, Local):
            self._train_locally(origin, mode, bucket_bytes, modules)
        else:
            self._add_part(self.param_groups, modules)
        make_equal(self._worker, self, modules)
        self._worker.optimizers.add(self)
        self._left = clock()
        if origin.state is not None:
            self.load_state_dict(origin.state)
        if every is not None:
            first = self._worker.rank == 0 and not self._worker.joins  # else versions ended with the one before it
            self._publishing = Publishing(0 if first else 1, every, lambda: this._client)
            self._worker.say_published()
            self._publishing.publish()

    # ---- a step

    @torch.compiler.disable  # type: ignore[untyped-decorator] # a compiled loop leaves its graph here
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Pushes the gradients, and waits for the new version of every parameter.

        A parameter that has no gradient on this worker counts as a gradient of zero; one that has none on any worker
        stays as it is. Where a GradScaler found an inf on one worker, all skip the step. With ``overlap``, only what
        backward did not push is pushed here, and a parameter is waited for when its module next runs.

        Args:
            closure: Computes the loss and the gradients again, as for every torch optimizer; not with ``overlap``.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            ParameterModified: A parameter was changed in place or moved since the last step.
            GradientModified: With ``overlap``, a gradient changed after it had been pushed.
            NonFiniteGradient: With ``error_if_nonfinite``, the gradients' norm is NaN or inf; nothing was changed.
            Unsupported: A gradient is sparse and not an embedding's; or ``overlap`` met a closure or a GradScaler.
            ArgumentError: A gradient or an option does not fit; or another thread is in a method of this optimizer.
            StepInterrupted: An earlier call was interrupted when a part of the gradients had left.
            WaitTimeout: Another worker did not take its step in time.
            JobEnded: The job ended; the message says why.
        """
        if os.getpid() != self._pid:
            raise ArgumentError("this optimizer belongs to the parent process: a forked child cannot step it")
        with self._alone.calling("step()"):
            loss = self._before(closure)
            start = clock()
            skip = self._unscale()
            if self._local is not None:
                self._local.step(self._left, skip)
                self._note_step()
                return loss
            with self._worker.member.explained():
                with ranges.named(ranges.PUSH):
                    self._steps.push(skip, self.error_if_nonfinite, self.state, hasattr(self, "found_inf"))
                step = self._parts[0].client.step if self._parts else 0
                spans.add("compute", step, self._left, start)
                spans.add("push", step, start, clock())
                left_out = self._steps.pull()
                self.grad_norm = self._steps.grad_norm
            self._note_step()
            if left_out:
                raise nonfinite.error(self._worker, self._parts, self.grad_norm or 0.0)
            return loss

    @property
    def steps_taken(self) -> int:
        """How many steps are over: with `Sync` those of the store, which all workers have in common, else this worker's
        own, to which one that joined later adds those of the slowest of the others when it came.
        """
        return self._parts[0].client.updates if self._local is None else self._local.steps

    def _note_step(self) -> None:
        """What follows belongs to the next one."""
        self._worker.end_step()
        if self._publishing is not None:
            with self._worker.member.explained():
                self._publishing.step()
        self._left = clock()

    def _go_on(self) -> None:
        """Before every call: what is left of a step that was interrupted while it waited."""
        if self._local is not None:
            self._local.go_on()
        else:
            self._steps.complete()
            self.grad_norm = self._steps.grad_norm

    def _before(self, closure: Callable[[], Any] | None) -> Any:
        """What comes before anything is pushed: the closure's loss, and cautions."""
        loss = None
        if self._overlap is not None:
            refuse_overlapped(closure, hasattr(self, "found_inf"))
        elif closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._cautions.done:
            self._cautions.step()
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by GradScaler: then it calls ``step()`` also where it found an inf, and the workers stay together.

        Others ask, too, to refuse clipping before an optimizer that unscales by itself. This one need not.
        """
        return sys._getframe(1).f_code is torch.amp.GradScaler.step.__code__

    def _unscale(self) -> bool:
        """What a GradScaler asks for. Returns whether this step is to be skipped, because its gradients have an inf."""
        found: torch.Tensor | None = getattr(self, "found_inf", None)
        if found is None:
            return False
        scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:
            inverse = scale.double().reciprocal().float()
            for p in (p for group in self.param_groups for p in group["params"]):
                if p.grad is not None:
                    p.grad.mul_(inverse.to(p.grad.device, non_blocking=True))
        return bool(found)

    # ---- overlap

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Around all backward passes of a step but the last: gradients accumulate, and none is pushed.

        Returns:
            A context manager. Without ``overlap`` it does nothing, because gradients are pushed by ``step()``.
        """
        self._alone.check()
        return contextlib.nullcontext() if self._overlap is None else self._overlap.paused()

    def count(self, tokens: float) -> None:
        """Adds to what this worker's next contributions weigh, with ``DiLoCo(weight="tokens")``.

        Args:
            tokens: How many tokens, samples or the like the gradients of this step come from.

        Raises:
            ArgumentError: ``tokens`` is not a number from 1e-6 to 1e15, or the mode has no such weights.
        """
        self._alone.check()
        mode = self._settings.mode
        if self._local is None or not isinstance(mode, DiLoCo) or mode.weight != "tokens":
            raise ArgumentError('count() is for mode=DiLoCo(weight="tokens")')
        self._local.count(tokens)

    def publish(self) -> int | None:
        """Makes a version for readers of the present values, as the last ``step()`` left them.

        Call it on every worker, or on worker 0 alone: on others it does nothing. It does not wait until readers have
        the version, and no later step changes what is in it. In other modes than Sync each shard takes part with what
        it has when it hears of it.

        Returns:
            On worker 0 the version's counter, which readers see; None where the version was left out, because readers
            hold all snapshot buffers. None on other workers.

        Raises:
            ArgumentError: The optimizer has no ``publish=``, or gradients are being pushed.
            WaitTimeout: With ``Every(when_held="wait")``, readers hold the buffers for too long; or a server is late.
            JobEnded: The job ended; the message says why.
        """
        with self._alone.calling("publish()"), self._worker.member.explained():
            publishing = self._find_publishing()
            if any(part.is_open for part in self._parts):
                raise ArgumentError("publish between two steps: gradients are in flight")
            return publishing.publish()

    def readers(self) -> list[ReaderState]:
        """Who reads the versions that ``publish=`` makes, and what each reader runs. Any worker may call it.

        Returns:
            One entry for each reader.

        Raises:
            ArgumentError: The optimizer has no ``publish=``.
            PeerLost: Server 0 did not answer.
            JobEnded: The job ended; the message says why.
        """
        with self._alone.calling("readers()"), self._worker.member.explained():
            self._find_publishing()
            return list_versions(self._worker.member, self._client.name).readers

    def _find_publishing(self) -> Publishing:
        if self._publishing is None:
            raise ArgumentError("this optimizer makes no versions: construct it with publish=True")
        return self._publishing

    @property
    def _client(self) -> StoreClient:
        """Of the only store, where there are versions for readers."""
        return self._parts[0].client if self._local is None else self._local.client

    # ---- the rest of torch's interface

    def __repr__(self) -> str:
        return describe(
            self._settings.rule if self._class is FunctionOptimizer else self._class.__name__,
            self.param_groups,
            [part.client.plan for part in self._stores],
            self._worker.member.routes,
            overlap=self._overlap is not None,
            reduce=self._settings.reduce,
            max_grad_norm=self.max_grad_norm,
            error_if_nonfinite=self.error_if_nonfinite,
            mode=self._settings.mode,
            compression=self._settings.compression or None,
        )


def _settings(origin: Origin, bucket_bytes: int, reduce: str, overlap: bool, mode: Mode) -> StoreSettings:
    rule = origin.rule
    if not is_foreign(rule):
        return StoreSettings(rule, bucket_bytes, reduce, overlap, mode=mode)
    sources, folders = sources_of(rule), folders_of(rule)
    return StoreSettings(rule, bucket_bytes, reduce, overlap, origin.arguments, sources, folders, mode)
