"""Training on minibatches, averaged iterates, and chains about the trained weights."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import init_to_value

from numpyro_sgmcmc import SGNHT, HostArray, train_and_sample, train_weights
from numpyro_sgmcmc.errors import (
    ConvergenceWarning,
    InitializationError,
    InvalidArgumentError,
    InvalidModelError,
)
from numpyro_sgmcmc.sampling import training
from tests.contract.kernels import assert_posterior

pytestmark = pytest.mark.filterwarnings("ignore:The training has not converged")

RNG = np.random.default_rng(0)
X = RNG.standard_normal((200, 2)).astype(np.float32)
Y = (X @ [1.0, -0.5] + 0.5 * RNG.standard_normal(200)).astype(np.float32)
NOISE_SD = 0.5
# The posterior of a normal prior with SD one: precision matrix and mean.
PRECISION = np.eye(2) + X.T.astype(float) @ X / NOISE_SD**2
MEAN = np.linalg.solve(PRECISION, X.T.astype(float) @ Y / NOISE_SD**2)


def linear(x, y, batch_size=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, NOISE_SD), obs=y[i])


def with_scale(x, y, batch_size=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    sd = numpyro.sample("sd", dist.LogNormal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, sd), obs=y[i])


def train(model, num_steps, *data, **options):
    options = {"num_train_steps": num_steps, "progress_bar": False, **options}
    return train_weights(model, jax.random.key(0), *data, **options)


def test_weights_are_the_mode_of_the_density():
    trained = train(linear, 2_000, X, Y, batch_size=20)
    z = (np.asarray(trained.center["w"]) - MEAN) * np.sqrt(np.diag(PRECISION))
    assert np.abs(z).max() < 0.1
    assert trained.losses.shape == (2_000,)
    assert np.isfinite(trained.losses).all()


@pytest.mark.parametrize("num_steps", [1, 2, 10, 1_100])  # one to four compiled calls
def test_the_last_quarter_of_the_iterates_is_averaged(num_steps):
    rate, w = 1e-5, np.array([3.0, 3.0])
    options = {"optimizer": optax.sgd(rate), "init_strategy": init_to_value(values={"w": w})}
    trained = train(linear, num_steps, X, Y, **options)
    iterates = []
    for _ in range(num_steps):
        w = w - rate * PRECISION @ (w - MEAN)
        iterates.append(w)
    expected = np.mean(iterates[-max(1, round(num_steps / 4)) :], axis=0)
    np.testing.assert_allclose(trained.center["w"], expected, rtol=1e-5)


def test_an_epoch_has_each_row_once():
    options = {"optimizer": optax.sgd(0.0), "init_strategy": init_to_value(values={"w": MEAN})}
    whole = train(linear, 1, X, Y, **options).losses[0]
    losses = train(linear, 20, X, Y, batch_size=20, **options).losses
    assert losses.std() > 1.0
    np.testing.assert_allclose(losses.reshape(2, 10).mean(1), whole, rtol=1e-5)
    assert not np.allclose(losses[:10], losses[10:])  # another order


def test_values_are_constrained_and_unconstrained():
    trained = train(with_scale, 5_000, X, Y, batch_size=50)
    np.testing.assert_allclose(np.log(trained.center["sd"]), trained.init_params["sd"], rtol=1e-5)
    assert trained.center["sd"] == pytest.approx(NOISE_SD, rel=0.1)


def test_rows_on_the_host_give_the_same_weights():
    in_memory = train(linear, 30, X, Y, batch_size=20)
    on_host = train(linear, 30, HostArray(X), HostArray(Y), batch_size=20)
    np.testing.assert_allclose(on_host.center["w"], in_memory.center["w"], rtol=1e-5)


def test_a_key_determines_the_weights():
    first, second = (train(linear, 30, X, Y, batch_size=20) for _ in range(2))
    options = {"num_train_steps": 30, "batch_size": 20, "progress_bar": False}
    other = train_weights(linear, jax.random.key(1), X, Y, **options)
    np.testing.assert_array_equal(first.center["w"], second.center["w"])
    assert not np.allclose(first.center["w"], other.center["w"], rtol=1e-3)


def test_chains_sample_the_localised_posterior():
    precision = 2_000.0
    options = {"precision": precision, "num_train_steps": 2_000, "progress_bar": False}
    mcmc = train_and_sample(linear, jax.random.key(0), X, Y, batch_size=50, **options)
    assert mcmc.num_chains == 4
    # The training stops near the mode, so that the normal density is about the mode as well.
    covariance = np.linalg.inv(PRECISION + precision * np.eye(2))
    sd = np.sqrt(np.diag(covariance))
    assert (sd < 0.8 / np.sqrt(np.diag(PRECISION))).all()  # unlike the posterior's
    draws = mcmc.get_samples(group_by_chain=True)["w"]
    center = train_weights(
        linear, jax.random.split(jax.random.key(0))[0], X, Y, batch_size=50, num_train_steps=2_000
    ).center["w"]
    mean = covariance @ (PRECISION @ MEAN + precision * np.asarray(center, float))
    assert_posterior(draws, mean, sd)


def test_one_chain_of_a_given_kernel():
    mcmc = train_and_sample(
        linear, jax.random.key(0), X, Y, batch_size=50, precision={"w": 10.0}, num_train_steps=100,
        kernel=lambda model: SGNHT(model, gradient_estimator="minibatch"), num_warmup=5,
        num_samples=10, num_chains=1, progress_bar=False,
    )  # fmt: skip
    assert isinstance(mcmc.sampler, SGNHT)
    assert mcmc.get_samples()["w"].shape == (10, 2)


@pytest.mark.parametrize("num_steps", [0, -5, 2.5, None])
def test_the_number_of_steps_is_checked(num_steps):
    with pytest.raises(InvalidArgumentError, match=r"`num_train_steps` is .*Fix: pass a positive"):
        train(linear, num_steps, X, Y)


def test_local_latent_variables_are_not_supported():
    def model(y, batch_size=None):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            z = numpyro.sample("z", dist.Normal(mean, 1))
            numpyro.sample("y", dist.Normal(z, 1), obs=y[i])

    with pytest.raises(InvalidModelError, match=r"\['z'\] are local latent variables"):
        train(model, 10, Y, batch_size=20)


def test_weights_that_diverge_raise_an_error():
    with pytest.raises(InitializationError, match=r"weights have diverged.*with smaller steps"):
        train(linear, 300, X, Y, batch_size=20, optimizer=optax.sgd(10.0))


def test_a_loss_that_is_infinite_names_the_site():
    y = Y.copy()
    y[3] = np.inf
    with pytest.raises(InitializationError, match=r"loss of the training is not finite.*'y'"):
        train(linear, 20, X, jnp.asarray(y))


def test_the_last_update_is_checked():
    with pytest.raises(InitializationError, match="have diverged"):
        train(linear, 1, X, Y, optimizer=optax.sgd(1e38))


def test_training_that_has_not_converged_is_reported():
    y = 100.0 + 50.0 * Y

    def wide(x, y, batch_size=None):
        w = numpyro.sample("w", dist.Normal(0, 200).expand([2]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 10.0), obs=y[i])

    with pytest.warns(ConvergenceWarning, match=r"training has not converged.*decreased by"):
        train(wide, 500, X, y, batch_size=50)


def test_sites_that_are_not_in_the_dict_are_not_restricted():
    options = {"num_train_steps": 2_000, "progress_bar": False, "num_warmup": 20}
    precision = {"sd": 1e6}
    mcmc = train_and_sample(
        with_scale, jax.random.key(0), X, Y, batch_size=50, precision=precision, **options
    )
    draws = mcmc.get_samples()
    assert draws["sd"].std() < 0.002
    # The posterior SD given the noise SD of the training.
    sds = np.sqrt(
        np.diag(np.linalg.inv(np.eye(2) + X.T.astype(float) @ X / draws["sd"].mean() ** 2))
    )
    np.testing.assert_allclose(draws["w"].std(0), sds, rtol=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": -1.0}, r"`precision` is -1.0, which is not positive"),
        ({"precision": {"w": [1.0, np.inf]}}, r"`precision` of 'w' is .* not positive and finite"),
        ({"precision": {"v": 1.0}}, r"unknown sites \['v'\].*some of the sites \['w'\]"),
        ({"precision": {}}, r"`precision` is empty"),
        ({"precision": {"w": np.ones(3)}}, r"`precision` of 'w' has shape \(3,\).*shape \(2,\)"),
        ({"num_warmup": -1}, r"`num_warmup` is -1"),
        ({"precision": None}, r"`precision` has type object"),
        ({"kernel": SGNHT(linear)}, r"`kernel` is .*not a function from a model"),
        ({"optimizer": optax.adam}, r"`optimizer` is .*not an optimizer of optax"),
        ({"num_chains": 0}, r"`num_chains` is 0"),
        ({"num_samples": 0}, r"`num_samples` is 0"),
        ({"num_train_steps": 0}, r"`num_train_steps` is 0"),
    ],
)
def test_arguments_are_checked_before_the_training(options, message, monkeypatch):
    monkeypatch.setattr(training, "_init_training", None)
    with pytest.raises(InvalidArgumentError, match=message):
        train_and_sample(linear, jax.random.key(0), X, Y, **{"precision": 1.0, **options})
    with pytest.raises(InvalidArgumentError, match="`rng_key` is 0"):
        train_and_sample(linear, 0, X, Y, precision=1.0)
