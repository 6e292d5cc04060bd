"""Checks of what a user may pass, each with one sentence that names it and the way out."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.arguments import Arguments
from numpyro_sgmcmc.refusals import first_line
from numpyro_sgmcmc.target import Site, Target

__all__ = [
    "between",
    "check_arrays",
    "check_init_params",
    "check_key",
    "check_one_key",
    "check_values",
    "first_step_size",
    "function",
    "is_bool",
    "local_options",
    "mass_matrix",
    "mass_matrix_mask",
    "needs",
    "no_more_keywords",
    "not_negative",
    "one_of",
    "positive",
    "positive_int",
    "real_array",
    "returned",
]


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not among the choices."""
    if not (isinstance(value, str) and value in choices):
        listed = ", ".join(repr(c) for c in choices)
        raise ValueError(f"`{name}` is {value!r}, but must be one of {listed}.")


def first_step_size(schedule: Any) -> float:
    """A schedule's first step size, or its largest where it starts at zero; checked at many."""

    def number(n: Any) -> Any:
        found = jnp.asarray(schedule(n))
        if found.shape or jnp.issubdtype(found.dtype, jnp.complexfloating):
            raise TypeError(f"it returns {found.dtype} of shape {found.shape}")
        return found

    try:
        jax.eval_shape(number, jnp.int32(0))
    except Exception as error:
        raise ValueError(
            "`step_size` must be a function of the number of steps so far that JAX can trace "
            "(no Python `if` on it) and that returns a number, but calling it failed: "
            f"{first_line(error)}"
        ) from error
    counts = [0, *(a * 10**b for b in range(5) for a in (1, 2, 5))]
    sizes = [float(schedule(n)) for n in counts]
    for n, size in zip(counts, sizes, strict=True):
        if np.isnan(size) or np.isinf(size) or (size < 0 and n <= 100):
            raise ValueError(
                f"`step_size({n})` is {size}, but a schedule's steps must be finite and not "
                "negative."
            )
    if max(sizes) <= 0:
        raise ValueError("`step_size` is a schedule of steps that are all zero.")
    return sizes[0] if sizes[0] > 0 else max(sizes)


def function(name: str, value: Any) -> None:
    """Refuse what cannot be called."""
    if not callable(value):
        raise ValueError(f"`{name}` is {value!r}, but must be a function.")


def returned(name: str, fn: Callable, *args: Any) -> np.ndarray:
    """What a user's function of arrays returns, as an array; JAX must be able to trace it."""
    try:
        found = jax.eval_shape(lambda xs: jnp.asarray(fn(*xs)), args)
        if jnp.issubdtype(found.dtype, jnp.complexfloating):
            raise TypeError("it returns complex numbers")
        return np.asarray(jnp.asarray(fn(*args), float))
    except Exception as error:
        raise ValueError(
            f"`{name}` must be a function that JAX can trace (no Python `if` on its values) and "
            f"that returns an array, but calling it failed: {first_line(error)}."
        ) from error


def no_more_keywords(kernel: type, unknown: Mapping[str, Any]) -> None:
    """Refuse keywords that a kernel does not know, and name the one that may have been meant."""
    for name in unknown:
        meant = difflib.get_close_matches(name, inspect.signature(kernel).parameters, 1)
        hint = f"; did you mean '{meant[0]}'?" if meant else ""
        raise TypeError(f"{kernel.__name__} got an unexpected keyword argument '{name}'{hint}")


def needs(module: str, wanted_by: str, extra: str) -> Any:
    """The module, imported now; an error that says what to install where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{wanted_by} needs {module}: pip install 'numpyro-sgmcmc[{extra}]'."
        ) from error


def _number(value: Any) -> float | None:
    """A number as a float, None for anything else: texts and truth values are none."""
    if isinstance(value, (bool, str, bytes)) or getattr(value, "dtype", None) == np.bool_:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def positive(name: str, value: Any) -> None:
    """Refuse anything but a positive finite number."""
    number = _number(value)
    if number is None:
        raise ValueError(f"`{name}` is {value!r}, but must be a positive number.")
    if not (number > 0 and np.isfinite(number)):
        raise ValueError(f"`{name}` is {value!r}, but must be positive and finite.")


def between(name: str, value: Any, low: float, high: float) -> None:
    """Refuse anything but a number from ``low`` to ``high``."""
    positive(name, value)
    if not low <= float(value) <= high:
        raise ValueError(f"`{name}` is {value!r}, but must lie between {low:g} and {high:g}.")


def not_negative(name: str, value: Any) -> None:
    """Refuse anything but zero and a positive finite number."""
    number = _number(value)
    if number is None or not 0 <= number < np.inf:
        raise ValueError(f"`{name}` is {value!r}, but must be zero or a positive number.")


def is_bool(name: str, value: Any) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"`{name}` is {value!r}, but must be True or False.")


def positive_int(name: str, value: Any) -> None:
    """Refuse anything but a positive integer."""
    is_int = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not (is_int and value > 0):
        raise ValueError(f"`{name}` is {value!r}, but must be a positive integer.")


def _slices(sites: tuple[Site, ...]) -> dict[str, slice]:
    """Where each site's coordinates lie in the flat position."""
    found, start = {}, 0
    for site in sites:
        size = int(np.prod(site.shape))
        found[site.name] = slice(start, start + size)
        start += size
    return found


def _coordinates(argument: str, names: Any, sites: tuple[Site, ...]) -> np.ndarray:
    """Flat coordinates of a tuple of site names, in the order of the tuple."""
    slices = _slices(sites)
    if not isinstance(names, (str, tuple, list)) or not names:
        raise ValueError(f"`{argument}` has {names!r} where a tuple of site names is expected.")
    names = (names,) if isinstance(names, str) else tuple(names)
    for name in names:
        if name not in slices:
            raise ValueError(
                f"`{argument}` names site '{name}', but the latent sites are "
                f"{', '.join(repr(s) for s in slices) or 'not known for a potential function'}."
            )
    return np.concatenate([np.arange(slices[n].start, slices[n].stop) for n in names])


def mass_matrix_mask(dense_mass: Any, sites: tuple[Site, ...], dim: int) -> np.ndarray | None:
    """Blocks of NumPyro's structured ``dense_mass=[("a", "b"), ...]``; None for a bool or None."""
    if dense_mass is None or isinstance(dense_mass, (bool, np.bool_)):
        return None
    if not isinstance(dense_mass, list):
        raise ValueError(
            f"`dense_mass` is {dense_mass!r}, but must be True, False, None or a list of tuples "
            "of site names."
        )
    if not dense_mass:
        return None
    mask = np.eye(dim, dtype=bool)
    for names in dense_mass:
        block = _coordinates("dense_mass", names, sites)
        mask[np.ix_(block, block)] = True
    return mask


def mass_matrix(value: Any, sites: tuple[Site, ...], dim: int) -> np.ndarray | None:
    """A user's inverse mass matrix as an array of shape ``(d,)`` or ``(d, d)``.

    A dict maps tuples of site names to blocks, as in NumPyro; sites it leaves out get ones.
    """
    if value is None:
        return None
    if isinstance(value, dict):
        blocks = [
            (_coordinates("inverse_mass_matrix", k, sites), _matrix(v)) for k, v in value.items()
        ]
        taken = np.concatenate([np.empty(0, int), *(where for where, _ in blocks)])
        if len(np.unique(taken)) < len(taken):
            raise ValueError(
                f"`inverse_mass_matrix` names a site twice in {list(value)}: each may stand in one "
                "block."
            )
        full = np.eye(dim)
        for where, block in blocks:
            if block.shape not in ((where.size,), (where.size, where.size)):
                raise ValueError(
                    f"`inverse_mass_matrix` has a block of shape {block.shape} for "
                    f"{where.size} coordinates."
                )
            full[np.ix_(where, where)] = np.diag(block) if block.ndim == 1 else block
        matrix = full if any(b.ndim == 2 for _, b in blocks) else np.diagonal(full).copy()
    else:
        matrix = _matrix(value)
    if matrix.shape not in ((dim,), (dim, dim)):
        raise ValueError(
            f"`inverse_mass_matrix` has shape {matrix.shape}, but the model has {dim} "
            f"unconstrained coordinates: give shape ({dim},) or ({dim}, {dim})."
        )
    if not (np.isfinite(matrix).all() and _is_positive_definite(matrix)):
        raise ValueError("`inverse_mass_matrix` must be positive definite.")
    return matrix


def _matrix(value: Any) -> np.ndarray:
    """A user's matrix or its diagonal as an array of floats."""
    try:
        found = np.asarray(value)
        if found.dtype.kind not in "iuf":
            raise TypeError(f"its type is {found.dtype}")
        return found.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`inverse_mass_matrix` must be an array of numbers, but {first_line(error)}."
        ) from error


def _is_positive_definite(matrix: np.ndarray) -> bool:
    if matrix.ndim == 1:
        return bool((matrix > 0).all())
    is_symmetric = np.allclose(matrix, matrix.T, rtol=1e-4, atol=1e-6 * np.abs(matrix).max())
    return bool(is_symmetric and np.linalg.eigvalsh(matrix).min() > 0)


def real_array(name: str, value: Any) -> np.ndarray:
    """A user's array of real numbers; texts, objects and complex numbers are refused."""
    try:
        found = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{name}` must be an array, but: {first_line(error)}.") from error
    if found.dtype.kind not in "biuf" and not jnp.issubdtype(found.dtype, jnp.floating):
        raise ValueError(f"`{name}` has type {found.dtype}, but must be an array of real numbers.")
    return found


def check_one_key(rng_key: Any) -> None:
    """Refuse what is not one random key."""
    if _key_axes(rng_key) != 0:
        raise ValueError(
            f"`rng_key` is {_key_shown(rng_key)}, but must be one random key such as "
            "jax.random.key(0)."
        )


def check_key(rng_key: Any) -> None:
    """Refuse what is no random key, nor one a chain."""
    if _key_axes(rng_key) not in (0, 1):
        raise ValueError(
            f"`rng_key` is {_key_shown(rng_key)}, but must be a random key such as "
            "jax.random.key(0), or an array of one for each chain."
        )


def _key_axes(rng_key: Any) -> int | None:
    """Axes of an array of typed or raw keys; None for what is none."""
    dtype, ndim = getattr(rng_key, "dtype", None), np.ndim(rng_key)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return ndim
    words = jax.eval_shape(jax.random.PRNGKey, 0).shape
    is_raw = dtype == np.uint32 and ndim > 0 and rng_key.shape[-1:] == words
    return ndim - 1 if is_raw else None


def _key_shown(rng_key: Any) -> str:
    if (dtype := getattr(rng_key, "dtype", None)) is None:
        return repr(rng_key)[:60]
    return f"an array of shape {np.shape(rng_key)} and type {dtype}"


def check_arrays(arguments: Arguments, model: Callable) -> None:
    """Refuse NumPy arrays that JAX cannot hold, or would hold with other values."""
    for name, x in arguments.named_arrays(model):
        if not isinstance(x, np.ndarray):
            continue
        if np.ma.is_masked(x):
            raise ValueError(
                f"{name} is a masked array, of which JAX would use the values behind the mask: "
                "leave these rows out, or pass them to handlers.mask."
            )
        if isinstance(x, np.ma.MaskedArray):
            raise ValueError(f"{name} is a masked array, which JAX does not take: pass its data.")
        if not x.dtype.isnative or x.dtype.name in ("longdouble", "float128", "complex256"):
            raise ValueError(
                f"{name} has type {x.dtype.str}, which JAX does not have: pass it as another, for "
                "example by .astype(np.float32)."
            )
        held = jax.dtypes.canonicalize_dtype(x.dtype)
        if x.dtype.kind in "iu" and held != x.dtype and x.size:
            low, high, limits = x.min(), x.max(), np.iinfo(held)
            if low < limits.min or high > limits.max:
                raise ValueError(
                    f"{name} has integers from {low} to {high}, which {held} cannot hold: switch "
                    "on jax_enable_x64, or pass floats."
                )


def check_values(init_params: Any) -> None:
    """Refuse what a potential function cannot be a function of."""
    leaves = jax.tree.leaves(init_params)
    if not sum(np.size(x) for x in leaves):
        raise ValueError("`init_params` has no values: there is nothing to sample.")
    for x in leaves:
        if jnp.issubdtype(jnp.result_type(x), jnp.complexfloating):
            raise ValueError(f"`init_params` has type {jnp.result_type(x)}, but must be real.")


def check_init_params(init_params: Any, target: Target, num_chains: int | None) -> Any:
    """``init_params`` as they are, if they fit the latent sites.

    :param num_chains: length of the leading axis, or None for one chain without such an axis.
    """
    if init_params is None or target.sites is None:
        return init_params
    if not isinstance(init_params, dict):
        raise ValueError("`init_params` must be a dict of unconstrained values by site name.")
    shapes = {s.name: s.shape for s in target.sites}
    unknown = sorted(set(init_params) - set(shapes))
    missing = sorted(set(shapes) - set(init_params))
    if unknown or missing:
        found = [f"has unknown sites {unknown}"] * bool(unknown)
        found += [f"lacks the sites {missing}"] * bool(missing)
        raise ValueError(
            f"`init_params` {' and '.join(found)}; the latent sites are {sorted(shapes)}."
        )
    chains = () if num_chains is None else (num_chains,)
    for name, shape in shapes.items():
        given = np.shape(init_params[name])
        if given != chains + shape:
            each = "" if num_chains is None else f": one of shape {shape} for each chain"
            raise ValueError(
                f"`init_params` of site '{name}' has shape {given}, but must have shape "
                f"{chains + shape} in unconstrained space{each}."
            )
        value = init_params[name]
        kind = getattr(value, "dtype", np.asarray(value).dtype if np.isscalar(value) else None)
        if kind is None or not (jnp.issubdtype(kind, jnp.floating) or kind.kind in "biu"):
            raise ValueError(
                f"`init_params` of site '{name}' has type {kind or type(value).__name__}, but must "
                "be an array of real numbers."
            )
        if not isinstance(value, jax.core.Tracer) and not np.isfinite(np.asarray(value)).all():
            raise ValueError(f"`init_params` of site '{name}' is not finite.")
    return init_params


def _takes(name: str, fn: Callable, keywords: Sequence[str]) -> None:
    """Refuse a function that cannot be called with these keywords."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        signature.bind(**dict.fromkeys(keywords))
    except TypeError as error:
        raise ValueError(
            f"`{name}` is called with the keywords {', '.join(keywords)}, but {error}."
        ) from None


def local_options(
    model: Any, gibbs_fn: Any, gibbs_sites: Any, collect_locals: bool | Sequence[str]
) -> None:
    """Refuse options for local sites that cannot be meant."""
    if isinstance(gibbs_sites, str) or not all(isinstance(n, str) for n in gibbs_sites):
        raise ValueError(f"`gibbs_sites` is {gibbs_sites!r}, but must be a list of names of sites.")
    if (gibbs_fn is None) != (len(gibbs_sites) == 0):
        raise ValueError(
            "`gibbs_fn` and `gibbs_sites` go together: a function, and the names of the sites "
            "that it draws."
        )
    if gibbs_fn is not None:
        function("gibbs_fn", gibbs_fn)
        _takes("gibbs_fn", gibbs_fn, ("rng_key", "gibbs_sites", "hmc_sites", "rows"))
    if isinstance(collect_locals, str) or not (
        isinstance(collect_locals, bool) or all(isinstance(n, str) for n in collect_locals)
    ):
        raise ValueError(
            f"`collect_locals` is {collect_locals!r}, but must be True, False or a list of names "
            "of sites."
        )
    if model is None and (gibbs_fn is not None or collect_locals):
        raise ValueError("`gibbs_fn` and `collect_locals` need a kernel made from a model.")
