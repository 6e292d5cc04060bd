"""The log likelihood has to be additive over observations."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import init_to_uniform

from numpyro_sgmcmc import HostArray, SGHMCSplit, bias_report
from numpyro_sgmcmc.adaptation.batched_gradients import BatchedGradients, JittedPotential
from numpyro_sgmcmc.adaptation.model_checks import find_nonadditive_plates
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.errors import ModelWarningKind, NonAdditiveLikelihoodWarning
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.subsampled import make_model_potential
from tests.contract.kernels import num_compilations, quietly
from tests.quick import quick_if

N, K = 500, 3
RNG = np.random.default_rng(0)
X = RNG.gamma(1.0, 1.0, N).astype(np.float32)
Y = (1.0 + 0.8 * X + 0.5 * RNG.standard_normal(N)).astype(np.float32)
Z = RNG.dirichlet(np.ones(K), N).astype(np.float32)
GROUP = RNG.integers(0, K, N)
ROWS_IN_GROUP = np.bincount(GROUP)
COUNTS = RNG.multinomial(5, np.ones(K) / K, N)
IS_SEEN = RNG.random(N) < 0.7


def make_model(transform, offset=0.0):
    """A regression on a transformation of the minibatch's covariate."""

    def model(x, y, batch_size=None):
        a = numpyro.sample("a", dist.Normal(offset, 2))
        b = numpyro.sample("b", dist.Normal(0, 2))
        s = numpyro.sample("s", dist.HalfNormal(1))
        with numpyro.plate("rows", len(x), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(a + b * transform(x[i]), s), obs=y[i] + offset)

    return model


OVER_THE_MINIBATCH = {
    "centred": lambda x: x - x.mean(),
    "standardised": lambda x: (x - x.mean()) / (x.std() + 0.1),
    "ranked": lambda x: jnp.argsort(jnp.argsort(x)) / len(x),
    "cumulative sum": lambda x: jnp.cumsum(x) / len(x),
    "fraction of the sum": lambda x: len(x) * x / x.sum(),
    "softmax": lambda x: len(x) * jax.nn.softmax(x),
    "row before": lambda x: jnp.concatenate([x[:1], x[:-1]]),
}
ROW_BY_ROW = {
    "identity": lambda x: x,
    "logarithm": jnp.log,
    "mean of the full data": lambda x: x - X.mean(),
}


def prepare(model, arguments, center):
    """Return gradients, preconditioner and positions about a center."""
    potential = make_model_potential(model, arguments, init_to_uniform)
    preconditioner = Preconditioner(np.asarray(center, float), np.full(len(center), 0.05))
    q = np.random.default_rng(1).standard_normal((16, len(center)))
    return BatchedGradients(potential, arguments), preconditioner, q


def check_additivity(*inputs):
    """Return the warnings of the check."""
    return find_nonadditive_plates(*prepare(*inputs))


def check_regression(model, batch_size, offset=0.0):
    arguments = Arguments((X, Y), {"batch_size": batch_size})
    return check_additivity(model, arguments, [offset + 1.0, 0.8, -0.7])


BATCH_SIZES = (2, 50, 499)


@pytest.mark.parametrize(
    ("name", "batch_size"),
    [
        quick_if(size == 50 or (size == 2 and name in ("centred", "row before")), name, size)
        for name in OVER_THE_MINIBATCH
        for size in BATCH_SIZES
    ],
)
def test_nonadditive_plates_statistic_of_minibatch_is_reported(name, batch_size):
    (warning,) = check_regression(make_model(OVER_THE_MINIBATCH[name]), batch_size)
    assert warning.kind is ModelWarningKind.NON_ADDITIVE
    assert "plate 'rows'" in warning.message
    assert warning.message.startswith("The log likelihood of plate 'rows' is not additive")


@pytest.mark.parametrize(
    ("name", "offset", "batch_size"),
    [
        quick_if(size == 50 or (size == 2 and offset > 0), name, offset, size)
        for name in ROW_BY_ROW
        for offset in (0.0, 1e4)
        for size in BATCH_SIZES
    ],
)
def test_nonadditive_plates_function_of_row_is_not_reported(name, offset, batch_size):
    """An offset of 1e4 makes the potential large, so that float32 rounds differences."""
    assert not check_regression(make_model(ROW_BY_ROW[name], offset), batch_size, offset)


# Groups of five rows: copies of one row hardly meet rows of their group.
SMALL_GROUP = np.repeat(np.arange(400), 5)


def sum_over_small_groups(values, group):
    return jax.ops.segment_sum(values, group, len(SMALL_GROUP) // 5)[group]


WITHIN_SMALL_GROUPS = {
    "centred": lambda x, eta, g: eta - sum_over_small_groups(x, g) / sum_over_small_groups(x**0, g),
    "conditional logit": lambda x, eta, g: eta - jnp.log(sum_over_small_groups(jnp.exp(eta), g)),
    "number of rows": lambda x, eta, g: eta * sum_over_small_groups(x**0, g),
    "sum": lambda x, eta, g: sum_over_small_groups(eta, g),
}


@pytest.mark.parametrize("name", WITHIN_SMALL_GROUPS)
@pytest.mark.parametrize("batch_size", [quick_if(size == 50, size) for size in (20, 50, 200)])
def test_nonadditive_plates_statistic_within_small_groups_is_reported(name, batch_size):
    def model(x, y, batch_size=None):
        a = numpyro.sample("a", dist.Normal(0, 2))
        b = numpyro.sample("b", dist.Normal(0, 2))
        with numpyro.plate("rows", len(x), subsample_size=batch_size) as i:
            group = jnp.asarray(SMALL_GROUP)[i]
            mean = WITHIN_SMALL_GROUPS[name](x[i], a + b * x[i], group)
            numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])

    x, noise = np.random.default_rng(2).standard_normal((2, len(SMALL_GROUP))).astype(np.float32)
    arguments = Arguments((x, x + noise), {"batch_size": batch_size})
    found = check_additivity(model, arguments, [0.3, 0.3])
    assert [warning.kind for warning in found] == [ModelWarningKind.NON_ADDITIVE]


# --- Statements about the rows of a plate -------------------------------------------------------


def make_plate_model(*statements, dim=-1):
    """A model with these statements, functions of ``(i, a, b)``, inside its plate."""

    def model(batch_size=None):
        a = numpyro.sample("a", dist.Normal(0, 2))
        b = numpyro.sample("b", dist.Normal(0, 2).expand([K]).to_event(1))
        with numpyro.plate("rows", N, subsample_size=batch_size, dim=dim) as i:
            for statement in statements:
                statement(i, a, b)

    return model


def check_statements(*statements, batch_size=50, dim=-1):
    arguments = Arguments((), {"batch_size": batch_size})
    model = make_plate_model(*statements, dim=dim)
    return check_additivity(model, arguments, [0.5, 0.1, -0.2, 0.3])


def log_probs(i, a):
    return dist.Normal(a, 1).log_prob(jnp.asarray(Y)[i])


def observe(i, mean, scale=1.0, name="y"):
    numpyro.sample(name, dist.Normal(mean, scale), obs=jnp.asarray(Y)[i])


def scaled(i, a, scale):
    with handlers.scale(scale=scale):
        observe(i, a)


def walk_over_positions(i, a, b):
    steps = jnp.sin(a * jnp.arange(N))
    observe(i, jnp.cumsum(steps)[: len(i)])


def first_is_different(i, a, b):
    observe(i, jnp.zeros(len(i)).at[0].set(a))


BY_POSITION = {
    "position as time": lambda i, a, b: observe(i, a + b[0] * jnp.arange(len(i)) / N),
    "grid": lambda i, a, b: observe(i, a * jnp.linspace(0, 1, len(i))),
    "constant grid": lambda i, a, b: observe(i, a * np.linspace(0, 1, len(i))),
    "walk": walk_over_positions,
    "first row": first_is_different,
    "weights by position": lambda i, a, b: scaled(i, a, jnp.linspace(0.5, 1.5, len(i))),
    "alternating": lambda i, a, b: observe(i, a * (-1.0) ** jnp.arange(len(i))),
}


@pytest.mark.parametrize("name", BY_POSITION)
def test_nonadditive_plates_position_in_minibatch_is_reported(name):
    (warning,) = check_statements(BY_POSITION[name])
    assert warning.kind is ModelWarningKind.NON_ADDITIVE
    assert "plate 'rows'" in warning.message
    assert "position" in warning.message


def test_nonadditive_plates_small_effect_of_position_is_reported():
    """A covariate that is i / N on all rows has in a minibatch of 100 of 10,000 values below 0.01.

    The posterior of the slope is then 100 SDs off, with chains that agree.
    """
    num = 10_000
    y = 1 + 2 * np.arange(num) / num + 0.5 * np.random.default_rng(0).normal(size=num)

    def model(y, batch_size=None):
        a = numpyro.sample("a", dist.Normal(0, 5))
        c = numpyro.sample("c", dist.Normal(0, 5))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            yb = y[i]
            t = jnp.arange(len(yb)) / num
            numpyro.sample("y", dist.Normal(a + c * t, 0.5), obs=yb)

    arguments = Arguments((y.astype(np.float32),), {"batch_size": 100})
    (warning,) = check_additivity(model, arguments, [2.0, 1.0])
    assert "position" in warning.message


def prior_of_number(i, a, b):
    numpyro.factor("y", -0.5 * (a * len(i)) ** 2 / N * jnp.ones(len(i)))


BY_NUMBER = {
    "scale": lambda i, a, b: scaled(i, a, 1 / len(i)),
    "scale of plate twice": lambda i, a, b: scaled(i, a, N / len(i)),
    "scale of distribution": lambda i, a, b: observe(i, a, jnp.sqrt(len(i))),
    "mean of distribution": lambda i, a, b: observe(i, a * len(i)),
    "number of ones": lambda i, a, b: observe(i, a * jnp.ones(len(i)).sum()),
    "sum in each row": lambda i, a, b: numpyro.factor("y", jnp.full(len(i), log_probs(i, a).sum())),
    "sum times row factor": lambda i, a, b: numpyro.factor(
        "y", jnp.ones(len(i)) * log_probs(i, a).sum() / N
    ),
    "product of rows": lambda i, a, b: numpyro.factor(
        "y", -a * jnp.ones((len(i), len(i))) @ jnp.asarray(Y)[i]
    ),
    "divided by number": lambda i, a, b: numpyro.factor("y", log_probs(i, a) / len(i)),
    "prior": prior_of_number,
    "global factor": lambda i, a, b: numpyro.factor("y", -(a**2) / len(i)),
}


@pytest.mark.parametrize("name", BY_NUMBER)
def test_nonadditive_plates_number_of_rows_is_reported(name):
    (warning,) = check_statements(BY_NUMBER[name])
    assert warning.kind is ModelWarningKind.NON_ADDITIVE
    assert "number of rows" in warning.message
    assert "plate 'rows'" in warning.message
    assert "'y'" in warning.message


@pytest.mark.parametrize(("factor", "num_warnings"), [(1.0, 0), (50_000 / 256, 1)])
def test_nonadditive_plates_many_rows_that_are_scaled_twice_are_reported(factor, num_warnings):
    """Between draws of such a posterior the potential changes by less than rounding."""
    y = np.random.default_rng(0).standard_normal(50_000).astype(np.float32)

    def model(y, batch_size=None):
        a = numpyro.sample("a", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            with handlers.scale(scale=len(y) / len(i) if factor > 1.0 else 1.0):
                numpyro.sample("y", dist.Normal(a, 1), obs=y[i])

    gradients, preconditioner, q = prepare(model, Arguments((y,), {"batch_size": 256}), [0.0])
    sd = np.array([1.0 / np.sqrt(len(y) * factor)])
    model_warnings = find_nonadditive_plates(gradients, preconditioner._replace(factor=sd), q)
    assert len(model_warnings) == num_warnings
    assert all("number of rows" in warning.message for warning in model_warnings)


@pytest.mark.parametrize(
    ("statement", "num_values", "num_programs"),
    [(BY_POSITION["grid"], 26, 0), (BY_NUMBER["scale"], 32, 1)],
    ids=["same for each number", "number of rows"],
)
def test_nonadditive_plates_evaluates_few_values(statement, num_values, num_programs, monkeypatch):
    arguments = Arguments((), {"batch_size": 50})
    inputs = prepare(make_plate_model(statement), arguments, [0.5, 0.1, -0.2, 0.3])
    batched_gradients, preconditioner, q = inputs
    batched_gradients.full_potentials(preconditioner.to_position(q))
    counts = []

    def count(cls, name, count_values):
        method = getattr(cls, name)

        def counted(self, *args):
            counts.append(count_values(*args))
            return method(self, *args)

        monkeypatch.setattr(cls, name, counted)

    count(BatchedGradients, "evaluate_minibatches", lambda *args: len(args[2]))
    count(JittedPotential, "value", lambda position: 1)
    assert num_compilations(lambda: find_nonadditive_plates(*inputs)) == num_programs
    assert sum(counts) == num_values


def test_nonadditive_plates_prior_outside_of_plate_that_uses_number_of_rows_is_reported():
    def model(batch_size=None):
        plate = numpyro.plate("rows", N, subsample_size=batch_size)
        with plate as i:
            pass
        a = numpyro.sample("a", dist.Normal(0, 1 / len(i)))
        with plate as i:
            observe(i, a)

    (warning,) = check_additivity(model, Arguments((), {"batch_size": 50}), [1.0])
    assert "number of rows" in warning.message
    assert "'a'" in warning.message


# --- Statements that are right ------------------------------------------------------------------


def event(i, a, b):
    numpyro.sample("event", dist.Normal(b, 1).to_event(1), obs=jnp.asarray(Z)[i])


def multivariate(i, a, b):
    fn = dist.MultivariateNormal(b, jnp.eye(K) + 0.1)
    numpyro.sample("multivariate", fn, obs=jnp.asarray(Z)[i])


def masked(i, a, b):
    with handlers.mask(mask=jnp.asarray(IS_SEEN)[i]):
        observe(i, a, name="masked")


def missing(i, a, b):
    y = jnp.where(jnp.asarray(IS_SEEN)[i], jnp.asarray(Y)[i], jnp.nan)
    fn = dist.Normal(a, 1).mask(~jnp.isnan(y))
    numpyro.sample("missing", fn, obs=jnp.nan_to_num(y))


def weighted(i, a, b):
    with handlers.scale(scale=0.5), handlers.scale(scale=jnp.asarray(X)[i]):
        observe(i, a, name="weighted")


def transposed(i, a, b):
    observe(i, b @ jnp.asarray(Z).T[:, i], name="transposed")


def groups(i, a, b):
    numpyro.factor("groups", (-(b**2) / jnp.asarray(ROWS_IN_GROUP))[jnp.asarray(GROUP)[i]])


def segments(i, a, b):
    sums = jax.vmap(lambda z: jax.ops.segment_sum(z * b, jnp.array([0, 0, 1]), 2))
    observe(i, sums(jnp.asarray(Z)[i])[:, 0], name="segments")


def convolution(i, a, b):
    z = jax.vmap(lambda z: jnp.convolve(z, b))(jnp.asarray(Z)[i])
    observe(i, z[:, 1], name="convolution")


def categorical(i, a, b):
    numpyro.sample("categorical", dist.Categorical(logits=b), obs=jnp.asarray(GROUP)[i])


def multinomial(i, a, b):
    fn = dist.Multinomial(5, logits=b + jnp.asarray(Z)[i])
    numpyro.sample("multinomial", fn, obs=jnp.asarray(COUNTS)[i])


def walk_in_row(i, a, b):
    walk = jnp.cumsum(b * jnp.asarray(Z)[i], -1)
    numpyro.sample("walk", dist.Normal(walk, 1).to_event(1), obs=jnp.asarray(Z)[i])


def subsampled(i, a, b):
    numpyro.sample("subsampled", dist.Normal(a, 1), obs=numpyro.subsample(Y, event_dim=0))


RIGHT = {
    "regression": lambda i, a, b: observe(i, a + jnp.asarray(Z)[i] @ b),
    "number of the row": lambda i, a, b: observe(i, a * i / N, name="index"),
    "row before": lambda i, a, b: observe(i, a * jnp.asarray(Y)[i - 1], name="lag"),
    "row factor": lambda i, a, b: numpyro.factor("factor", log_probs(i, a)),
    "factor without rows": lambda i, a, b: numpyro.factor("prior", -(a**2) / N),
    "group effect": lambda i, a, b: observe(i, b[jnp.asarray(GROUP)[i]], name="effect"),
    "event": event,
    "multivariate": multivariate,
    "mask": masked,
    "missing values": missing,
    "scale": weighted,
    "transposed": transposed,
    "groups divided by their rows": groups,
    "segments": segments,
    "convolution": convolution,
    "categorical": categorical,
    "multinomial": multinomial,
    "walk in a row": walk_in_row,
    "subsample": subsampled,
}
# Values of another size are needed to show that these are right.
RIGHT_BY_VALUES = {
    "mean": lambda i, a, b: numpyro.factor("mean", log_probs(i, a).mean()),
    "number and its inverse": lambda i, a, b: observe(
        i, a * jnp.ones(len(i)).sum() / len(i), name="inverse"
    ),
    "constant": lambda i, a, b: numpyro.factor("constant", jnp.full(len(i), -1.0 * len(i))),
}


@pytest.mark.parametrize("name", RIGHT)
def test_potential_right_statement_needs_no_values_of_another_size(name):
    arguments = Arguments((), {"batch_size": 50})
    potential = make_model_potential(make_plate_model(RIGHT[name]), arguments, init_to_uniform)
    assert not potential.size_dependent_sites


@pytest.mark.parametrize("batch_size", [quick_if(size == 50, size) for size in BATCH_SIZES])
def test_nonadditive_plates_right_statements_are_not_reported(batch_size):
    assert not check_statements(*RIGHT.values(), batch_size=batch_size)


@pytest.mark.parametrize("name", [quick_if(False, name) for name in RIGHT])
def test_nonadditive_plates_each_right_statement_is_not_reported(name):
    assert not check_statements(RIGHT[name])


@pytest.mark.parametrize("name", RIGHT_BY_VALUES)
def test_nonadditive_plates_right_values_are_not_reported(name):
    regression = RIGHT["regression"]
    assert not check_statements(regression, RIGHT_BY_VALUES[name])


def test_nonadditive_plates_columns_beside_rows_are_not_reported():
    """Rows are in another dimension than the last."""

    def statement(i, a, b):
        with numpyro.plate("columns", K, dim=-1):
            numpyro.sample("z", dist.Normal(a + b, 1), obs=jnp.asarray(Z)[i])
        numpyro.factor("factor", log_probs(i, a)[:, None])

    assert not check_statements(statement, dim=-2)


def test_nonadditive_plates_few_rows_are_not_reported():
    """NumPyro looks up no rows for a minibatch with as many as the data."""
    num_rows = 60
    x, y = jnp.asarray(X[:num_rows]), jnp.asarray(Y[:num_rows])

    def model(batch_size=None):
        a = numpyro.sample("a", dist.Normal(0, 1))
        with numpyro.plate("rows", num_rows, subsample_size=batch_size) as i:
            mean = a * numpyro.subsample(x, event_dim=0)
            numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])

    arguments = Arguments((), {"batch_size": 20})
    assert not check_additivity(model, arguments, [0.5])


def make_crossed_model(mean=lambda i, j, a, b: a * b, factor=lambda j, b: -b):
    """A table with two subsampled plates, and a plate that stands alone."""
    table = jnp.asarray(RNG.standard_normal((30, 20)), jnp.float32)

    def model(rows, columns):
        a = numpyro.sample("a", dist.Normal(0, 1))
        b = numpyro.sample("b", dist.Normal(0, 1))
        with (
            numpyro.plate("rows", 30, subsample_size=rows, dim=-2) as i,
            numpyro.plate("columns", 20, subsample_size=columns, dim=-1) as j,
        ):
            numpyro.sample("table", dist.Normal(mean(i, j, a, b), 1), obs=table[i[:, None], j])
        with numpyro.plate("alone", N, subsample_size=40) as k:
            numpyro.sample("y", dist.Normal(a, 1), obs=jnp.asarray(Y)[k])
            numpyro.factor("factor", factor(k, b))

    return model


@pytest.mark.parametrize(
    ("model", "plates"),
    [
        (make_crossed_model(), []),
        (make_crossed_model(lambda i, j, a, b: a * jnp.arange(len(j))), ["columns"]),
        (make_crossed_model(lambda i, j, a, b: a * jnp.arange(len(i))[:, None]), ["rows"]),
        (make_crossed_model(lambda i, j, a, b: a * len(i) / 30), ["rows"]),
        (make_crossed_model(factor=lambda k, b: -9.0 * b**2 / len(k)), ["alone"]),
    ],
)
def test_nonadditive_plates_several_plates_are_distinguished(model, plates):
    arguments = Arguments((), {"rows": 10, "columns": 8})
    warnings = check_additivity(model, arguments, [0.5, 0.3])
    assert [any(f"'{p}'" in w.message for w in warnings) for p in plates] == [True] * len(plates)
    assert len(warnings) == len(plates)


@pytest.mark.parametrize(
    ("position", "keyword"), [(lambda i: i / N, None), (lambda i: jnp.arange(len(i)), "position")]
)
def test_nonadditive_plates_rows_on_the_host(position, keyword):
    def model(y, batch_size=None):
        a = numpyro.sample("a", dist.Normal(0, 2))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(a * position(i), 1), obs=y[i])

    warnings = check_additivity(model, Arguments((HostArray(Y), 50)), [0.5])
    assert [keyword in w.message for w in warnings] == ([] if keyword is None else [True])


@pytest.mark.parametrize("batch_size", [64, quick_if(False, 250)])
@pytest.mark.parametrize(
    "density",
    [
        pytest.param(lambda a: (dist.Gamma(200 * a, 200.0), 1.0), id="gamma"),
        pytest.param(lambda a: (dist.Poisson(1e6 * a), 1e6), id="poisson"),
        quick_if(False, lambda a: (dist.NegativeBinomial2(100 * a, 1e4), 100.0)),
    ],
)
def test_nonadditive_plates_terms_that_cancel_are_not_reported(density, batch_size):
    """The rounding of a row's large terms is larger than that of its log density."""
    values = 1 + np.random.default_rng(2).normal(0, 0.01, N)

    def model(batch_size=None):
        a = numpyro.sample("a", dist.LogNormal(0, 1))
        fn, unit = density(a)
        y = jnp.asarray(np.round(values * unit) if unit > 1 else values, jnp.float32)
        with numpyro.plate("rows", N, subsample_size=batch_size) as i:
            numpyro.sample("y", fn, obs=y[i])

    potential = Arguments((), {"batch_size": batch_size})
    assert not check_additivity(model, potential, [0.0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_run_nonadditive_likelihood_warns_once_and_report_is_flagged():
    model = make_model(OVER_THE_MINIBATCH["standardised"])
    mcmc = quietly(SGHMCSplit(model), num_warmup=50, num_samples=100)
    with pytest.warns(NonAdditiveLikelihoodWarning, match="rows.*additive") as caught:
        mcmc.run(random.key(0), jnp.asarray(X), jnp.asarray(Y), batch_size=20)
    messages = [str(w.message) for w in caught if w.category is NonAdditiveLikelihoodWarning]
    assert len(messages) == 1
    report = bias_report(mcmc)
    assert report.is_flagged
    assert messages[0] in report.diagnosis
