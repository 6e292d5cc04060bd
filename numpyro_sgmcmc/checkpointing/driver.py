"""NumPyro's ``MCMC`` in segments, each of which ends with a checkpoint.

A run is a sequence of states, each a function of the one before, and what all chains share. Both
are on disk after every segment, exactly; so are the draws so far. After a checkpoint the run goes
on from what has been written, as a resumed run does: the two cannot differ.
"""

from __future__ import annotations

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

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.checkpointing.codec import encode
from numpyro_sgmcmc.checkpointing.draws import DrawsOnDisk
from numpyro_sgmcmc.checkpointing.fingerprint import describe, fingerprint, refuse_other_run, short
from numpyro_sgmcmc.checkpointing.loop import Chains, kept_and_removed, with_chains
from numpyro_sgmcmc.checkpointing.processes import ALONE, processes_of
from numpyro_sgmcmc.checkpointing.refusals import refuse_environment, refuse_folder, refuse_settings
from numpyro_sgmcmc.checkpointing.running import RunningMoments
from numpyro_sgmcmc.checkpointing.stops import Stops
from numpyro_sgmcmc.checkpointing.store import Checkpoint, Store, safely
from numpyro_sgmcmc.checkpointing.watch import Interrupt, Pace, Watch, tell_where
from numpyro_sgmcmc.checks import notify
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.samplers.base import SGMCMCKernel

__all__ = ["CheckpointedMCMC"]

_SEGMENTS = 20


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
        refuse_settings(sampler, num_samples, thinning, checkpoint, checkpoint_every, keep_draws)
        self._draws_read: dict[str, Any] | None = None
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
        self._every = min(checkpoint_every or -(-self._num_draws // _SEGMENTS), self._num_draws)
        # As NumPyro does: what thinning leaves over is dropped before the first draw.
        before_draws = num_warmup + num_samples % thinning
        self._stops = Stops(self._every * thinning, before_draws, self._num_draws * thinning)
        self._store = Store(self._folder)
        self._disk = DrawsOnDisk(self._folder, self._sample_field)
        self._reached: Checkpoint | None = None
        self._processes = ALONE

    @property
    def has_checkpoint(self) -> bool:
        """Whether the folder holds a run that :meth:`resume` can continue."""
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

        A run that was killed before its first checkpoint, in the warm-up's shared part, has left
        nothing to go on from: run it again.

        :raises FileExistsError: where the folder holds a run.
        :raises RuntimeError: where a checkpoint cannot be written, for example on a full disk, or
            another process uses the folder.
        """
        with self._in_folder("run", args, kwargs):
            self._begin(rng_key, args, kwargs, tuple(extra_fields), init_params)

    @contextmanager
    def _in_folder(self, call: str, args: tuple, kwargs: dict[str, Any]) -> Iterator[None]:
        """Hold the folder, with all processes that share the run."""
        refuse_environment()
        self._processes = processes_of(Arguments(args, kwargs))
        self._processes.refuse_unlike("call", f"`{call}`")
        with self._processes.together():
            refuse_folder(self._folder, call == "resume" and not self.has_checkpoint)
        with self._processes.holding(self._folder):
            yield

    def _begin(
        self,
        rng_key: Array,
        args: tuple,
        kwargs: dict[str, Any],
        extra_fields: tuple[str, ...],
        init_params: Any,
    ) -> None:
        with self._processes.together():
            self._store.refuse_begun()
            checks.one_key_or_more(rng_key)
        found = self._fingerprint(args, kwargs)
        self._processes.refuse_unlike("key", describe(rng_key))
        if self.num_chains > 1 and is_prng_key(rng_key):
            rng_key = random.split(rng_key, self.num_chains)
        init_params = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), init_params)
        chains = self._chains(extra_fields, args, kwargs)
        state = self._processes.on_host(chains.start(rng_key, self.num_warmup, init_params))
        room = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), chains.room(state))
        room = with_chains(room, self.num_chains)
        stored = self._stored(room)
        layout = encode(jax.tree.map(lambda x: np.empty((0,), x.dtype), stored), [])
        header = {"fingerprint": found, "extra_fields": list(extra_fields), "layout": layout}
        tree = {
            "state": state,
            # Where local values began is of no use any more; where they are is in the state.
            "adaptation": self._processes.on_host(self.sampler.adaptation._replace(locals=None)),
            "running": RunningMoments.zeros(room[self._sample_field])._asdict(),
        }
        with self._writing(None) as is_writer:
            if is_writer:
                self._disk.create(stored, self._num_draws)
        self._keep(Checkpoint(0, 0, [], header, tree))
        self._continue(chains)

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
        with self._in_folder("resume", args, kwargs):
            self._go_on(args, kwargs)

    def _go_on(self, args: tuple, kwargs: dict[str, Any]) -> None:
        with self._processes.together():
            self._store.refuse_other_format()
        now = self._fingerprint(args, kwargs)
        with self._processes.together():
            if (stored := self._store.fingerprint) is not None:
                refuse_other_run(stored, now, self._folder, args)
            reached = self._store.newest(self._check_last_block)
        self._processes.refuse_unlike(f"checkpoint in '{self._folder}'", reached.label)
        chains = self._chains(tuple(reached.header["extra_fields"]), args, kwargs)
        state = reached.tree["state"]
        z = jax.tree.map(lambda x: x[0], state.z) if self.num_chains > 1 else state.z
        self.sampler.restore(reached.tree["adaptation"], self.num_warmup, z, args, kwargs)
        self._reach(reached)
        tell_where(self._processes, self._folder, reached, self._num_draws, self._stops.last)
        self._continue(chains)

    def running_mean(self, group_by_chain: bool = False) -> Any:
        """Mean of the draws so far, weighted where the step size is a schedule; float64.

        :param group_by_chain: whether to have one of each chain, with a leading axis for them, and
            not that of all chains together. Default False.
        :return: a dict by site, of constrained values.
        """
        running = self._running
        return running.chain_moments()[0] if group_by_chain else running.pooled()[0]

    def running_variance(self, group_by_chain: bool = False) -> Any:
        """Variance of the draws so far, as :func:`numpy.var` has it; see :meth:`running_mean`."""
        running = self._running
        return running.chain_moments()[1] if group_by_chain else running.pooled()[1]

    def get_samples(self, group_by_chain: bool = False) -> Any:
        """The draws so far, read from disk at the first call; :func:`open_draws` reads lazily."""
        self._check_kept("get_samples")
        return super().get_samples(group_by_chain)

    def print_summary(self, prob: float = 0.9, exclude_deterministic: bool = True) -> None:
        self._check_kept("print_summary")
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
        reached = self._reached if hasattr(self, "_reached") else None
        if reached is None or reached.draws == 0:
            return None
        if self._draws_read is None:
            draws = self._disk.read(reached.header["layout"], reached.blocks)
            self._draws_read = jax.tree.map(jnp.asarray, draws)
        return self._draws_read

    @_states.setter
    def _states(self, states: dict[str, Any] | None) -> None:
        self._draws_read = states

    @property
    def _running(self) -> RunningMoments:
        if self._reached is None or self._reached.draws == 0:
            raise RuntimeError("There are no draws yet: call `run` or `resume` first.")
        return RunningMoments(**self._reached.tree["running"])

    def _check_kept(self, wanted_by: str) -> None:
        if not self._keep_draws:
            raise RuntimeError(
                f"`{wanted_by}` needs the draws, which `keep_draws=False` does not keep; "
                "`running_mean` and `running_variance` are there."
            )
        if self._reached is not None and self._reached.draws == 0:
            raise RuntimeError(f"There are no draws yet for `{wanted_by}`: call `resume`.")

    def _fingerprint(self, args: tuple, kwargs: dict) -> dict[str, str]:
        names = ("num_warmup", "num_samples", "num_chains", "thinning", "chain_method")
        settings = {n: getattr(self, n) for n in (*names, "postprocess_fn")}
        settings |= {"checkpoint_every": self._every, "keep_draws": self._keep_draws}
        settings["number of processes"] = self._processes.num
        found = fingerprint(self.sampler, settings, args, kwargs)
        self._processes.refuse_unlike_each({name: short(text) for name, text in found.items()})
        return found

    def _chains(self, extra_fields: tuple[str, ...], args: tuple, kwargs: dict) -> Chains:
        self._args, self._kwargs = args, kwargs
        names = (self._sample_field, *self._default_fields, *extra_fields, *self._hidden)
        fields, removed = kept_and_removed(names, self._sample_field)
        self._extra_fields = extra_fields
        return Chains(
            self.sampler,
            self.num_chains,
            self.chain_method,
            fields,
            removed,
            self.postprocess_fn,
            self.thinning,
            self._every,
            args,
            kwargs,
        )

    @property
    def _hidden(self) -> tuple[str, ...]:
        """Fields that the running moments need, asked for or not."""
        return ("weight",) if callable(self.sampler.options.step_size) else ()

    def _stored(self, draws: dict[str, Any]) -> dict[str, Any]:
        """What of the draws goes to disk."""
        dropped = set(self._hidden) - set(self._extra_fields)
        if not self._keep_draws:
            dropped.add(self._sample_field)
        return {k: v for k, v in draws.items() if k not in dropped}

    def _reach(self, checkpoint: Checkpoint) -> None:
        """Be at a checkpoint, for everything that can be asked of this object."""
        self._reached = checkpoint
        self._last_state = checkpoint.tree["state"]
        self._states = None
        self._states_flat = None

    def _keep(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint and go on from what was written."""
        with self._writing(self._reached) as is_writer:
            tree = self._store.write(checkpoint, is_writer)
        self._reach(checkpoint._replace(tree=tree))

    @contextmanager
    def _writing(self, reached: Checkpoint | None) -> Iterator[bool]:
        """All processes come to the end of this when one has written."""
        with self._processes.together(), safely(self._folder, reached.draws if reached else 0):
            yield self._processes.is_first

    def _check_last_block(self, header: dict[str, Any]) -> None:
        if header["blocks"]:
            self._disk.read(header["layout"], header["blocks"][-1:])

    def _continue(self, chains: Chains) -> None:
        """Segment after segment until the run is complete or is to stop."""
        assert self._reached is not None
        last = self._stops.last
        is_shown = self.progress_bar and self._processes.is_first
        drawn = is_shown and self._keep_draws and self._states
        sites = drawn[self._sample_field] if drawn else None
        done, pace = self._reached.iterations, Pace(self._processes)
        with (
            Interrupt(self._processes) as interrupt,
            Watch(is_shown, last, self.num_warmup, done, sites) as watch,
        ):
            while self._reached.iterations < last and not interrupt.look():
                self._run_segment(chains, interrupt, pace, watch)
        if self._reached.iterations < last:
            notify(
                f"Stopped by Ctrl-C after {self._reached.draws} of {self._num_draws} draws a chain "
                f"(iteration {self._reached.iterations} of {last}), which are kept in "
                f"'{self._folder}' and can be used as they are; `resume` continues the run."
            )

    def _run_segment(self, chains: Chains, interrupt: Interrupt, pace: Pace, watch: Watch) -> None:
        """To the next checkpoint, or to one at once if the user wants to stop."""
        before = self._reached
        assert before is not None
        done = before.iterations
        stop, is_warmup = self._stops.next(done), done < self._stops.before_draws
        segment = chains.segment(before.tree["state"], done - stop if is_warmup else 0)
        unit = 1 if is_warmup else self.thinning
        while done < stop and not interrupt.is_asked:
            most = stop - done
            iterations = pace.next(unit, most) if chains.is_stoppable else most
            segment = chains.advance(segment, iterations)
            pace.done(iterations)
            interrupt.look()
            done += iterations
            watch.show(segment.state)
            watch.step(iterations)
        segment = self._processes.on_host(segment)
        tree = {**before.tree, "state": segment.state}
        num = 0 if is_warmup else (done - before.iterations) // self.thinning
        blocks = before.blocks
        if num:
            draws = jax.tree.map(np.asarray, segment.draws)
            draws = jax.tree.map(lambda x: x[:, :num], with_chains(draws, self.num_chains))
            sites, stored = draws[self._sample_field], self._stored(draws)
            weights = draws["weight"] if self._hidden else np.ones((self.num_chains, num))
            tree["running"] = RunningMoments(**tree["running"]).add(sites, weights)._asdict()
            with self._writing(before) as is_writer:
                if is_writer:
                    self._disk.write(stored, before.draws)
            blocks = [*blocks, [before.draws, before.draws + num, self._disk.checksum(stored)]]
            watch.add_draws(sites)
            watch.show(segment.state)
        self._keep(Checkpoint(done, before.draws + num, blocks, before.header, tree))
