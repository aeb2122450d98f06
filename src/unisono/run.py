"""A run as its script sees it: `join` it, hand it model, optimizer and data, and train.

The same script runs alone, under ``unisono run`` and under torchrun; who else takes part changes no result.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore

from unisono.agreement import Agreement
from unisono.allocator import keep_freed_memory
from unisono.audit import Audit, AuditSettings
from unisono.cluster.connection import Connection, connect
from unisono.cluster.environment import detect, sets_allocator, usable_cores
from unisono.collectives.announce import Announcer
from unisono.collectives.gather import gather_rows
from unisono.data.batch import Batch
from unisono.data.choice import make_loader
from unisono.data.epochs import Options
from unisono.data.loader import Loader
from unisono.data.made import BatchMaker, Make
from unisono.data.order import Selection
from unisono.data.plan import AssignmentPlan
from unisono.data.stream_loader import StreamLoader
from unisono.device import choose_device, reproducible
from unisono.errors import StepFailedError, TransportError, UsageError
from unisono.evaluation import evaluate
from unisono.events import Event, Notice, Observer
from unisono.fingerprints import fingerprint
from unisono.gradients.buffer_policies import Declared, check_declared, describe_declared
from unisono.grid import Assignment, assign, even_shares, scale_shares
from unisono.initial_state import share_initial_state
from unisono.randomness import derive, seed_all
from unisono.replica import ClipNorm, Replica, Settings, Surroundings, Update, as_optimizers
from unisono.strategies import Synchronous
from unisono.strategies.base import GlobalBatch, LossFunction, Strategy
from unisono.transport.backends import check_backend
from unisono.transport.base import Transport
from unisono.transport.choose import connect_workers
from unisono.transport.local import LocalTransport

MICRO_BATCHES = 8


class Stateful(Protocol):
    """What can be registered with a run: schedulers, moving averages, counters."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


def join(
    *,
    seed: int = 0,
    assignment: str | Sequence[int] = "even",
    threads_per_worker: int | None = None,
    step_timeout_s: float | None = None,
    backend: str | None = None,
    device: str | torch.device | None = None,
    observer: Observer | None = None,
) -> Run:
    """Take part in the run that this process was started for; a run of its own if there is none.

    Seeds torch, ``numpy.random`` and ``random``, so that models built afterwards are the same everywhere.
    Arguments given here win over flags of ``unisono run``.

    Args:
        seed: of everything random in the run: initial weights, order of samples, dropout, augmentation.
        assignment: ``"even"``, or a share for each worker, such as ``[3, 1]``. Changes no bit.
        threads_per_worker: intra-op threads; 1 by default on CPU, where another count gives other bits.
        step_timeout_s: how long one operation may wait for other workers; half an hour by default.
        backend: what moves tensors: "shared_memory", or torch's name of a process group. By default CPU workers
            on one host share memory, others use gloo; on CUDA nccl.
        device: where this worker computes; an accelerator of its own if there is one, else the CPU.
        observer: is told events; by default notices go to standard error.

    Returns:
        The run, a context manager.

    Raises:
        UsageError: an argument has no usable value.
    """
    if not -(2**63) <= seed < 2**63:
        raise UsageError(f"seed={seed}: expected a number that fits 64 bits.")
    if threads_per_worker is not None and threads_per_worker < 1:
        raise UsageError(f"threads_per_worker={threads_per_worker}: expected at least 1.")
    if backend is not None:
        check_backend(backend)
    environment = detect()
    chosen = choose_device(environment, device)
    connection = connect(environment, step_timeout_s)
    flags = connection.flags
    return Run(
        connection,
        seed=seed,
        assignment=assignment,
        threads_per_worker=threads_per_worker or flags.get("threads_per_worker"),
        backend=backend or flags.get("backend"),
        device=chosen,
        observer=observer or _print_notices,
    )


class Run:
    """A run that this process takes part in; made by `join`.

    Attributes:
        seed: the run's seed.
        rank, world_size: of this worker; results don't depend on them.
        device: where this worker computes.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        seed: int,
        assignment: str | Sequence[int],
        threads_per_worker: int | None,
        backend: str | None,
        device: torch.device,
        observer: Observer,
    ) -> None:
        self.seed = seed
        self.rank = connection.rank
        self.world_size = connection.world_size
        self.device = device
        self._connection = connection
        self._allow_idle = bool(connection.flags.get("allow_idle"))
        self._assignment = assignment
        self._observers: list[Observer] = [observer]
        self._epoch = 0
        self._replicas: list[Replica] = []
        self._loaders: list[Loader | StreamLoader] = []
        self._maker = BatchMaker(seed=seed, rank=self.rank, device=device)
        self._registered: dict[str, Stateful] = {}
        self._resources = ExitStack()
        self._closed = False
        self._audit: Audit | None = None
        audited = AuditSettings.from_flags(connection.flags)
        with self._leaving_on_error():
            check_assignment(assignment, self.world_size)
            self._resources.enter_context(
                reproducible(device, threads_per_worker, strict=audited is not None)
            )
            if device.type == "cpu" and not sets_allocator():
                keep_freed_memory()
            self._transport = self._resources.enter_context(self._make_transport(backend))
            connection.on_abort(self._transport.abort)
        self._announcer = Announcer(self._transport, connection.store)
        connection.on_abort(self._announcer.stop)
        connection.on_stall(self._announcer.stalled)
        self._surroundings = Surroundings(
            transport=self._transport,
            announcer=self._announcer,
            operations=connection,
            device=device,
            seed=seed,
            emit=self._emit,
            before_step=self._before_step,
            replicas=self._replicas,
        )
        self._agreement = Agreement(self._transport, self._announcer, self._doing)
        if audited is not None:
            self._audit = Audit(audited, self.rank, seed, device=device)
            self._audit.watch(self._replicas)
            self._observers.append(self._audit)
        seed_all(derive(seed, "init"), device)
        self._suggest_more_workers()

    @property
    def is_main(self) -> bool:
        """Whether this worker prints and saves; true on exactly one."""
        return self.rank == 0

    def replicate(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        strategy: Strategy | None = None,
        clip_norm: ClipNorm = None,
        clip_value: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        master_weights: bool = False,
        update: Update = "replicated",
        share_parameters: bool | None = None,
        buffers: Declared | None = None,
    ) -> Replica:
        """Train `model` with all workers; they all start from rank 0's weights.

        *Collective: every rank calls this, in the same order.*

        Args:
            model: on `device`, built the same way on every worker.
            optimizer: what is trained: over some or all of the model's parameters, and others if need be. Several
                are stepped one after the other. None leaves the update to the script, of all parameters.
            strategy: how tightly workers are coupled; `Synchronous` by default.
            clip_norm: clip the gradient of every step to this norm; or a norm, or None, for each group.
            clip_value: limit each element of the gradient of every step to this magnitude.
            scaler: scale the loss for float16, as ``torch.amp.GradScaler(run.device.type)``. Gradients are unscaled
                when `Replica.backward` returns; a step of which the gradient isn't finite is skipped.
            master_weights: let the optimizers update float32 copies of parameters of 16 bits, from gradients that are
                added up in float32. Their groups then hold the copies.
            update: ``"replicated"`` updates all parameters on every worker. ``"sharded"`` lets each worker update its
                part of them, with the same bits, and keep only that part of the optimizers' state; ``state_dict``
                of the replica is whole, that of the optimizers is not. Optimizers of torch that treat each element
                alone share out within parameters, others whole parameters; LBFGS can't be sharded.
            share_parameters: with a sharded update, let the CPU workers of each host have one copy of the parameters
                between them, frozen ones too. What a script writes to one stays with its worker until the next
                update, which takes it over if it is the same on all workers, and raises `MismatchError` if not.
                None shares those that can be: dense ones whose memory no other tensor uses. True makes it an
                error if one can't be, False gives every worker its own.
            buffers: policies for buffers that micro-batches change differently, by name or by pattern such as
                ``"*.codebook"``; an exact name goes before patterns. Every micro-batch starts from the value at
                the start of the step. ``"mean"``: the weighted mean over the micro-batches that changed it, as
                for running statistics of torch's norm layers; costs as much as a gradient of that size.
                ``"first"`` or ``"last"``: what the lowest or highest micro-batch that changed it gave; one value
                is sent. ``"sum"``: the value at the start plus all changes, for counters and sums.
                A function: ``f(start, values, weights)`` of the values that micro-batches gave, in their order,
                returns the new one, on every worker. For the last two every changed value goes to everyone.

        Raises:
            UsageError: a parameter is on another device; a policy is unknown or fits no buffer.
            MismatchError: workers built different models; names the first difference.
        """
        buffers = {} if buffers is None else buffers
        check_declared(model, buffers)
        with self._doing("sharing of the initial state"):
            self._announcer.call("replicate")
            share_initial_state(
                model,
                as_optimizers(optimizer),
                self._transport,
                device=self.device,
                settings=[
                    f"the run's seed is {self.seed}",
                    f"its assignment is {self._assignment}",
                    *describe_declared(buffers),
                ],
            )
        for other in self._replicas:  # of which this model may be a part
            other.expect_current_values()
        settings = Settings(
            strategy=Synchronous() if strategy is None else strategy,
            clip_norm=clip_norm,
            clip_value=clip_value,
            scaler=scaler,
            master_weights=master_weights,
            update=update,
            share_parameters=share_parameters,
            buffers=buffers,
        )
        replica = Replica(model, optimizer, settings, self._surroundings)
        self._replicas.append(replica)
        self._announcer.compares_steps = len(self._replicas) > 1
        return replica

    def load(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        micro_batches: int = MICRO_BATCHES,
        sampler: Any = None,
        batch_sampler: Any = None,
        shuffle: bool = False,
        drop_last: bool = False,
        num_workers: int = 0,
        persistent_workers: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> Loader | StreamLoader:
        """Cut `dataset` into global batches; iterating yields one epoch of them, in a new order each time.

        Args:
            dataset: has ``len`` and gives samples by index; or can only be iterated, see `StreamLoader`.
            batch_size: samples in one global batch, over all workers. Left out with a `batch_sampler`.
            micro_batches: M, into how many parts each batch is cut. Part of the run's definition, like the
                seed; workers share them out.
            sampler: yields the indices of a whole epoch, for all workers together; listed once an epoch, under
                random numbers that depend on the seed and the epoch only.
            batch_sampler: yields lists of indices, the global batches of an epoch, of any sizes.
            shuffle: draw a new order for each epoch.
            drop_last: leave out a shorter last batch.
            num_workers: loader processes of this worker; 0 loads in the worker itself.
            persistent_workers: keep them from epoch to epoch.
            collate_fn: makes a micro-batch from a list of samples; torch's own by default.

        Raises:
            UsageError: an argument has no usable value; fewer micro-batches than workers.
        """
        if micro_batches < 1:
            raise UsageError(f"micro_batches={micro_batches}: expected at least 1.")
        options: Options = {
            "micro_batches": micro_batches,
            "plan": AssignmentPlan(self._assign(micro_batches)),
            "rank": self.rank,
            "num_workers": num_workers,
            "persistent_workers": persistent_workers,
            "seed": self.seed,
            "device": self.device,
            "timeout_s": self._connection.step_timeout_s,
            "name": f"loader {len(self._loaders)}",
        }
        loader = make_loader(
            dataset,
            Selection(batch_size, shuffle, drop_last, sampler, batch_sampler),
            collate_fn=collate_fn,
            exchange=self._exchange,
            notify=self._notify,
            **options,
        )
        self._loaders.append(loader)
        return loader

    def batch(self, make: Make, micro_batches: int = MICRO_BATCHES, batch_size: int | None = None) -> Batch:
        """Return a global batch of data that is made on the fly, each micro-batch by its owner.

        Every rank calls this, in the same order. Micro-batches are made when the batch is first iterated, and
        kept. Random numbers are those of the micro-batch, whoever makes it.

        Args:
            make: ``make(micro_batch)`` -> data; with a `batch_size` ``make(micro_batch, size)``.
            micro_batches: M, how many are made.
            batch_size: samples in the global batch, which decides how many each micro-batch has. Without it all
                micro-batches weigh the same, unless the loss function returns weights.

        Raises:
            UsageError: an argument has no usable value; fewer micro-batches than workers.
        """
        if micro_batches < 1:
            raise UsageError(f"micro_batches={micro_batches}: expected at least 1.")
        return self._maker.batch(make, self._assign(micro_batches), batch_size)

    def evaluate(
        self,
        model: nn.Module,
        dataset: Any,
        metrics: Any,
        *,
        batch_size: int = 256,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> Any:
        """Return metrics over `dataset`, each sample counted once; the same figures at any world size.

        *Collective: every rank calls this, in the same order.* See `unisono.evaluation.evaluate`.

        Args:
            metrics: a function ``metric(model, micro_batch) -> (mean value, weight)``, a torchmetrics object,
                a pair ``(torchmetrics object, predict)``, or a dict of these.
            batch_size: samples in one forward pass.
        """
        with self._doing("start of an evaluation"):
            self._announcer.call("evaluate")
        return evaluate(
            model,
            dataset,
            metrics,
            batch_size=batch_size,
            transport=self._transport,
            rank=self.rank,
            seed=self.seed,
            device=self.device,
            collate_fn=collate_fn,
            num_workers=num_workers,
            timeout_s=self._connection.step_timeout_s,
            waiting=self._doing("merge of metrics"),
        )

    def agree(self, value: Any, how: str = "first") -> Any:
        """Return one value on all workers, for decisions such as stopping early.

        *Collective: every rank calls this, in the same order.* *Blocking.*

        Args:
            value: of this worker; anything that JSON can carry.
            how: ``"first"`` takes rank 0's; ``"any"``, ``"all"``, ``"min"``, ``"max"`` and ``"sum"`` combine
                numbers or truth values of all workers.

        Raises:
            UsageError: the value can't be sent or combined.
        """
        return self._agreement.agree(value, how)

    def mean(self, value: float, weight: float = 1.0) -> float:
        """Return the mean of all workers' values, by weight; nan if all weights are 0.

        *Collective: every rank calls this, in the same order.* *Blocking.* The order of workers changes no bit,
        but what each of them puts in may depend on who owns which micro-batch: for figures that must not, use
        `evaluate` or what `Replica.step` returns.
        """
        return self._agreement.mean(value, weight)

    def barrier(self, name: str = "barrier") -> None:
        """Return once every worker has called this. *Collective: every rank calls this, in the same order.*"""
        self._agreement.barrier(name)

    def first(self) -> AbstractContextManager[None]:
        """Let rank 0 do something before the others: ``with run.first(): prepare(data)``.

        *Collective: every rank calls this, in the same order.* The body runs on every worker, on rank 0 first
        and alone, so that the others find what it prepared. They wait as long as rank 0 lives, without a deadline.

        Raises:
            TransportError: on the others, if the body raised on rank 0, also if that catches its error.
        """
        return self._agreement.first(self._connection.store, lambda: self._doing("first", waits=False))

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the numbers of the epochs still to be done, from where the run stands."""
        while self._epoch < num_epochs:
            yield self._epoch
            self._epoch += 1

    def register(self, name: str, item: Stateful) -> None:
        """Make `item` part of the run's state, under `name`.

        Raises:
            UsageError: the name is taken, or `item` has no ``state_dict`` and ``load_state_dict``.
        """
        if name in self._registered:
            raise UsageError(f"register({name!r}): the name is taken; choose another.")
        if not all(callable(getattr(item, method, None)) for method in ("state_dict", "load_state_dict")):
            raise UsageError(
                f"register({name!r}): {type(item).__name__} has no state_dict() and load_state_dict()."
            )
        self._registered[name] = item

    def fingerprint(self, model: nn.Module) -> str:
        """Return 16 hex digits that name the exact weights and buffers of `model`."""
        return fingerprint(model)

    def state_dict(self) -> dict[str, Any]:
        """Return all that the run needs to go on, at any world size, in the middle of an epoch too."""
        return {
            "seed": self.seed,
            "epoch": self._epoch,
            "replicas": [replica.state_dict() for replica in self._replicas],
            "loaders": [loader.state_dict() for loader in self._loaders],
            "made": self._maker.count,
            "registered": {name: item.state_dict() for name, item in self._registered.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state. Every worker is given the same; replicas, loaders and names must be set up.

        Raises:
            UsageError: the state is of a run that was set up differently.
        """
        self._check_state(state)
        self._epoch = state["epoch"]
        self._maker.count = state["made"]
        for replica, part in zip(self._replicas, state["replicas"], strict=True):
            replica.load_state_dict(part)
        for loader, part in zip(self._loaders, state["loaders"], strict=True):
            loader.load_state_dict(part)
        for name, item in self._registered.items():
            item.load_state_dict(state["registered"][name])

    def close(self) -> None:
        """Leave the run in order; harmless if called twice."""
        if self._closed:
            return
        self._closed = True
        for loader in self._loaders:
            loader.close()
        for replica in self._replicas:
            replica.close()
        self._resources.close()
        self._connection.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                for replica in self._replicas:
                    replica.check_not_failed()
        except StepFailedError as failed:
            self._fail(failed)
            raise
        finally:
            ended_well = isinstance(error, SystemExit) and not error.code
            if error is not None and not ended_well:
                self._fail(error)
            self.close()

    def _fail(self, error: BaseException) -> None:
        """Tell the others that this worker ends with `error`, and end what they or it wait for."""
        self._connection.fail(error, self._step)
        # Frees a reduction that still runs in the background, and the peers that it waits for.
        self._transport.abort(TransportError(f"rank {self.rank} left the run with {error!r}"))
        for loader in self._loaders:  # nobody waits for what they are in the middle of
            loader.close(kill=True)

    @property
    def _step(self) -> int:
        return max((replica.num_steps for replica in self._replicas), default=-1)

    def _before_step(self, replica: Replica, batch: GlobalBatch, loss_fn: LossFunction) -> LossFunction:
        return loss_fn if self._audit is None else self._audit.before_step(replica, batch, loss_fn)

    def _emit(self, event: Event) -> None:
        for observer in self._observers:
            observer(event)

    def _notify(self, line: str) -> None:
        """Tell the user, once, what all workers know."""
        if self.is_main:
            self._emit(Notice(line))

    def _exchange(self, table: Tensor, operation: str) -> None:
        """Fill in the rows of `table` that other workers have. *Collective.*"""
        with self._doing(operation):
            self._announcer.call(operation)
            gather_rows(self._transport, table)

    def _make_transport(self, backend: str | None) -> Transport:
        if self.world_size == 1:
            return LocalTransport(device=self.device)
        store = self._connection.store
        assert store is not None
        # Under torchrun a script may join several times; each time is a group of its own.
        number = store.add(f"joined/{self.rank}", 1)
        with self._doing("the meeting of all workers"):
            transport, notice = connect_workers(
                PrefixStore(f"transport/{number}", store),
                self.rank,
                self.world_size,
                backend=backend,
                device=self.device,
                # More than the watchdog's deadline, which comes first and can say where the missing ones are.
                timeout_s=2 * self._connection.step_timeout_s,
                hostname=self._connection.address,
            )
        if notice is not None:
            self._notify(notice)
        return transport

    @contextmanager
    def _doing(self, operation: str, *, waits: bool = True) -> Iterator[None]:
        """Say, for those who wait for this worker, that it is in `operation`, and whether it waits for them."""
        self._connection.enter(operation, self._step, waits=waits)
        try:
            yield
        finally:
            self._connection.leave()

    @contextmanager
    def _leaving_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._connection.fail(error, -1)
            self.close()
            raise

    def _assign(self, micro_batches: int) -> Assignment:
        if isinstance(self._assignment, str):
            shares = even_shares(micro_batches, self.world_size)
        else:
            shares = scale_shares(micro_batches, self._assignment)
        return assign(micro_batches, shares, allow_idle=self._allow_idle)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        for what, expected, found in (
            ("seed", self.seed, state["seed"]),
            ("number of replicas", len(self._replicas), len(state["replicas"])),
            ("number of loaders", len(self._loaders), len(state["loaders"])),
            ("registered names", sorted(self._registered), sorted(state["registered"])),
        ):
            if expected != found:
                raise UsageError(
                    f"the state is of another run: its {what} is {found}, this run's {expected}. Set the run "
                    f"up as it was before loading."
                )

    def _suggest_more_workers(self) -> None:
        """Say once how to use cores that lie idle."""
        script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else None
        alone = self._connection.environment.kind == "alone" and self.device.type == "cpu"
        if not alone or script is None or not script.is_file():
            return
        cores, threads = usable_cores(), torch.get_num_threads()
        if cores >= 2 * threads:
            command = shlex.join(["unisono", "run", "-n", str(cores // threads), *sys.argv])
            self._emit(Notice(f"1 worker on {threads} of {cores} usable cores; to use them: {command}"))


def check_assignment(assignment: str | Sequence[int], world_size: int) -> None:
    """Raise a `UsageError` unless `assignment` means something for `world_size` workers. Pure."""
    if isinstance(assignment, str):
        if assignment != "even":
            raise UsageError(f"assignment={assignment!r}: expected 'even' or a share for each worker.")
        return
    if len(assignment) != world_size:
        raise UsageError(
            f"assignment={list(assignment)} has {len(assignment)} shares, but the run has {world_size} workers."
        )
    if not all(isinstance(share, int) and share >= 0 for share in assignment) or not any(assignment):
        raise UsageError(
            f"assignment={list(assignment)}: expected whole numbers of at least 0, not all of them 0."
        )


def _print_notices(event: Event) -> None:
    if isinstance(event, Notice):
        print(f"unisono: {event.message}", file=sys.stderr)
