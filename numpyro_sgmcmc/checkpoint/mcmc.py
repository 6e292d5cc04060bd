"""What :class:`~numpyro_sgmcmc.CheckpointedMCMC` cannot run with, refused before any work.

Running means and variances of draws that need not be kept, in float64 on the host.

Draw by draw (Welford 1962; West 1979 with weights), so that the result is the same to the last bit
however the run is cut into segments.

NumPyro's ``MCMC`` in segments, each of which ends with a checkpoint.

A run is a sequence of states, each a function of the one before, and what all chains share. Both
are on disk after every segment, exactly; so are the draws so far. After a checkpoint the run goes
on from what has been written, as a resumed run does: the two cannot differ.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.infer import MCMC
from numpyro.util import is_prng_key

from numpyro_sgmcmc import errors
from numpyro_sgmcmc.checkpoint.draws import DrawsOnDisk
from numpyro_sgmcmc.checkpoint.fingerprint import (
    check_same_run,
    compute_fingerprint,
    describe,
    shorten_text,
)
from numpyro_sgmcmc.checkpoint.processes import SINGLE_PROCESS, get_process_group
from numpyro_sgmcmc.checkpoint.progress import (
    CheckpointSchedule,
    ChunkSizer,
    ProgressBar,
    SigintHandler,
    print_resume_position,
)
from numpyro_sgmcmc.checkpoint.runner import ChainRunner, add_chain_axis, parse_collected_fields
from numpyro_sgmcmc.checkpoint.store import (
    Checkpoint,
    CheckpointStore,
    encode,
    report_write_failure,
)
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.errors import InvalidArgumentError, warn_user
from numpyro_sgmcmc.sampling.kernel import SGMCMCKernel

__all__ = [
    "CheckpointedMCMC",
    "RunningMoments",
    "check_checkpoint_settings",
    "check_dependencies",
    "check_run_folder",
]


def check_checkpoint_settings(
    sampler: Any,
    num_samples: Any,
    thinning: Any,
    checkpoint: Any,
    checkpoint_every: Any,
    keep_draws: Any,
) -> None:
    """Refuse what cannot be meant.

    :raises ValueError: naming the argument.
    """
    if not isinstance(sampler, SGMCMCKernel):
        raise InvalidArgumentError(
            f"`CheckpointedMCMC` is for the kernels of numpyro_sgmcmc, whose state holds all "
            f"that a run goes on from, but `sampler` is a {type(sampler).__name__}."
        )
    errors.check_bool("keep_draws", keep_draws)
    if not isinstance(checkpoint, (str, os.PathLike)) or not str(checkpoint):
        raise InvalidArgumentError(
            f"`checkpoint` is {checkpoint!r}, but must be the path of a folder."
        )
    errors.check_positive_int("num_samples", num_samples)
    errors.check_positive_int("thinning", thinning)
    if num_samples < thinning:
        raise InvalidArgumentError(
            f"`thinning` is {thinning}, which leaves none of {num_samples} samples."
        )
    if checkpoint_every is not None:
        errors.check_positive_int("checkpoint_every", checkpoint_every)


def check_run_folder(folder: Path, is_run_missing: bool) -> None:
    """Refuse a file where the run's folder should be, and a folder without a run.

    :param is_run_missing: whether there is no run, but should be.
    :raises OSError: naming the folder.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(
            f"`checkpoint` is '{folder}', a file: give it the path of a folder."
        )
    if is_run_missing:
        raise FileNotFoundError(f"'{folder}' holds no run that could be continued: call `run`.")


def check_dependencies() -> None:
    """Refuse missing packages.

    :raises ImportError: saying what to install.
    """
    errors.import_optional("orbax.checkpoint", "`CheckpointedMCMC`", "checkpoint")
    errors.import_optional("zarr", "`CheckpointedMCMC`", "checkpoint")


class RunningMoments(NamedTuple):
    """
    - **weight** - sum of the draws' weights, shape ``(chains,)``.
    - **mean** - weighted means, a pytree of arrays of shape ``(chains, ...)``.
    - **m2** - weighted sums of squared deviations from the mean, of the same shapes.
    """

    weight: np.ndarray
    mean: Any
    m2: Any

    @classmethod
    def zeros(cls, draws: Any) -> RunningMoments:
        """Moments of no draws; ``draws`` has leaves of shape ``(chains, draws, ...)``."""
        leaves = jax.tree.leaves(draws)
        empty = jax.tree.map(lambda x: np.zeros((x.shape[0], *x.shape[2:])), draws)
        weight = np.zeros(leaves[0].shape[0] if leaves else 1)
        return cls(weight, empty, jax.tree.map(np.copy, empty))

    def add(self, draws: Any, weights: np.ndarray) -> RunningMoments:
        """With some draws more.

        :param draws: leaves of shape ``(chains, draws, ...)``.
        :param weights: not negative, shape ``(chains, draws)``.
        """
        total, shares = self.weight, []
        for w in np.asarray(weights, np.float64).T:
            total = total + w
            shares.append((w, np.divide(w, total, out=np.zeros_like(w), where=total > 0)))

        def follow(mean: np.ndarray, square: np.ndarray, x: np.ndarray) -> tuple:
            column = (-1,) + (1,) * (mean.ndim - 1)
            for k, (w, share) in enumerate(shares):
                away = x[:, k] - mean
                mean = mean + share.reshape(column) * away
                square = square + w.reshape(column) * away * (x[:, k] - mean)
            return mean, square

        leaves, structure = jax.tree.flatten(draws)
        before = zip(jax.tree.leaves(self.mean), jax.tree.leaves(self.m2), leaves, strict=True)
        # Deviations of 10^20 are squared too; that is the draws' doing and seen in the result.
        with np.errstate(over="ignore", invalid="ignore"):
            pairs = [follow(m, s, np.asarray(x, np.float64)) for m, s, x in before]
        mean = jax.tree.unflatten(structure, [m for m, _ in pairs])
        return RunningMoments(total, mean, jax.tree.unflatten(structure, [s for _, s in pairs]))

    def compute_chain_moments(self) -> tuple[Any, Any]:
        """Means and variances of each chain, leaves of shape ``(chains, ...)``."""
        variance = jax.tree.map(lambda s: s / self._broadcast_weight(s), self.m2)
        return self.mean, variance

    def compute_pooled_moments(self) -> tuple[Any, Any]:
        """Mean and variance of the draws of all chains together, leaves of shape ``(...)``."""
        total = self.weight.sum()
        mean = jax.tree.map(lambda m: (m * self._broadcast_weight(m)).sum(0) / total, self.mean)

        def variance(s: np.ndarray, m: np.ndarray, centre: np.ndarray) -> np.ndarray:
            return (s + self._broadcast_weight(m) * (m - centre) ** 2).sum(0) / total

        return mean, jax.tree.map(variance, self.m2, self.mean, mean)

    def _broadcast_weight(self, x: np.ndarray) -> np.ndarray:
        return self.weight.reshape((-1,) + (1,) * (x.ndim - 1))


_DEFAULT_NUM_SEGMENTS = 20


class CheckpointedMCMC(MCMC):
    """``MCMC`` that keeps itself on disk as it runs, and can go on after any end.

    A run that was killed, at any time, and resumed gives the same draws, state, diagnostics and
    running moments as one that was not, bit for bit, on the same machine with the same versions.
    Its draws are those of ``MCMC.run`` with the same key, up to rounding.

    Ctrl-C ends a run with the next draw, with a warning, a checkpoint and a normal return: the
    draws so far are there as after a whole run. A second Ctrl-C ends it at once, with the draws up
    to the last checkpoint.

    :param sampler: a kernel of this package.
    :param num_warmup: as for ``MCMC``, like all that is not listed here.
    :param num_samples: draws of a chain, before thinning.
    :param checkpoint: folder of the run, which need not exist. One run uses it at a time; processes
        that share the rows have the same.
    :param checkpoint_every: draws of a chain from checkpoint to checkpoint, after thinning; in
        warm-up, the iterations of as many. These many draws are in memory at a time. Default None:
        a twentieth of the draws.
    :param keep_draws: whether to keep the draws of the sites on disk. If False, only
        :meth:`running_mean` and :meth:`running_variance` tell of them; fields such as
        ``diverging`` are kept all the same. Default True.
    :raises ValueError: for a kernel that is not of this package, or an option out of range.

    .. code-block:: python

        mcmc = CheckpointedMCMC(kernel, num_warmup=1000, num_samples=10000, checkpoint="run")
        if mcmc.has_checkpoint:
            mcmc.resume(X, y, batch_size=256)
        else:
            mcmc.run(jax.random.key(0), X, y, batch_size=256)
    """

    def __init__(
        self,
        sampler: SGMCMCKernel,
        *,
        num_warmup: int,
        num_samples: int,
        checkpoint: str | Path,
        checkpoint_every: int | None = None,
        keep_draws: bool = True,
        num_chains: int = 1,
        thinning: int = 1,
        postprocess_fn: Callable | None = None,
        chain_method: str | Callable = "parallel",
        progress_bar: bool = True,
    ) -> None:
        check_checkpoint_settings(
            sampler, num_samples, thinning, checkpoint, checkpoint_every, keep_draws
        )
        self._cached_draws: dict[str, Any] | None = None
        super().__init__(
            sampler,
            num_warmup=num_warmup,
            num_samples=num_samples,
            num_chains=num_chains,
            thinning=thinning,
            postprocess_fn=postprocess_fn,
            chain_method=chain_method,
            progress_bar=progress_bar,
        )
        self._keep_draws = bool(keep_draws)
        self._folder = Path(checkpoint)
        self._num_draws = num_samples // thinning
        self._draws_per_segment = min(
            checkpoint_every or -(-self._num_draws // _DEFAULT_NUM_SEGMENTS), self._num_draws
        )
        # As NumPyro does: what thinning leaves over is dropped before the first draw.
        before_draws = num_warmup + num_samples % thinning
        self._checkpoint_schedule = CheckpointSchedule(
            self._draws_per_segment * thinning, before_draws, self._num_draws * thinning
        )
        self._checkpoint_store = CheckpointStore(self._folder)
        self._draws_on_disk = DrawsOnDisk(self._folder, self._sample_field)
        self._current_checkpoint: Checkpoint | None = None
        self._process_group = SINGLE_PROCESS

    @property
    def has_checkpoint(self) -> bool:
        """Whether the folder holds a run that :meth:`resume` can continue."""
        return self._checkpoint_store.has_checkpoint

    def run(
        self,
        rng_key: Array,
        *args: Any,
        extra_fields: tuple[str, ...] = (),
        init_params: Any = None,
        **kwargs: Any,
    ) -> None:
        """Run from the start, as ``MCMC.run`` does, in a folder that holds no run yet.

        A run that was killed before its first checkpoint, in the warm-up's shared part, has left
        nothing to go on from: run it again.

        :raises FileExistsError: where the folder holds a run.
        :raises RuntimeError: where a checkpoint cannot be written, for example on a full disk, or
            another process uses the folder.
        """
        with self._lock_run_folder("run", args, kwargs):
            self._start_run(rng_key, args, kwargs, tuple(extra_fields), init_params)

    @contextmanager
    def _lock_run_folder(
        self, method_name: str, args: tuple, kwargs: dict[str, Any]
    ) -> Iterator[None]:
        """Hold the folder, with all processes that share the run."""
        check_dependencies()
        self._process_group = get_process_group(Arguments(args, kwargs))
        self._process_group.check_equal("call", f"`{method_name}`")
        with self._process_group.fail_together():
            check_run_folder(self._folder, method_name == "resume" and not self.has_checkpoint)
        with self._process_group.lock_shared_folder(self._folder):
            yield

    def _start_run(
        self,
        rng_key: Array,
        args: tuple,
        kwargs: dict[str, Any],
        extra_fields: tuple[str, ...],
        init_params: Any,
    ) -> None:
        with self._process_group.fail_together():
            self._checkpoint_store.check_no_run()
            errors.check_rng_keys(rng_key)
        found = self._compute_fingerprint(args, kwargs)
        self._process_group.check_equal("key", describe(rng_key))
        if self.num_chains > 1 and is_prng_key(rng_key):
            rng_key = random.split(rng_key, self.num_chains)
        init_params = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), init_params)
        chains = self._create_chain_runner(extra_fields, args, kwargs)
        state = self._process_group.to_host(
            chains.init_states(rng_key, self.num_warmup, init_params)
        )
        room = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), chains.eval_draw_shapes(state))
        room = add_chain_axis(room, self.num_chains)
        stored = self._select_stored_fields(room)
        layout = encode(jax.tree.map(lambda x: np.empty((0,), x.dtype), stored), [])
        header = {"fingerprint": found, "extra_fields": list(extra_fields), "layout": layout}
        tree = {
            "state": state,
            # Where local values began is of no use any more; where they are is in the state.
            "adaptation": self._process_group.to_host(
                self.sampler.adaptation._replace(local_init=None)
            ),
            "running": RunningMoments.zeros(room[self._sample_field])._asdict(),
        }
        with self._guard_writing(None) as is_writer:
            if is_writer:
                self._draws_on_disk.create(stored, self._num_draws)
        self._save_checkpoint(Checkpoint(0, 0, [], header, tree))
        self._run_remaining_segments(chains)

    def resume(self, *args: Any, **kwargs: Any) -> None:
        """Continue the run in the folder, or read it if it is complete; a line says from where.

        :param args: the model's positional arguments, as in :meth:`run`: data are not kept.
        :param kwargs: its keyword arguments.
        :raises FileNotFoundError: where the folder holds no run that could be continued.
        :raises ValueError: where kernel, settings, model, data or versions are not those of the
            run, naming what differs, or where it was stored in an older format.
        :raises RuntimeError: where no checkpoint can be read, or none can be written, or another
            process uses the folder.
        """
        with self._lock_run_folder("resume", args, kwargs):
            self._resume_run(args, kwargs)

    def _resume_run(self, args: tuple, kwargs: dict[str, Any]) -> None:
        with self._process_group.fail_together():
            self._checkpoint_store.check_format_version()
        now = self._compute_fingerprint(args, kwargs)
        with self._process_group.fail_together():
            if (stored := self._checkpoint_store.latest_fingerprint) is not None:
                check_same_run(stored, now, self._folder, args)
            reached = self._checkpoint_store.read_latest(self._check_last_draw_block)
        self._process_group.check_equal(f"checkpoint in '{self._folder}'", reached.label)
        chains = self._create_chain_runner(tuple(reached.header["extra_fields"]), args, kwargs)
        state = reached.tree["state"]
        z = jax.tree.map(lambda x: x[0], state.z) if self.num_chains > 1 else state.z
        self.sampler.restore(reached.tree["adaptation"], self.num_warmup, z, args, kwargs)
        self._set_current_checkpoint(reached)
        print_resume_position(
            self._process_group,
            self._folder,
            reached,
            self._num_draws,
            self._checkpoint_schedule.num_iterations,
        )
        self._run_remaining_segments(chains)

    def running_mean(self, group_by_chain: bool = False) -> Any:
        """Mean of the draws so far, weighted where the step size is a schedule; float64.

        :param group_by_chain: whether to have one of each chain, with a leading axis for them, and
            not that of all chains together. Default False.
        :return: a dict by site, of constrained values.
        """
        running = self._running_moments
        return (
            running.compute_chain_moments()[0]
            if group_by_chain
            else running.compute_pooled_moments()[0]
        )

    def running_variance(self, group_by_chain: bool = False) -> Any:
        """Variance of the draws so far, as :func:`numpy.var` has it; see :meth:`running_mean`."""
        running = self._running_moments
        return (
            running.compute_chain_moments()[1]
            if group_by_chain
            else running.compute_pooled_moments()[1]
        )

    def get_samples(self, group_by_chain: bool = False) -> Any:
        """The draws so far, read from disk at the first call; :func:`open_draws` reads lazily."""
        self._check_draws_kept("get_samples")
        return super().get_samples(group_by_chain)

    def print_summary(self, prob: float = 0.9, exclude_deterministic: bool = True) -> None:
        self._check_draws_kept("print_summary")
        super().print_summary(prob, exclude_deterministic)

    def warmup(self, *args: Any, **kwargs: Any) -> None:
        """Not there: :meth:`run` keeps the warm-up on disk as well."""
        raise NotImplementedError("`CheckpointedMCMC` has no `warmup`: `run` includes it.")

    @property
    def post_warmup_state(self) -> Any:
        """None: a run goes on from its folder."""
        return None

    @post_warmup_state.setter
    def post_warmup_state(self, state: Any) -> None:
        raise NotImplementedError(
            "`CheckpointedMCMC` starts from no other run's state: it goes on from its folder."
        )

    @property
    def _states(self) -> dict[str, Any] | None:
        reached = self._current_checkpoint if hasattr(self, "_current_checkpoint") else None
        if reached is None or reached.num_draws == 0:
            return None
        if self._cached_draws is None:
            draws = self._draws_on_disk.read(reached.header["layout"], reached.draw_blocks)
            self._cached_draws = jax.tree.map(jnp.asarray, draws)
        return self._cached_draws

    @_states.setter
    def _states(self, states: dict[str, Any] | None) -> None:
        self._cached_draws = states

    @property
    def _running_moments(self) -> RunningMoments:
        if self._current_checkpoint is None or self._current_checkpoint.num_draws == 0:
            raise RuntimeError("There are no draws yet: call `run` or `resume` first.")
        return RunningMoments(**self._current_checkpoint.tree["running"])

    def _check_draws_kept(self, caller: str) -> None:
        if not self._keep_draws:
            raise RuntimeError(
                f"`{caller}` needs the draws, which `keep_draws=False` does not keep; "
                "`running_mean` and `running_variance` are there."
            )
        if self._current_checkpoint is not None and self._current_checkpoint.num_draws == 0:
            raise RuntimeError(f"There are no draws yet for `{caller}`: call `resume`.")

    def _compute_fingerprint(self, args: tuple, kwargs: dict) -> dict[str, str]:
        names = ("num_warmup", "num_samples", "num_chains", "thinning", "chain_method")
        settings = {n: getattr(self, n) for n in (*names, "postprocess_fn")}
        settings |= {"checkpoint_every": self._draws_per_segment, "keep_draws": self._keep_draws}
        settings["number of processes"] = self._process_group.num_processes
        found = compute_fingerprint(self.sampler, settings, args, kwargs)
        self._process_group.check_all_equal(
            {name: shorten_text(text) for name, text in found.items()}
        )
        return found

    def _create_chain_runner(
        self, extra_fields: tuple[str, ...], args: tuple, kwargs: dict
    ) -> ChainRunner:
        self._args, self._kwargs = args, kwargs
        names = (self._sample_field, *self._default_fields, *extra_fields, *self._auxiliary_fields)
        fields, removed = parse_collected_fields(names, self._sample_field)
        self._extra_fields = extra_fields
        return ChainRunner(
            self.sampler,
            self.num_chains,
            self.chain_method,
            fields,
            removed,
            self.postprocess_fn,
            self.thinning,
            self._draws_per_segment,
            args,
            kwargs,
        )

    @property
    def _auxiliary_fields(self) -> tuple[str, ...]:
        """Fields that the running moments need, asked for or not."""
        return ("weight",) if callable(self.sampler.options.step_size) else ()

    def _select_stored_fields(self, draws: dict[str, Any]) -> dict[str, Any]:
        """What of the draws goes to disk."""
        dropped = set(self._auxiliary_fields) - set(self._extra_fields)
        if not self._keep_draws:
            dropped.add(self._sample_field)
        return {k: v for k, v in draws.items() if k not in dropped}

    def _set_current_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Be at a checkpoint, for everything that can be asked of this object."""
        self._current_checkpoint = checkpoint
        self._last_state = checkpoint.tree["state"]
        self._states = None
        self._states_flat = None

    def _save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint and go on from what was written."""
        with self._guard_writing(self._current_checkpoint) as is_writer:
            tree = self._checkpoint_store.write(checkpoint, is_writer)
        self._set_current_checkpoint(checkpoint._replace(tree=tree))

    @contextmanager
    def _guard_writing(self, last_checkpoint: Checkpoint | None) -> Iterator[bool]:
        """All processes come to the end of this when one has written."""
        with (
            self._process_group.fail_together(),
            report_write_failure(self._folder, last_checkpoint.num_draws if last_checkpoint else 0),
        ):
            yield self._process_group.is_primary

    def _check_last_draw_block(self, header: dict[str, Any]) -> None:
        if header["blocks"]:
            self._draws_on_disk.read(header["layout"], header["blocks"][-1:])

    def _run_remaining_segments(self, chain_runner: ChainRunner) -> None:
        """Segment after segment until the run is complete or is to stop."""
        assert self._current_checkpoint is not None
        last = self._checkpoint_schedule.num_iterations
        is_shown = self.progress_bar and self._process_group.is_primary
        drawn = is_shown and self._keep_draws and self._states
        sites = drawn[self._sample_field] if drawn else None
        done, pace = self._current_checkpoint.num_iterations, ChunkSizer(self._process_group)
        with (
            SigintHandler(self._process_group) as interrupt,
            ProgressBar(is_shown, last, self.num_warmup, done, sites) as watch,
        ):
            while self._current_checkpoint.num_iterations < last and not interrupt.poll():
                self._run_segment(chain_runner, interrupt, pace, watch)
        if self._current_checkpoint.num_iterations < last:
            warn_user(
                f"Stopped by Ctrl-C after {self._current_checkpoint.num_draws} of {self._num_draws} draws a chain "
                f"(iteration {self._current_checkpoint.num_iterations} of {last}), which are kept in "
                f"'{self._folder}' and can be used as they are; `resume` continues the run."
            )

    def _run_segment(
        self,
        chain_runner: ChainRunner,
        sigint_handler: SigintHandler,
        chunk_sizer: ChunkSizer,
        progress_bar: ProgressBar,
    ) -> None:
        """To the next checkpoint, or to one at once if the user wants to stop."""
        before = self._current_checkpoint
        assert before is not None
        done = before.num_iterations
        stop, is_warmup = (
            self._checkpoint_schedule.next_stop(done),
            done < self._checkpoint_schedule.num_discarded_iterations,
        )
        segment = chain_runner.create_segment(before.tree["state"], done - stop if is_warmup else 0)
        unit = 1 if is_warmup else self.thinning
        while done < stop and not sigint_handler.is_stop_requested:
            most = stop - done
            iterations = (
                chunk_sizer.next_chunk(unit, most) if chain_runner.can_vary_num_iterations else most
            )
            segment = chain_runner.run_iterations(segment, iterations)
            chunk_sizer.record(iterations)
            sigint_handler.poll()
            done += iterations
            progress_bar.show_state(segment.state)
            progress_bar.advance(iterations)
        segment = self._process_group.to_host(segment)
        tree = {**before.tree, "state": segment.state}
        num = 0 if is_warmup else (done - before.num_iterations) // self.thinning
        blocks = before.draw_blocks
        if num:
            draws = jax.tree.map(np.asarray, segment.draws)
            draws = jax.tree.map(lambda x: x[:, :num], add_chain_axis(draws, self.num_chains))
            sites, stored = draws[self._sample_field], self._select_stored_fields(draws)
            weights = draws["weight"] if self._auxiliary_fields else np.ones((self.num_chains, num))
            tree["running"] = RunningMoments(**tree["running"]).add(sites, weights)._asdict()
            with self._guard_writing(before) as is_writer:
                if is_writer:
                    self._draws_on_disk.write(stored, before.num_draws)
            blocks = [
                *blocks,
                [
                    before.num_draws,
                    before.num_draws + num,
                    self._draws_on_disk.compute_checksum(stored),
                ],
            ]
            progress_bar.add_draws(sites)
            progress_bar.show_state(segment.state)
        self._save_checkpoint(Checkpoint(done, before.num_draws + num, blocks, before.header, tree))
