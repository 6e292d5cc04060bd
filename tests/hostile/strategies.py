"""Generated models with subsampled plates, and their data in every form that NumPy has.

A :class:`Specimen` is a model with its arguments. It takes the minibatch size of each plate by the
plate's name. Without them it runs on all rows, and NumPyro gives the potential to compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from hypothesis import strategies as st
from numpyro.distributions import constraints


class Specimen(NamedTuple):
    """A model with its arguments.

    - **model** - the model.
    - **args** - positional arguments.
    - **kwargs** - keyword arguments without the minibatch sizes.
    - **plain** - both with every array as a fresh JAX array.
    - **batch** - minibatch sizes by plate; None for all rows.
    - **sizes** - sizes by plate.
    - **description** - a description for messages.
    """

    model: Callable
    args: tuple
    kwargs: dict
    plain: tuple[tuple, dict]
    batch: dict[str, int | None]
    sizes: dict[str, int]
    description: str

    def __repr__(self) -> str:
        return self.description


# --- Latent sites -------------------------------------------------------------------------------
# Each returns a real number that depends on all entries of the site.


def _mean_of(x: Any) -> Any:
    return jnp.mean(jnp.asarray(x, float))


def _ordered(name: str, k: int) -> Any:
    cuts = numpyro.sample(name, dist.ImproperUniform(constraints.ordered_vector, (), (k,)))
    numpyro.factor(f"{name}_prior", -0.5 * jnp.square(cuts).sum())
    return cuts @ jnp.linspace(1.0, 2.0, k)


def _bounded_by_another(name: str, k: int) -> Any:
    top = numpyro.sample(f"{name}_top", dist.Gamma(3.0, 1.0))
    return numpyro.sample(name, dist.Uniform(0.0, top)) + top


def _in_a_plate(name: str, k: int) -> Any:
    with numpyro.plate(f"{name}_plate", k):
        return _mean_of(numpyro.sample(name, dist.StudentT(4.0, 0.0, 1.0)))


def _mean_square_of(distribution: Callable[[int], Any]) -> Callable[[str, int], Any]:
    return lambda name, k: _mean_of(numpyro.sample(name, distribution(k)) ** 2)


LATENTS: dict[str, Callable[[str, int], Any]] = {
    "scalar": lambda name, k: numpyro.sample(name, dist.Normal(0.5, 1.0)),
    "batch": _mean_square_of(lambda k: dist.Normal(0.0, 1.0).expand([k])),
    "event": _mean_square_of(lambda k: dist.Laplace(0.0, 1.0).expand([k]).to_event(1)),
    "matrix": _mean_square_of(lambda k: dist.Normal(0.0, 1.0).expand([2, k]).to_event(2)),
    "half": _mean_square_of(lambda k: dist.HalfNormal(2.0).expand([k])),
    "gamma": _mean_square_of(lambda k: dist.Gamma(2.0, 1.0)),
    "beta": _mean_square_of(lambda k: dist.Beta(2.0, 3.0).expand([k, 1]).to_event(1)),
    "interval": _mean_square_of(lambda k: dist.Uniform(-1.0, 3.0)),
    "truncated": _mean_square_of(lambda k: dist.TruncatedNormal(0.0, 1.0, low=-0.5)),
    "simplex": _mean_square_of(lambda k: dist.Dirichlet(jnp.arange(1.0, k + 2.0))),
    "many simplices": _mean_square_of(lambda k: dist.Dirichlet(jnp.ones((k, 3))).to_event(1)),
    "correlated": _mean_square_of(
        lambda k: dist.MultivariateNormal(jnp.zeros(k), 2.0 * jnp.eye(k))
    ),
    "cholesky": _mean_square_of(lambda k: dist.LKJCholesky(k + 1, 2.0)),
    "masked": _mean_square_of(lambda k: dist.Normal(0.0, 1.0).expand([k]).mask(jnp.arange(k) > 0)),
    "ordered": _ordered,
    "bounded": _bounded_by_another,
    "plate": _in_a_plate,
}

# --- Observed sites -----------------------------------------------------------------------------
# (distribution of a real predictor, data of a shape, event shape, range of the data)


class Kind(NamedTuple):
    """A likelihood, and data in its support.

    - **likelihood** - distribution of a real predictor.
    - **draw** - ``(rng, shape) -> data``.
    - **event_shape** - shape of one observation.
    """

    likelihood: Callable[[Any], Any]
    draw: Callable[[np.random.Generator, tuple], np.ndarray]
    event_shape: tuple[int, ...] = ()


def _reals(rng: np.random.Generator, shape: tuple) -> np.ndarray:
    return np.round(4 * rng.standard_normal(shape)) / 4  # the same in any type


def _counts(rng: np.random.Generator, shape: tuple) -> np.ndarray:
    return rng.integers(0, 6, shape)


def _bits(rng: np.random.Generator, shape: tuple) -> np.ndarray:
    return rng.integers(0, 2, shape)


def _positive(rng: np.random.Generator, shape: tuple) -> np.ndarray:
    return rng.integers(1, 12, shape) / 4


KINDS: dict[str, Kind] = {
    "normal": Kind(lambda eta: dist.Normal(eta, 1.0 + eta**2), _reals),
    "student": Kind(lambda eta: dist.StudentT(3.0, eta, 1.5), _reals),
    "cauchy, tempered": Kind(lambda eta: dist.Cauchy(eta, 1.0).mask(True), _reals),
    "bernoulli": Kind(lambda eta: dist.Bernoulli(logits=eta), _bits),
    "bernoulli, probs": Kind(lambda eta: dist.Bernoulli(probs=jax.nn.sigmoid(eta)), _bits),
    "poisson": Kind(lambda eta: dist.Poisson(jnp.exp(jnp.tanh(eta))), _counts),
    "binomial": Kind(lambda eta: dist.Binomial(7, logits=eta), _counts),
    "negative binomial": Kind(lambda eta: dist.NegativeBinomial2(jnp.exp(eta), 2.0), _counts),
    "categorical": Kind(
        lambda eta: dist.Categorical(logits=eta[..., None] * jnp.arange(6.0)), _counts
    ),
    "exponential": Kind(lambda eta: dist.Exponential(jnp.exp(eta)), _positive),
    "gamma": Kind(lambda eta: dist.Gamma(2.0, jnp.exp(eta)), _positive),
    "vector": Kind(
        lambda eta: dist.Normal(eta[..., None] * jnp.arange(3.0), 2.0).to_event(1), _reals, (3,)
    ),
    "multivariate": Kind(
        lambda eta: dist.MultivariateNormal(jnp.stack([eta, -eta], -1), jnp.eye(2)), _reals, (2,)
    ),
    "mixture": Kind(
        lambda eta: dist.MixtureSameFamily(
            dist.Categorical(probs=jnp.array([0.3, 0.7])),
            dist.Normal(jnp.stack([eta, eta + 2.0], -1), 1.0),
        ),
        _reals,
    ),
}

# --- Arrays -------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[np.ndarray], Any]] = {
    "plain": lambda x: x,
    "jax": jnp.asarray,
    "every second": lambda x: np.repeat(x, 2, axis=0)[::2],
    "backwards": lambda x: np.ascontiguousarray(x[::-1])[::-1],
    "fortran": np.asfortranarray,
    "transposed": lambda x: np.ascontiguousarray(x.T).T,
    "read-only": lambda x: _read_only(x.copy()),
    "a column of a table": lambda x: np.stack([x, x], -1)[..., 1],
}


def _read_only(x: np.ndarray) -> np.ndarray:
    x.flags.writeable = False
    return x


def types_for(x: np.ndarray) -> list[str]:
    """NumPy types that hold these values exactly."""
    names = ["float16", "float32", "float64"]
    if (x == np.round(x)).all():
        names += ["int8", "int16", "int32", "int64"]
        if x.min() >= 0:
            names += ["uint8", "uint32", "uint64"]
            if x.max() <= 1:
                names += ["bool"]
    return names


@st.composite
def arrays(draw: Any, values: np.ndarray, is_class: bool = False) -> Any:
    """The values in a random type and layout."""
    types = [t for t in types_for(values) if not (is_class and ("float" in t or t == "bool"))]
    typed = values.astype(draw(st.sampled_from(types)))
    return LAYOUTS[draw(st.sampled_from(list(LAYOUTS)))](typed)


# --- Plates and models --------------------------------------------------------------------------

LOOKUPS: dict[str, Callable[[Any, Any, int], Any]] = {
    "x[i]": lambda x, i, axis: x[(slice(None),) * axis + (i,)],
    "take": lambda x, i, axis: jnp.take(x, i, axis=axis),
    "one by one": lambda x, i, axis: jnp.moveaxis(
        jax.vmap(lambda k: jnp.moveaxis(jnp.asarray(x), axis, 0)[k])(i), 0, axis
    ),
}

ARRANGEMENTS: dict[str, list[tuple[str, ...]]] = {
    "one": [("a",)],
    "apart": [("a",), ("b",)],
    "crossed": [("a", "b")],
    "crossed, and each alone": [("a", "b"), ("a",), ("b",)],
    "crossed, and one apart": [("a", "b"), ("c",)],
    "chained": [("a", "b"), ("b", "c")],
    "three": [("a", "b", "c")],
}
DIMS = {"a": -1, "b": -2, "c": -3}


@st.composite
def specimens(draw: Any) -> Specimen:
    """A model with one to three plates, and data for it."""
    arrangement = draw(st.sampled_from(list(ARRANGEMENTS)))
    blocks = ARRANGEMENTS[arrangement]
    names = sorted({p for block in blocks for p in block})
    largest = {1: 7, 2: 4, 3: 3}[len(names)]
    # Mostly large plates and real minibatches, where mistakes show.
    sizes = {p: draw(st.sampled_from([*range(1, largest + 1), largest])) for p in names}
    batch = {
        p: draw(st.sampled_from([*range(1, n + 1), *range(1, n), None])) for p, n in sizes.items()
    }
    latents = draw(st.lists(st.sampled_from(list(LATENTS)), min_size=1, max_size=3, unique=True))
    k = draw(st.integers(1, 3))
    kinds = [draw(st.sampled_from(list(KINDS))) for _ in blocks]
    lookup = draw(st.sampled_from([*LOOKUPS, "subsample"]))
    scale = draw(st.sampled_from([None, 0.5, 3.0]))
    is_masked = draw(st.booleans())
    style = draw(st.sampled_from(["positional", "keyword", "dict", "tuple"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))

    def values(block: tuple[str, ...], kind: Kind) -> dict[str, np.ndarray]:
        shape = tuple(sizes[p] for p in sorted(block, key=DIMS.get))
        return {
            "y": kind.draw(rng, (*shape, *kind.event_shape)),
            "x": _reals(rng, shape),
            "mask": rng.integers(0, 2, shape),
        }

    raw = [values(b, KINDS[k]) for b, k in zip(blocks, kinds, strict=True)]
    # NumPyro takes classes as integers only.
    data = [
        {n: draw(arrays(x, is_class=n == "y" and kind == "categorical")) for n, x in part.items()}
        for part, kind in zip(raw, kinds, strict=True)
    ]
    data = [{**part, "mask": np.asarray(part["mask"]).astype(bool)} for part in data]

    def model(*args: Any, **kwargs: Any) -> None:
        parts = _get_parts(style, args, kwargs)
        level = sum(LATENTS[name](f"z{n}", k) for n, name in enumerate(latents))
        plates = {
            p: numpyro.plate(p, n, subsample_size=kwargs.get(p), dim=DIMS[p])
            for p, n in sizes.items()
        }
        for n, (block, kind) in enumerate(zip(blocks, kinds, strict=True)):
            _observe(n, block, KINDS[kind], parts[n], plates, level)

    def _observe(n: int, block: Any, kind: Kind, part: dict, plates: dict, level: Any) -> None:
        ordered = sorted(block, key=DIMS.get)
        indices = {}
        with_plates = [plates[p] for p in ordered]
        for plate in with_plates:
            indices[plate.name] = plate.__enter__()
        try:

            def rows(x: Any, event_dim: int) -> Any:
                if lookup == "subsample":
                    return numpyro.subsample(_expand_plate_axes(x, ordered, event_dim), event_dim)
                for axis, p in enumerate(ordered):
                    x = LOOKUPS[lookup](x, indices[p], axis)
                return _expand_plate_axes(x, ordered, event_dim)

            x, y, mask = (
                rows(part["x"], 0),
                rows(part["y"], len(kind.event_shape)),
                rows(part["mask"], 0),
            )
            eta = jnp.asarray(level + 0.5 * x, float)
            fn = kind.likelihood(eta)
            if is_masked:
                fn = fn.mask(mask)
            if scale is None:
                numpyro.sample(f"y{n}", fn, obs=y)
            else:
                with numpyro.handlers.scale(scale=scale):
                    numpyro.sample(f"y{n}", fn, obs=y)
        finally:
            for plate in reversed(with_plates):
                plate.__exit__(None, None, None)

    args, kwargs = _pass_data(style, data)
    plain = [{n: jnp.asarray(np.array(x)) for n, x in part.items()} for part in data]
    description = (
        f"plates {arrangement} {batch} of {sizes}; latents {latents} ({k}); sites {kinds}; "
        f"{lookup}; scale {scale}; masked {is_masked}; {style}; "
        f"types {[{n: str(x.dtype) for n, x in part.items()} for part in data]}"
    )
    return Specimen(model, args, kwargs, _pass_data(style, plain), batch, sizes, description)


def _expand_plate_axes(x: Any, plates: list[str], event_dim: int) -> Any:
    """Return data with an axis of length one for each missing plate, as ``dim`` requires."""
    x = jnp.asarray(x)
    taken = [DIMS[p] for p in plates]
    shape = [1] * -min(taken)
    for axis, dim in enumerate(taken):
        shape[dim] = x.shape[axis]
    return x.reshape(*shape, *x.shape[x.ndim - event_dim :])


def _pass_data(style: str, parts: list[dict[str, Any]]) -> tuple[tuple, dict]:
    if style == "positional":
        return tuple(x for part in parts for x in (part["y"], part["x"], part["mask"])), {}
    if style == "keyword":
        return (), {f"{n}{k}": x for k, part in enumerate(parts) for n, x in part.items()}
    if style == "dict":
        return (), {"data": {"parts": parts}}
    return (tuple(parts),), {}


def _get_parts(style: str, args: tuple, kwargs: dict) -> list[dict[str, Any]]:
    if style == "positional":
        columns = [args[k : k + 3] for k in range(0, len(args), 3)]
        return [dict(zip(("y", "x", "mask"), c, strict=True)) for c in columns]
    if style == "keyword":
        num = sum(name.startswith("mask") for name in kwargs)
        return [{n: kwargs[f"{n}{k}"] for n in ("y", "x", "mask")} for k in range(num)]
    return kwargs["data"]["parts"] if style == "dict" else list(args[0])
