"""What a run must have in common with the run that it continues, as short texts by name."""

from __future__ import annotations

import platform
import zlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import CodeType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax.experimental import multihost_utils
from numpyro.distributions import Distribution
from numpyro.distributions.util import lazy_property
from numpyro.util import is_prng_key

from numpyro_sgmcmc.data.arguments import Arguments, is_array
from numpyro_sgmcmc.errors import InvalidArgumentError
from numpyro_sgmcmc.sampling.kernel import SGMCMCKernel

__all__ = ["check_same_run", "compute_fingerprint", "describe", "shorten_text"]

_MAX_FULL_CHECKSUM_BYTES = 2**25
_NUM_CHECKSUM_ROWS = 512
_MAX_DESCRIBE_DEPTH = 8
_FINGERPRINTED_JAX_OPTIONS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)


def _compute_array_checksum(x: Any) -> str:
    """Of all values, or of some rows where they are many."""
    if x.nbytes > _MAX_FULL_CHECKSUM_BYTES and len(x) > _NUM_CHECKSUM_ROWS:
        x = x[np.linspace(0, len(x) - 1, _NUM_CHECKSUM_ROWS).astype(int)]
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = multihost_utils.process_allgather(x, tiled=True)
    return f"{zlib.crc32(np.ascontiguousarray(x).tobytes()):08x}"


def _compute_code_checksum(code: CodeType) -> int:
    """Checksum of what a function does, wherever it stands in its file."""

    def constant(c: Any) -> Any:
        if isinstance(c, CodeType):
            return _compute_code_checksum(c)
        return sorted(map(repr, c)) if isinstance(c, frozenset) else repr(c)

    parts = [constant(c) for c in code.co_consts], code.co_names
    return zlib.crc32(code.co_code + repr(parts).encode())


def _get_closure_values(function: Any) -> list[Any]:
    """What a function has closed over."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet
            found.append(None)
    return found


def describe(x: Any, depth: int = 0) -> str:
    """A value as a short text that is the same in every process.

    Functions count by their code and what they have closed over, other objects by their type and
    what they hold.
    """
    if x is None or isinstance(x, (bool, int, float, complex, str, bytes, np.generic)):
        return repr(x)
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return f"key {describe(jax.random.key_data(x))}"
    if is_array(x):
        return f"{x.dtype}{tuple(x.shape)} {_compute_array_checksum(x)}"
    name = getattr(x, "__qualname__", None)
    if name is None or depth > _MAX_DESCRIBE_DEPTH:
        name = type(x).__qualname__
    if depth > _MAX_DESCRIBE_DEPTH:
        return name
    inner = partial(describe, depth=depth + 1)
    if isinstance(x, (list, tuple)):
        return f"{type(x).__name__}({', '.join(map(inner, x))})"
    if isinstance(x, (set, frozenset)):
        return f"{type(x).__name__}({', '.join(sorted(map(inner, x)))})"
    if isinstance(x, Mapping):
        return f"{{{', '.join(f'{inner(k)}: {inner(v)}' for k, v in x.items())}}}"
    if isinstance(x, partial):
        return f"partial({inner(x.func)}, {inner(x.args)}, {inner(x.keywords)})"
    if is_dataclass(x) and not isinstance(x, type):
        return f"{name}({', '.join(f'{f.name}={inner(getattr(x, f.name))}' for f in fields(x))})"
    if hasattr(x, "__func__"):
        return f"{inner(x.__self__)}.{inner(x.__func__)}"
    if isinstance(code := getattr(x, "__code__", None), CodeType):
        return f"{name} {_compute_code_checksum(code):08x} {inner((_get_closure_values(x), x.__defaults__, x.__kwdefaults__))}"
    if isinstance(x, (type, ModuleType)) or not hasattr(x, "__dict__"):
        return name
    kind = type(x).__qualname__
    if isinstance(x, Distribution):
        return f"{kind}({inner(_get_distribution_parameters(x))})"
    held = {k: v for k, v in vars(x).items() if not k.startswith("__")}
    code = getattr(x, "__wrapped__", type(x).__call__) if callable(x) else None
    return f"{kind}({inner(held)}) {inner(code)}"


def _get_distribution_parameters(x: Distribution) -> dict[str, Any]:
    """What a distribution was made from, without what it has computed since."""
    names = sorted(set(vars(x)) - {"_validate_args"})
    return {
        n: vars(x)[n] for n in names if not isinstance(getattr(type(x), n, None), lazy_property)
    }


def _format_argument_name(path: tuple) -> str:
    """A keyword argument's name, or a positional one's number."""
    return jax.tree_util.keystr(path[1:]).strip("[]'")


def _combine_over_processes(text: str) -> str:
    """What tells of the texts of all processes, which have different rows."""
    if jax.process_count() == 1:
        return text
    own = np.uint32(zlib.crc32(text.encode()))
    return f"{zlib.crc32(multihost_utils.process_allgather(own).tobytes()):08x} of all processes"


def _describe_host_shards(x: Any) -> Any:
    return f"{x.dtype}{x.shape} on hosts {x.shards.rows_per_shard}" if x.is_on_host else x


def compute_fingerprint(
    kernel: SGMCMCKernel,
    settings: Mapping[str, Any],
    model_args: tuple,
    model_kwargs: dict,
) -> dict[str, str]:
    """Everything that decides a run's draws but for its key: kernel, settings, data, versions."""
    from numpyro_sgmcmc import __version__

    chosen = kernel.settings
    model, potential_fn = chosen.pop("model"), chosen.pop("potential_fn")
    model = model or potential_fn
    found = {"kernel": type(kernel).__qualname__, "model": describe(model)}
    for name, value in sorted(chosen.items()):
        found[f"kernel option `{name}`"] = describe(value)
    for name, value in settings.items():
        found[f"`{name}`"] = describe(value)
    arguments = Arguments(model_args, model_kwargs)
    assert model is not None
    for name, array in arguments.named_arrays(model):
        found[f"data {name}"] = describe(array)
    spread = [x.array for x in arguments.sharded_arrays if x.is_on_host]
    for name, host in arguments.named_host_arrays(model):
        text = f"{host.dtype}{host.shape} {host.checksum():08x}"
        # By the argument and not the array's own name: the file may have moved.
        found[f"HostArray {name}"] = _combine_over_processes(text) if host in spread else text
    others = arguments.map_host_arrays(lambda host: "rows on the host").map_sharded_arrays(
        _describe_host_shards
    )
    for path, x in jax.tree_util.tree_flatten_with_path((others.args, others.kwargs))[0]:
        if not is_array(x):
            found[f"argument `{_format_argument_name(path)}`"] = describe(x)
    found["how the arguments are passed"] = str(jax.tree.structure((others.args, others.kwargs)))
    found["floating-point type"] = jnp.result_type(float).name
    found["device"] = jax.default_backend()
    for name in _FINGERPRINTED_JAX_OPTIONS:
        found[f"JAX's option `{name}`"] = describe(getattr(jax.config, name))
    found["version of numpyro_sgmcmc"] = __version__
    found["version of NumPyro"] = numpyro.__version__
    found["version of JAX"] = jax.__version__
    found["version of Python"] = ".".join(platform.python_version_tuple()[:2])
    return found


def check_same_run(
    stored: Mapping[str, str], current: Mapping[str, str], folder: Any, args: tuple
) -> None:
    """Refuse to continue a run as another.

    :param args: what `resume` was given, which may begin with a key where `run` takes one.
    :raises ValueError: naming everything that differs.
    """
    if args and is_prng_key(args[0]) and stored != current:
        raise InvalidArgumentError(
            "`resume` takes the model's arguments alone, for the run goes on with the key that it "
            "began with: leave the key out."
        )
    differs = [n for n in {**stored, **current} if stored.get(n) != current.get(n)]
    if differs:
        each = "; ".join(
            f"{n} was {shorten_text(stored.get(n, 'not there'))} and is now "
            f"{shorten_text(current.get(n, 'not there'))}"
            for n in differs
        )
        raise InvalidArgumentError(
            f"The run in '{folder}' cannot be continued by this one, as it would not be the same "
            f"run: {each}."
        )


def shorten_text(text: str) -> str:
    """A text as a sentence has room for it, with a checksum where it is cut."""
    return text if len(text) <= 80 else f"{text[:50]}... ({zlib.crc32(text.encode()):08x})"
