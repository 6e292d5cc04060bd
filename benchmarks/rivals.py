"""Other methods for the same model: SVI, HMCECS, samplers of BlackJAX and packages of mixed models.

Each but the last returns draws in unconstrained space. All have better settings than a user would
choose at first: the step size of SVI decays to zero on a cosine, HMCECS gets the posterior mean for
its Taylor proxy, and BlackJAX's samplers start there, with the best of several step sizes by the
distance to the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from jax import random
from numpyro.distributions import biject_to
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import HMCECS, MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from numpyro.infer.util import potential_energy

__all__ = [
    "MIXED_MODELS",
    "STEP_SIZES",
    "blackjax_draws",
    "hmcecs",
    "hmcecs_draws",
    "svi_draws",
    "unconstrained",
]

Draws = dict[str, Any]

STEP_SIZES = (1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5)
"""For BlackJAX's samplers, in the units of the unconstrained parameters."""

_SVI_STEPS, _SVI_DRAWS = 20_000, 4_000
_ITERATIONS = 20_000


def unconstrained(model: Callable, args: tuple, samples: Mapping[str, Any]) -> Draws:
    """Draws of the latent sites in unconstrained space, and of no others."""
    found = trace(seed(model, random.key(0))).get_trace(*args)
    return {
        name: biject_to(site["fn"].support).inv(samples[name])
        for name, site in found.items()
        if site["type"] == "sample" and not site["is_observed"]
    }


def _constrained(model: Callable, args: tuple, point: Mapping[str, Any]) -> Draws:
    found = trace(seed(model, random.key(0))).get_trace(*args)
    return {name: biject_to(found[name]["fn"].support)(x) for name, x in point.items()}


def svi_draws(model: Callable, args: tuple, batch_size: int, *, dense: bool, rng_key: Any) -> Draws:
    """20,000 steps of Adam on minibatches, then draws of the guide; one chain.

    With a constant step size of 0.005 the means stay seven to thirteen times further off.
    """
    guide = (AutoMultivariateNormal if dense else AutoNormal)(model)
    adam = optax.adam(optax.cosine_decay_schedule(0.01, _SVI_STEPS))
    svi = SVI(model, guide, numpyro.optim.optax_to_numpyro(adam), Trace_ELBO())
    fit_key, draw_key = random.split(rng_key)
    found = svi.run(fit_key, _SVI_STEPS, *args, batch_size=batch_size, progress_bar=False)
    samples = guide.sample_posterior(
        draw_key, found.params, *args, sample_shape=(1, _SVI_DRAWS), batch_size=batch_size
    )
    return unconstrained(model, args, samples)


def hmcecs(model: Callable, args: tuple, point: Mapping[str, Any], num_draws: int) -> MCMC:
    """HMCECS with its second-order Taylor proxy at a given unconstrained point; not run yet."""
    proxy = HMCECS.taylor_proxy(_constrained(model, args, point), degree=2)
    kernel = HMCECS(NUTS(model), num_blocks=10, proxy=proxy)
    return MCMC(kernel, num_warmup=500, num_samples=num_draws, progress_bar=False)


def hmcecs_draws(
    model: Callable, args: tuple, batch_size: int, point: Mapping[str, Any], rng_key: Any
) -> Draws:
    """2,000 draws of one chain."""
    mcmc = hmcecs(model, args, point, 2_000)
    mcmc.run(rng_key, *args, batch_size=batch_size)
    return unconstrained(model, args, mcmc.get_samples(group_by_chain=True))


def blackjax_draws(
    name: str,
    model: Callable,
    args: tuple,
    batch_size: int,
    point: Mapping[str, Any],
    step_size: float,
    rng_key: Any,
) -> Draws:
    """Four chains of 20,000 iterations with BlackJAX's own settings, the first tenth left out.

    :param name: ``"sghmc"`` or ``"sgnht"``.
    :param point: where the chains start.
    :param step_size: step size.
    """
    import blackjax

    found = trace(seed(model, random.key(0))).get_trace(*args, batch_size=batch_size)
    sizes = {
        k: v["args"] for k, v in found.items() if v["type"] == "plate" and v["args"][1] is not None
    }

    def rows(key: Any) -> dict[str, Any]:
        keys = random.split(key, len(sizes))
        return {
            plate: random.randint(k, (batch,), 0, size)
            for (plate, (size, batch)), k in zip(sizes.items(), keys, strict=True)
        }

    def gradient(z: Any, minibatch: Any) -> Any:
        of_batch = seed(substitute(model, data=minibatch), random.key(0))
        energy = partial(potential_energy, of_batch, args, {"batch_size": batch_size})
        return jax.tree.map(jnp.negative, jax.grad(lambda z: energy(z))(z))

    sampler = getattr(blackjax, name)(gradient)

    def chain(key: Any) -> Any:
        start_key, key = random.split(key)
        start = {k: jnp.asarray(x, jnp.float32) for k, x in point.items()}
        state = sampler.init(start, start_key) if name == "sgnht" else sampler.init(start)

        def one(state: Any, key: Any) -> tuple[Any, Any]:
            row_key, key = random.split(key)
            state = sampler.step(key, state, rows(row_key), step_size)
            return state, state.position if name == "sgnht" else state

        _, draws = jax.lax.scan(one, state, random.split(key, _ITERATIONS))
        return jax.tree.map(lambda x: x[_ITERATIONS // 10 :: 5], draws)

    return jax.jit(jax.vmap(chain))(random.split(rng_key, 4))


def _fit_gpboost(
    likelihood: str, group: np.ndarray, x: np.ndarray, y: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    import gpboost

    model = gpboost.GPModel(
        likelihood={"gaussian": "gaussian", "logistic": "bernoulli_logit"}[likelihood],
        group_data=group,
        group_rand_coef_data=x[:, 1:].astype(float),
        ind_effect_group_rand_coef=[1] * (x.shape[1] - 1),
        matrix_inversion_method="cholesky",  # quicker here than the default
    )
    # The default tolerance of 1e-6 of the log likelihood stops before its maximum.
    model.fit(y=y.astype(float), X=x.astype(float), params={"delta_rel_conv": 1e-9})
    coefficients = model.get_coef(std_err=True).to_numpy()
    variances = model.get_cov_pars(std_err=True).to_numpy()
    if likelihood == "gaussian":  # the variance of the rows comes first
        variances = np.roll(variances, -1, axis=1)
    of_rows = model.predict_training_data_random_effects(predict_var=True).to_numpy()
    effect, variance = np.split(of_rows[np.unique(group, return_index=True)[1]], 2, axis=1)
    return _summarise_mixed_model(effect, variance, coefficients, variances)


def _fit_statsmodels(
    likelihood: str, group: np.ndarray, x: np.ndarray, y: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    k, num_groups = x.shape[1], int(group.max()) + 1
    if likelihood == "gaussian":
        from statsmodels.regression.mixed_linear_model import MixedLM, MixedLMParams

        free = MixedLMParams.from_components(np.ones(k), np.eye(k))  # independent effects
        fit = MixedLM(y.astype(float), x.astype(float), group, x).fit(free=free, method="lbfgs")
        of_scales = fit.bse_re[[i * (i + 3) // 2 for i in range(k)]]
        variances = np.array([[*np.diag(fit.cov_re), fit.scale], [*of_scales, np.nan]])
        effect = np.array([fit.random_effects[g] for g in range(num_groups)])
        variance = np.array([np.diag(fit.random_effects_cov[g]) for g in range(num_groups)])
        return _summarise_mixed_model(effect, variance, [fit.fe_params, fit.bse_fe], variances)
    from scipy import sparse
    from statsmodels.genmod.bayes_mixed_glm import BinomialBayesMixedGLM

    rows = np.arange(len(y))
    columns = [sparse.csr_matrix((x[:, i], (rows, group))) for i in range(k)]
    ident = np.repeat(np.arange(k), num_groups)
    fit = BinomialBayesMixedGLM(y, x, sparse.hstack(columns).tocsr(), ident).fit_vb()
    effect = fit.fe_mean + fit.vc_mean.reshape(k, num_groups).T
    sd = fit.vc_sd.reshape(k, num_groups).T
    return (
        np.concatenate([effect.ravel(), fit.fe_mean, fit.vcp_mean]),
        np.concatenate([sd.ravel(), fit.fe_sd, fit.vcp_sd]),
    )


def _summarise_mixed_model(
    effect: np.ndarray, variance: np.ndarray, coefficients: Any, variances: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return estimates and standard errors, those of scales as logarithms.

    :param coefficients: population means and their standard errors.
    :param variances: of the effects and the rows, and their standard errors.
    """
    mean = [(coefficients[0] + effect).ravel(), coefficients[0], 0.5 * np.log(variances[0])]
    sd = [np.sqrt(variance).ravel(), coefficients[1], 0.5 * variances[1] / variances[0]]
    return np.concatenate(mean), np.concatenate(sd)


MIXED_MODELS = {"gpboost": _fit_gpboost, "statsmodels": _fit_statsmodels}
"""Packages of mixed models: their estimates and standard errors, in the order of the effects, their
population means, and the logarithms of scales."""
