"""NumPyro's ``MCMC`` in segments, each of which ends with a checkpoint.

A run is a sequence of states, each a function of the one before and of the adaptation, which all
chains share. Both are on disk after every segment, exactly, and so are the draws. After a
checkpoint the run goes on from what was written, as a resumed run does, so the two cannot differ.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
    MAX_ESS_COORDINATES,
    ChunkSizer,
    ProgressBar,
    SigintHandler,
)
from numpyro_sgmcmc.checkpoint.runner import ChainRunner
from numpyro_sgmcmc.checkpoint.running_moments import RunningMoments
from numpyro_sgmcmc.checkpoint.store import Checkpoint, CheckpointStore, encode
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.errors import (
    CheckpointError,
    CheckpointWarning,
    InvalidArgumentError,
    format_message,
    warn_user,
)
from numpyro_sgmcmc.sampling.kernel import SGMCMCKernel

# Segments of a run by default: at most a twentieth is lost, and as much is in memory.
_DEFAULT_NUM_SEGMENTS = 20


class CheckpointedMCMC(MCMC):
    """``MCMC`` that stores its state and draws on disk as it runs, and can be resumed.

    A run can be killed at any time. After :meth:`resume` its draws, state, diagnostics and running
    moments are bitwise those of an uninterrupted run on the same machine with the same versions.
    With ``chain_method`` ``"sequential"`` or ``"vectorized"``, ``MCMC.run`` with the same key gives
    the same draws.

    Ctrl-C stops a run at the next draw. The run then writes a checkpoint, warns and returns. A
    second Ctrl-C raises ``KeyboardInterrupt`` at once; draws up to the last checkpoint are stored.

    :param sampler: a kernel of this package.
    :param num_warmup: number of warm-up iterations, as for ``MCMC``. Parameters that are not listed
        here are also those of ``MCMC``.
    :param num_samples: number of draws per chain, before thinning.
    :param checkpoint: folder of the run, which need not exist. Only one run may use it at a time.
        Processes that share rows use the same folder.
    :param checkpoint_every: number of draws per chain, after thinning, between two checkpoints. In
        warm-up, the iterations of as many draws. Draws since the last checkpoint are in memory.
        Default None: a twentieth of the draws.
    :param keep_draws: whether to store the draws of the sites. If False, only :meth:`running_mean`,
        :meth:`running_variance` and fields such as ``diverging`` are stored. Default True.
    :raises ValueError: for a kernel that is not of this package, or an argument out of range.

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
        if not isinstance(sampler, SGMCMCKernel):
            raise InvalidArgumentError(
                f"`sampler` is a {type(sampler).__name__}, which `CheckpointedMCMC` cannot resume.",
                "pass a kernel of numpyro_sgmcmc, whose state suffices to continue a run.",
                "checkpoint-sampler",
            )
        errors.check_bool("keep_draws", keep_draws)
        if not isinstance(checkpoint, (str, os.PathLike)) or not str(checkpoint):
            raise InvalidArgumentError(
                f"`checkpoint` is {errors.describe_value(checkpoint)}, "
                "which is not the path of a folder.",
                "pass a string or a Path.",
                "checkpoint-folder",
            )
        errors.check_positive_int("num_samples", num_samples)
        errors.check_positive_int("thinning", thinning)
        if num_samples < thinning:
            raise InvalidArgumentError(
                f"`thinning` is {thinning}, which leaves no draws of `num_samples={num_samples}`.",
                "lower thinning, or raise num_samples.",
                "thinning",
            )
        if checkpoint_every is not None:
            errors.check_positive_int("checkpoint_every", checkpoint_every)
        self._cached_draws: dict[str, Any] | None = None
        self._current_checkpoint: Checkpoint | None = None
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
        self._num_iterations = num_warmup + num_samples
        self._store = CheckpointStore(self._folder)
        self._draws_on_disk = DrawsOnDisk(self._folder, self._sample_field)
        self._process_group = SINGLE_PROCESS

    @property
    def has_checkpoint(self) -> bool:
        """True if the folder holds a run that :meth:`resume` can continue."""
        return self._store.has_checkpoint

    def run(
        self,
        rng_key: Array,
        *args: Any,
        extra_fields: tuple[str, ...] = (),
        init_params: Any = None,
        **kwargs: Any,
    ) -> None:
        """Run from the start, as ``MCMC.run`` does, in a folder that holds no run yet.

        The parameters are those of ``MCMC.run``. The first checkpoint follows the part of the
        warm-up that all chains share. A run that is killed before must be started again.

        :raises FileExistsError: if the folder holds a run.
        :raises RuntimeError: if a checkpoint cannot be written, for example on a full disk, or
            another process uses the folder.
        """
        with self._lock_run_folder("run", args, kwargs):
            group = self._process_group
            with group.fail_together():
                if self.has_checkpoint:
                    raise FileExistsError(
                        format_message(
                            f"The folder `checkpoint='{self._folder}'` already holds a run.",
                            "call `resume` to continue it, or give `checkpoint` another folder.",
                            "checkpoint-folder",
                        )
                    )
                errors.check_rng_keys(rng_key)
            self._current_checkpoint = None
            fingerprint = self._compute_fingerprint(args, kwargs)
            group.check_equal("the key", describe(rng_key))
            if self.num_chains > 1 and is_prng_key(rng_key):
                rng_key = random.split(rng_key, self.num_chains)
            init_params = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), init_params)
            chains = self._create_chain_runner(tuple(extra_fields), args, kwargs)
            state = group.to_host(chains.init_states(rng_key, init_params))
            shapes = chains.eval_draw_shapes(state)
            stored = self._select_stored_fields(shapes)
            layout = encode(jax.tree.map(lambda x: np.empty((0,), x.dtype), stored), [])
            manifest: dict[str, Any] = {"fingerprint": fingerprint}
            manifest |= {"extra_fields": list(extra_fields), "layout": layout}
            manifest |= {"iterations": 0, "draws": 0, "blocks": []}
            # Local latent variables are in the state: their initial values are needed no more.
            adaptation = self.sampler.adaptation._replace(local_init=None)
            tree = {
                "state": state,
                "adaptation": group.to_host(adaptation),
                "running": RunningMoments.zeros(shapes[self._sample_field]),
            }
            with self._guard_writing():
                if group.is_primary:
                    self._draws_on_disk.create(stored, self._num_draws)
            self._save_checkpoint(Checkpoint(manifest, tree))
            self._run_remaining_segments(chains)

    def resume(self, *args: Any, **kwargs: Any) -> None:
        """Continue the run in the folder, or read it if it is complete.

        A line on standard error states the iteration from which the run continues.

        :param args: the model's positional arguments, as in :meth:`run`, since data are not stored.
        :param kwargs: the model's keyword arguments.
        :raises FileNotFoundError: if the folder holds no run.
        :raises ValueError: if kernel, settings, model, data or versions differ from those of the
            run (the message states what differs), or if the run was stored in another format.
        :raises RuntimeError: if no checkpoint can be read, none can be written, or another process
            uses the folder.
        """
        with self._lock_run_folder("resume", args, kwargs):
            group = self._process_group
            fingerprint = self._compute_fingerprint(args, kwargs)
            with group.fail_together():
                if (stored := self._store.read_latest_fingerprint()) is not None:
                    check_same_run(stored, fingerprint, self._folder, args)
                checkpoint = self._store.read_latest(self._check_last_draw_block)
            checksum = zlib.crc32(json.dumps(checkpoint.manifest["arrays"]).encode())
            group.check_equal(
                f"the checkpoint in '{self._folder}'",
                f"that of iteration {checkpoint.num_iterations} ({checksum:08x})",
            )
            chains = self._create_chain_runner(
                tuple(checkpoint.manifest["extra_fields"]), args, kwargs
            )
            state = checkpoint.tree["state"]
            z = jax.tree.map(lambda x: x[0], state.z) if self.num_chains > 1 else state.z
            self.sampler.restore(checkpoint.tree["adaptation"], self.num_warmup, z, args, kwargs)
            self._set_current_checkpoint(checkpoint)
            if group.is_primary:
                done, total = checkpoint.num_iterations, self._num_iterations
                position = f"resuming after iteration {done} of {total}"
                print(
                    f"'{self._folder}': {checkpoint.num_draws} of {self._num_draws} draws per "
                    f"chain; {'the run is complete' if done == total else position}.",
                    file=sys.stderr,
                )
            self._run_remaining_segments(chains)

    def running_mean(self, group_by_chain: bool = False) -> Any:
        """Return the mean of the draws so far, in float64; weighted if the step size is a schedule.

        :param group_by_chain: whether to return the mean of each chain, with a leading axis, in
            place of the mean over all chains. Default False.
        :return: a dict of means by site, of constrained values.
        """
        return self._running_moments.mean_and_variance(group_by_chain)[0]

    def running_variance(self, group_by_chain: bool = False) -> Any:
        """Return the variance of the draws so far (ddof=0), in the form of :meth:`running_mean`."""
        return self._running_moments.mean_and_variance(group_by_chain)[1]

    def get_samples(self, group_by_chain: bool = False) -> Any:
        """Return the draws so far, as ``MCMC`` does. The first call reads them from disk."""
        self._check_draws("get_samples")
        return super().get_samples(group_by_chain)

    def print_summary(self, prob: float = 0.9, exclude_deterministic: bool = True) -> None:
        """Print the summary of the draws so far, as ``MCMC.print_summary`` does."""
        self._check_draws("print_summary")
        super().print_summary(prob, exclude_deterministic)

    def warmup(self, *args: Any, **kwargs: Any) -> None:
        """Raise: :meth:`run` includes the warm-up, which has checkpoints too."""
        raise NotImplementedError(
            format_message(
                "`CheckpointedMCMC` has no `warmup`.",
                "call `run`, which includes the warm-up.",
                "checkpoint-unsupported",
            )
        )

    @property
    def post_warmup_state(self) -> Any:
        """None: a run continues from its folder."""
        return None

    @post_warmup_state.setter
    def post_warmup_state(self, state: Any) -> None:
        raise NotImplementedError(
            format_message(
                "`CheckpointedMCMC` cannot start from `post_warmup_state`.",
                "call `resume`, which continues from the folder.",
                "checkpoint-unsupported",
            )
        )

    # NumPyro's MCMC reads and sets these draws; here they are read from disk when needed.
    @property
    def _states(self) -> dict[str, Any] | None:
        checkpoint = self._current_checkpoint
        if checkpoint is None or checkpoint.num_draws == 0:
            return None
        if self._cached_draws is None:
            manifest = checkpoint.manifest
            draws = self._draws_on_disk.read(manifest["layout"], manifest["blocks"])
            self._cached_draws = jax.tree.map(jnp.asarray, draws)
        return self._cached_draws

    @_states.setter
    def _states(self, states: dict[str, Any] | None) -> None:
        self._cached_draws = states

    @property
    def _last_checkpoint(self) -> Checkpoint:
        assert self._current_checkpoint is not None
        return self._current_checkpoint

    @property
    def _running_moments(self) -> RunningMoments:
        self._check_draws("running_mean", must_be_stored=False)
        return self._last_checkpoint.tree["running"]

    def _check_draws(self, caller: str, must_be_stored: bool = True) -> None:
        if must_be_stored and not self._keep_draws:
            raise InvalidArgumentError(
                f"`{caller}` needs the draws, which `keep_draws=False` does not store.",
                "use `running_mean` and `running_variance`, or run with keep_draws=True.",
                "keep-draws",
            )
        if self._current_checkpoint is None or self._current_checkpoint.num_draws == 0:
            raise InvalidArgumentError(
                f"`{caller}` needs draws, but the run has no draws yet.",
                "call `run` or `resume` first.",
                "no-draws",
            )

    @contextmanager
    def _lock_run_folder(
        self, method_name: str, args: tuple, kwargs: dict[str, Any]
    ) -> Iterator[None]:
        """Lock the folder, with all processes that share the run."""
        for module in ("orbax.checkpoint", "zarr"):
            errors.import_optional(module, "`CheckpointedMCMC`", "checkpoint")
        self._process_group = get_process_group(Arguments(args, kwargs))
        self._process_group.check_equal("the call", f"`{method_name}`")
        with self._process_group.fail_together():
            if self._folder.exists() and not self._folder.is_dir():
                raise NotADirectoryError(
                    format_message(
                        f"`checkpoint` is '{self._folder}', which is a file.",
                        "pass the path of a folder.",
                        "checkpoint-folder",
                    )
                )
            if method_name == "resume" and not self.has_checkpoint:
                raise FileNotFoundError(
                    format_message(
                        f"The folder `checkpoint='{self._folder}'` holds no run to resume.",
                        "call `run`, or give `checkpoint` the folder of the run.",
                        "checkpoint-folder",
                    )
                )
        with self._process_group.lock_shared_folder(self._folder):
            yield

    def _compute_fingerprint(self, args: tuple, kwargs: dict) -> dict[str, str]:
        names = ("num_warmup", "num_samples", "num_chains", "thinning", "chain_method")
        settings = {n: getattr(self, n) for n in (*names, "postprocess_fn")}
        settings |= {"checkpoint_every": self._draws_per_segment, "keep_draws": self._keep_draws}
        settings["number of processes"] = self._process_group.num_processes
        fingerprint = compute_fingerprint(self.sampler, settings, args, kwargs)
        self._process_group.check_equal("settings and arguments", ", ".join(fingerprint))
        for name, text in fingerprint.items():
            self._process_group.check_equal(name, shorten_text(text))
        return fingerprint

    def _create_chain_runner(
        self, extra_fields: tuple[str, ...], args: tuple, kwargs: dict
    ) -> ChainRunner:
        self._args, self._kwargs, self._extra_fields = args, kwargs, extra_fields
        names = (self._sample_field, *self._default_fields, *extra_fields, *self._weight_field)
        return ChainRunner(self, names, self._draws_per_segment, args, kwargs)

    @property
    def _weight_field(self) -> tuple[str, ...]:
        """The field of weights where the step size is a schedule, for the running moments."""
        return ("weight",) if callable(self.sampler.options.step_size) else ()

    def _select_stored_fields(self, draws: dict[str, Any]) -> dict[str, Any]:
        """Return the part of the draws that is stored on disk."""
        dropped = set(self._weight_field) - set(self._extra_fields)
        if not self._keep_draws:
            dropped.add(self._sample_field)
        return {k: v for k, v in draws.items() if k not in dropped}

    def _check_last_draw_block(self, manifest: dict[str, Any]) -> None:
        if manifest["blocks"]:
            self._draws_on_disk.read(manifest["layout"], manifest["blocks"][-1:])

    def _set_current_checkpoint(self, checkpoint: Checkpoint) -> None:
        self._current_checkpoint = checkpoint
        self._last_state = checkpoint.tree["state"]
        self._states = None
        self._states_flat = None

    def _save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint; the run goes on from it as it was written."""
        with self._guard_writing():
            checkpoint = self._store.write(checkpoint, self._process_group.is_primary)
        self._set_current_checkpoint(checkpoint)

    @contextmanager
    def _guard_writing(self) -> Iterator[None]:
        """Report an error while writing, with the draws that are safe, in all processes."""
        last = self._current_checkpoint
        with self._process_group.fail_together():
            try:
                yield
            # Orbax and Zarr have error types for a full disk that are not OSErrors.
            except Exception as error:
                reason = " ".join(str(error).split())[:300]
                advice = "call `run` again"
                if last is not None:
                    advice = f"call `resume`. {last.num_draws} draws per chain are stored"
                raise CheckpointError(
                    f"Writing a checkpoint to '{self._folder}' failed ({reason}).",
                    f"free disk space and {advice}.",
                    "checkpoint-write",
                ) from error

    def _run_remaining_segments(self, chains: ChainRunner) -> None:
        total, last = self._num_iterations, self._last_checkpoint
        is_shown = self.progress_bar and self._process_group.is_primary
        with (
            SigintHandler(self._process_group) as interrupt,
            ProgressBar(is_shown, total, self.num_warmup, last.num_iterations) as bar,
        ):
            if is_shown and self._keep_draws and last.num_draws:
                bar.add_draws(self._draws_on_disk.read_leading(last.num_draws, MAX_ESS_COORDINATES))
            chunk_sizer = ChunkSizer(self._process_group)
            while self._last_checkpoint.num_iterations < total and not interrupt.poll():
                self._run_segment(chains, interrupt, chunk_sizer, bar)
        last = self._last_checkpoint
        if last.num_iterations < total:
            use_draws = f"use the draws so far, which are stored in '{self._folder}', or "
            warn_user(
                f"Sampling was stopped by Ctrl-C after {last.num_draws} of "
                f"{self._num_draws} draws per chain.",
                CheckpointWarning,
                f"{use_draws if last.num_draws else ''}continue the run with `resume`.",
                "interrupted-run",
            )

    def _run_segment(
        self,
        chains: ChainRunner,
        interrupt: SigintHandler,
        chunk_sizer: ChunkSizer,
        bar: ProgressBar,
    ) -> None:
        """Run to the next checkpoint, or to one at once if a stop is requested."""
        last = self._last_checkpoint
        done = last.num_iterations
        # As in NumPyro, the remainder of thinning is dropped before the first draw.
        num_discarded = self.num_warmup + self.num_samples % self.thinning
        is_warmup = done < num_discarded
        first, end = (0, num_discarded) if is_warmup else (num_discarded, self._num_iterations)
        # Draws come in whole segments, also after a run that was stopped between two of them.
        segment_length = self._draws_per_segment * self.thinning
        stop = min(end, first + ((done - first) // segment_length + 1) * segment_length)
        segment = chains.create_segment(last.tree["state"], done - stop if is_warmup else 0)
        while done < stop and not interrupt.is_stop_requested:
            num = stop - done
            if chains.can_vary_num_iterations:
                num = chunk_sizer.next_chunk(1 if is_warmup else self.thinning, num)
            segment = chains.run_iterations(segment, num)
            chunk_sizer.record(num)
            interrupt.poll()
            done += num
            bar.show_state(segment.state)
            bar.advance(num)
        segment = self._process_group.to_host(segment)
        tree, blocks = {**last.tree, "state": segment.state}, last.manifest["blocks"]
        num_new = 0 if is_warmup else (done - last.num_iterations) // self.thinning
        if num_new:
            draws = jax.tree.map(np.asarray, segment.draws)
            draws = jax.tree.map(lambda x: x[:, :num_new], chains.add_chain_axis(draws))
            sites, stored = draws[self._sample_field], self._select_stored_fields(draws)
            weights = draws["weight"] if self._weight_field else np.ones((self.num_chains, num_new))
            tree["running"] = last.tree["running"].add(sites, weights)
            is_writer = self._process_group.is_primary
            with self._guard_writing():
                block = self._draws_on_disk.write(stored, last.num_draws, is_writer)
            blocks = [*blocks, block]
            bar.add_draws(sites)
            bar.show_state(segment.state)
        progress = {"iterations": done, "draws": last.num_draws + num_new, "blocks": blocks}
        self._save_checkpoint(Checkpoint(last.manifest | progress, tree))
