"""Check that a change of the code's structure changes no draw: record before, compare after.

    python benchmarks/same_draws.py record before.npz
    ... change ...
    python benchmarks/same_draws.py compare before.npz

Runs every kernel on two models, and one run for each feature of a chain or the warm-up: estimators,
subsampling, integrators, schedules, local sites, rows on the host and on devices, checkpoints,
Gibbs. Draws, last state and adaptation are compared bitwise, the bias report by its numbers. Draws
are bitwise reproducible on one machine with one version of JAX.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import MCMC, DiscreteGibbs, Gibbs

import numpyro_sgmcmc as sg
from numpyro_sgmcmc.diagnostics import bias_corrected_samples, compare_with_finer

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.contract.kernels import KERNELS
from tests.model import hierarchies

RNG = np.random.default_rng(0)
N = 600
X = RNG.standard_normal((N, 3)).astype(np.float32)
GROUP = RNG.integers(0, 8, N)
Y = (X @ np.array([0.5, -0.5, 0.2]) + 0.3 * GROUP + RNG.standard_normal(N)).astype(np.float32)
SUCCESS = (RNG.random(N) < 1 / (1 + np.exp(-X[:, 0]))).astype(np.int32)
COUNTS = RNG.poisson(2.0, N)


def linear(X: Any, group: Any, y: Any, batch_size: int | None = None) -> None:
    """A hierarchy with an unknown scale and a deterministic site."""
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([X.shape[1]]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(5))
    with numpyro.plate("groups", 8):
        alpha = numpyro.sample("alpha", dist.Normal(0, tau))
    numpyro.deterministic("first", beta[0] + alpha[0])
    with numpyro.plate("rows", X.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(X[i] @ beta + alpha[group[i]], sigma), obs=y[i])


def logistic(X: Any, y: Any, batch_size: int | None = None) -> None:
    """Rows through numpyro.subsample, coefficients by site."""
    a = numpyro.sample("a", dist.Normal(0, 3))
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0], subsample_size=batch_size):
        x, t = numpyro.subsample(X, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Bernoulli(logits=a + x @ b), obs=t)


def crossed(y: Any, rows: int | None = None, columns: int | None = None) -> None:
    """Two subsampled plates that meet at a site."""
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    sigma = numpyro.sample("sigma", dist.HalfNormal(3))
    with (
        numpyro.plate("rows", y.shape[0], subsample_size=rows, dim=-2) as i,
        numpyro.plate("columns", y.shape[1], subsample_size=columns, dim=-1) as j,
    ):
        numpyro.sample("y", dist.Normal(mu, sigma), obs=y[i[:, None], j])


def dropout(X: Any, y: Any, batch_size: int | None = None) -> None:
    """A likelihood that draws random keys."""
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    kept = jax.random.bernoulli(numpyro.prng_key(), 0.9, (X.shape[1],))
    with numpyro.plate("rows", X.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ (kept * b)), obs=y[i])


def dynamic(y: Any, batch_size: int | None = None) -> None:
    """A support that depends on another site's value."""
    low = numpyro.sample("low", dist.Normal(-5, 1))
    mu = numpyro.sample("mu", dist.TruncatedNormal(0, 2, low=low))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def wide(group: Any, y: Any, batch_size: int | None = None) -> None:
    """More coordinates than Newton steps take."""
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    with numpyro.plate("groups", 220):
        alpha = numpyro.sample("alpha", dist.Normal(mu, 1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(alpha[group[i]], 1), obs=y[i])


def quartic(z: Any) -> Any:
    """A potential function."""
    x = jnp.concatenate([z["a"], z["b"]])
    return jnp.square(x).sum() / 2 + 0.01 * (x**4).sum()


def run(kernel: Any, *args: Any, mcmc: Any = MCMC, init_params: Any = None, **kwargs: Any) -> Any:
    """A short run; settings of MCMC by their names, the rest for the model."""
    settings = {"num_warmup": 24, "num_samples": 40, "num_chains": 2, "progress_bar": False}
    settings["chain_method"] = "vectorized"
    names = (*settings, "thinning", "checkpoint", "checkpoint_every")
    settings |= {k: kwargs.pop(k) for k in names if k in kwargs}
    made = mcmc(kernel, **settings)
    made.run(jax.random.key(7), *args, init_params=init_params, **kwargs)
    return made


LINEAR, LOGISTIC = (X, GROUP, Y), (X, SUCCESS)


def cases() -> dict[str, Callable[[], Any]]:
    """Return the cases: names and functions that run them."""
    found: dict[str, Callable[[], Any]] = {}
    for k in KERNELS:
        found[f"{k.__name__}, linear"] = lambda k=k: run(k(linear), *LINEAR, batch_size=60)
        found[f"{k.__name__}, logistic"] = lambda k=k: run(k(logistic), *LOGISTIC, batch_size=50)

    def split(model: Any = logistic, args: Any = LOGISTIC, **options: Any) -> Callable[[], Any]:
        given = {"batch_size": 50} | {k: options.pop(k) for k in RUN if k in options}
        return lambda: run(sg.SGHMCSplit(model, **options), *args, **given)

    RUN = ("batch_size", "num_chains", "chain_method", "thinning", "init_params", "extra_fields")
    for gradient in ("minibatch", "control_variate", "second_order_control_variate"):
        for minibatch in ("iid", "shuffled", "contiguous"):
            name = f"gradient_estimator={gradient}, subsampling={minibatch}"
            found[name] = split(gradient_estimator=gradient, subsampling=minibatch)
    found["noise compensation"] = split(noise_compensation=True, gradient_estimator="minibatch")
    found["noise compensation, diagonal"] = split(
        noise_compensation=True,
        gradient_estimator="minibatch",
        dense_mass=False,
        step_size=0.05,
        num_steps=7,
    )
    found["schedule"] = split(step_size=optax.exponential_decay(0.3, 100, 0.9), num_steps=6)
    found["one chain, raw"] = split(num_chains=1)
    found["sequential, thinned"] = split(chain_method="sequential", thinning=2)
    found["init_params"] = split(init_params={"a": jnp.zeros(2), "b": jnp.full((2, 3), 0.1)})
    found["one step"] = split(num_steps=1, step_size=0.2)
    found["diagonal"] = split(dense_mass=False)
    found["structured"] = split(linear, LINEAR, dense_mass=[("beta", "tau")])
    found["mass matrix"] = split(inverse_mass_matrix=np.array([0.01, 0.02, 0.01, 0.01]))
    found["no adaptation"] = split(adapt_step_size=False, adapt_mass_matrix=False)
    found["all rows"] = split(batch_size=None)
    found["crossed"] = lambda: run(sg.SGHMCSplit(crossed), Y.reshape(30, 20), rows=10, columns=5)
    found["randomised"] = split(dropout)
    found["dynamic support"] = split(dynamic, (np.abs(Y),))
    found["wide"] = lambda: run(sg.SGHMCSplit(wide), RNG_GROUPS, Y, batch_size=50)
    RNG_GROUPS = np.arange(N) % 220
    found["wide, dense"] = lambda: run(
        sg.SGHMCSplit(wide, dense_mass=True), RNG_GROUPS, Y, batch_size=50
    )
    found["potential function"] = lambda: run(
        sg.SGHMCSplit(potential_fn=quartic),
        init_params={"a": jnp.zeros((2, 2)), "b": jnp.ones((2, 3))},
    )
    for integrator in ("baoab", "obabo", "mt3", "lie_trotter", "symmetric", "euler"):
        found[f"SHMC {integrator}"] = lambda s=integrator: run(
            sg.SHMC(logistic, integrator=s), *LOGISTIC, batch_size=50
        )
    found["lie_trotter, three leapfrogs"] = lambda: run(
        sg.SHMC(logistic, integrator="lie_trotter", num_leapfrog=3), *LOGISTIC, batch_size=50
    )
    found["SGMGT, noisy, resampled"] = lambda: run(
        sg.SGMGT(
            logistic, a=2.0, sigma_theta=0.1, sigma_xi=0.1, momentum_period=7, thermostat_period=11
        ),
        *LOGISTIC,
        batch_size=50,
    )
    found["SGNHT, one thermostat, plain"] = lambda: run(
        sg.SGNHT(logistic, per_coordinate=False, gradient_estimator="minibatch"),
        *LOGISTIC,
        batch_size=50,
    )
    found["SGRHMC, own metric"] = lambda: run(
        sg.SGRHMC(
            logistic, inverse_metric=lambda z: {"a": 1.0, "b": 1.0 + 0.1 * jnp.square(z["b"])}
        ),
        *LOGISTIC,
        batch_size=50,
    )
    means = hierarchies.normal_means_data(400)
    found["local sites"] = lambda: run(
        sg.SGHMCSplit(hierarchies.normal_means), means, batch_size=40
    )
    found["local sites of gibbs_fn, plain, collected"] = lambda: run(
        sg.SGHMCSplit(
            hierarchies.normal_means,
            gradient_estimator="minibatch",
            collect_local_sites=True,
            gibbs_fn=hierarchies.draw_normal_means,
            gibbs_sites=["z"],
        ),
        means,
        batch_size=40,
    )
    found["awkward local sites"] = lambda: run(
        sg.SGHMCSplit(hierarchies.awkward), RNG_AWKWARD, batch_size=30, num_samples=10
    )
    RNG_AWKWARD = np.random.default_rng(5).standard_normal((300, 3)).astype(np.float32)
    found["gibbs_fn"] = lambda: run(
        sg.SGHMCSplit(hierarchies.mixture, gibbs_fn=hierarchies.draw_indicators, gibbs_sites=["k"]),
        hierarchies.mixture_data(),
        batch_size=200,
    )
    found["rows on the host"] = lambda: run(
        sg.SGHMCSplit(logistic), sg.HostArray(X), sg.HostArray(SUCCESS), batch_size=50
    )
    found["sharded rows"] = lambda: run(
        sg.SGHMCSplit(linear),
        sg.ShardedArray(X),
        sg.ShardedArray(GROUP.astype(np.int32)),
        sg.ShardedArray(Y),
        batch_size=60,
    )

    def checkpointed() -> Any:
        folder = tempfile.mkdtemp()
        return run(
            sg.SGHMCSplit(logistic),
            *LOGISTIC,
            batch_size=50,
            mcmc=sg.CheckpointedMCMC,
            checkpoint=folder,
            checkpoint_every=10,
        )

    found["checkpointed"] = checkpointed

    def in_gibbs() -> Any:
        from tests.contract.test_gibbs import counts, switching

        kernel = sg.SGHMCSplit(switching)
        gibbs = Gibbs([(DiscreteGibbs(kernel.model), ("k",)), (kernel, None)])
        return run(gibbs, counts(), batch_size=40, chain_method="sequential")

    found["block of Gibbs"] = in_gibbs

    found["float64"] = lambda: run(
        sg.SGHMCSplit(logistic), X.astype(np.float64), SUCCESS, batch_size=50
    )

    def finer() -> Any:
        mcmc = run(sg.SGHMCSplit(logistic), *LOGISTIC, batch_size=50)
        return compare_with_finer(mcmc, jax.random.key(3)).finer_run

    found["finer run"] = finer

    def calibrated() -> Any:
        mcmc = run(sg.SGHMCSplit(logistic), *LOGISTIC, batch_size=50)
        report = sg.bias_report(mcmc, full_data=True, num_draws=40)
        mcmc.calibrated = bias_corrected_samples(mcmc, report)
        mcmc.likelihoods = sg.log_likelihood(mcmc)
        return mcmc

    found["calibrated, likelihoods"] = calibrated
    return found


ADAPTED = ("step_size", "preconditioner", "gradient_noise_covariance")
STATE = ("i", "z", "num_steps", "weight", "diverging", "rng_key", "dynamics_state", "streams")


def bits(mcmc: Any) -> dict[str, np.ndarray]:
    """Return draws, last state and adaptation of a run, array by array."""
    state = mcmc.last_state
    parts: dict[str, Any] = {"draws": mcmc.get_samples(group_by_chain=True)}
    if hasattr(state, "adapt_state"):
        parts |= {n: getattr(state, n) for n in (*STATE, "moments", "step_size_monitor")}
        parts |= {n: getattr(state.adapt_state, n) for n in ADAPTED}
        if (local := state.local_state) is not None:
            parts["local_state"] = local
    for name in ("calibrated", "likelihoods"):
        parts[name] = getattr(mcmc, name, None)
    arrays = {}
    for name, tree in parts.items():
        for n, leaf in enumerate(jax.tree.leaves(tree)):
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaf = jax.random.key_data(leaf)
            arrays[f"{name}.{n}"] = np.asarray(leaf)
    return arrays


def report_numbers(mcmc: Any) -> np.ndarray:
    """Return the numbers of the bias report, a row per site; none where it raises."""
    try:
        sites = sg.bias_report(mcmc).sites
    except ValueError:
        return np.zeros(0)
    diagnoses = [None, "not converged", "biased", "multimodal", "inconclusive", "ok"]
    return np.array(
        [
            [
                s.size,
                s.mean_bias,
                s.mean_bias_error,
                s.sd_inflation,
                s.sd_inflation_error,
                s.r_hat,
                s.ess,
                diagnoses.index(getattr(s.diagnosis, "value", s.diagnosis)) - 1,
            ]
            for s in sites
        ]
    )


def outcome(case: Callable[[], Any]) -> dict[str, np.ndarray]:
    """Return all that is compared of one run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mcmc = case()
        num_warnings = sum(issubclass(w.category, UserWarning) for w in caught)
    numbers = {"report": report_numbers(mcmc), "num_warnings": np.array(num_warnings)}
    return bits(mcmc) | numbers


def are_same(name: str, before: np.ndarray, now: np.ndarray) -> bool:
    """Compare bit for bit; reports, which NumPy computes on the host, to 1e-9."""
    if name == "report":
        return before.shape == now.shape and np.allclose(before, now, 1e-9, 1e-12, equal_nan=True)
    return before.tobytes() == now.tobytes()


def main() -> None:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="cases whose name contains one of these, by |")
    options = parser.parse_args()
    stored = dict(np.load(options.file)) if options.action == "compare" else {}
    made: dict[str, np.ndarray] = {}
    differing = 0
    for name, case in cases().items():
        if not any(part in name for part in options.only.split("|")):
            continue
        begin = time.process_time()
        with jax.enable_x64(name == "float64"):
            found = outcome(case)
        made |= {f"{name}/{k}": v for k, v in found.items()}
        seconds = time.process_time() - begin
        jax.clear_caches()  # each compiled program keeps mappings of memory, which are limited
        if options.action == "record":
            print(f"{name}: {len(found)} arrays, {seconds:.0f} s", flush=True)
            np.savez(options.file, **made)  # after each, so that nothing is lost
            continue
        before = {k.split("/")[-1]: v for k, v in stored.items() if k.startswith(f"{name}/")}
        off = sorted(
            k
            for k in before.keys() | found.keys()
            if k not in before or k not in found or not are_same(k, before[k], found[k])
        )
        differing += bool(off)
        result = f"DIFFERENT in {', '.join(off[:8])}" if off else "the same"
        print(f"{name}: {result} ({len(found)} arrays, {seconds:.0f} s)", flush=True)
    sys.exit(f"{differing} cases differ" if differing else 0)


if __name__ == "__main__":
    main()
