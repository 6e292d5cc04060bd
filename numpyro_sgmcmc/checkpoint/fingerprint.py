"""The fingerprint of a run: short texts, by name, of all that determines its draws but the key.

A run is resumed only where all of them are equal.
"""

from __future__ import annotations

import platform
import zlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import CellType, CodeType, ModuleType
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
from numpyro_sgmcmc.data.host_array import compute_checksum, select_checksum_rows
from numpyro_sgmcmc.errors import InvalidArgumentError
from numpyro_sgmcmc.sampling.kernel import SGMCMCKernel

# A bound on nested objects, which may be cyclic.
_MAX_DESCRIBE_DEPTH = 8
# JAX's options that change a run's bits.
_FINGERPRINTED_JAX_OPTIONS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)


def compute_fingerprint(
    kernel: SGMCMCKernel, settings: Mapping[str, Any], model_args: tuple, model_kwargs: dict
) -> dict[str, str]:
    """Return texts by name on kernel, settings, model, data and versions."""
    from numpyro_sgmcmc import __version__

    kernel_settings = kernel.settings
    model, potential_fn = kernel_settings.pop("model"), kernel_settings.pop("potential_fn")
    model = model or potential_fn
    assert model is not None
    texts = {"kernel": type(kernel).__qualname__, "model": describe(model)}
    for name, value in sorted(kernel_settings.items()):
        texts[f"kernel option `{name}`"] = describe(value)
    for name, value in settings.items():
        texts[f"`{name}`"] = describe(value)
    arguments = Arguments(model_args, model_kwargs)
    for name, array in arguments.named_arrays(model):
        texts[f"data {name}"] = describe(array)
    sharded_hosts = [x.array for x in arguments.sharded_arrays if x.is_on_host]
    for name, host in arguments.named_host_arrays(model):
        # By the argument and not by the array's name, as the file may have moved.
        text = f"{host.dtype}{host.shape} {host.checksum():08x}"
        is_sharded = host in sharded_hosts
        texts[f"HostArray {name}"] = _combine_over_processes(text) if is_sharded else text
    others = arguments.map_host_arrays(lambda host: "rows on the host").map_sharded_arrays(
        lambda x: f"{x.dtype}{x.shape} on hosts {x.shards.rows_per_shard}" if x.is_on_host else x
    )
    for path, x in jax.tree_util.tree_flatten_with_path((others.args, others.kwargs))[0]:
        if not is_array(x):  # the name of a keyword argument, or the index of a positional one
            name = jax.tree_util.keystr(path[1:]).strip("[]'")
            texts[f"argument `{name}`"] = describe(x)
    texts["structure of the arguments"] = str(jax.tree.structure((others.args, others.kwargs)))
    for name in _FINGERPRINTED_JAX_OPTIONS:
        texts[f"JAX's option `{name}`"] = describe(getattr(jax.config, name))
    return texts | {
        "floating-point type": jnp.result_type(float).name,
        "device": jax.default_backend(),
        "version of numpyro_sgmcmc": __version__,
        "version of NumPyro": numpyro.__version__,
        "version of JAX": jax.__version__,
        "version of Python": ".".join(platform.python_version_tuple()[:2]),
    }


def check_same_run(
    stored: Mapping[str, str], current: Mapping[str, str], folder: Any, args: tuple
) -> None:
    """Check that a stored run is the one to resume."""
    if args and is_prng_key(args[0]) and stored != current:
        raise InvalidArgumentError(
            "`resume` got a key as its first argument.",
            "leave the key out, because the run continues with the key that it has stored.",
            "resume-key",
        )
    names = [n for n in {**stored, **current} if stored.get(n) != current.get(n)]
    if names:
        differences = "; ".join(
            f"{n} was {shorten_text(stored.get(n, 'absent'))} and is now "
            f"{shorten_text(current.get(n, 'absent'))}"
            for n in names
        )
        raise InvalidArgumentError(
            f"The run in '{folder}' cannot be resumed: {differences}.",
            "call `resume` with the same kernel, settings, model, data and versions as the run, or "
            "start a run in another folder.",
            "resume-differs",
        )


def shorten_text(text: str) -> str:
    """Return a text of at most 80 characters, with a checksum where it is cut."""
    return text if len(text) <= 80 else f"{text[:50]}... ({zlib.crc32(text.encode()):08x})"


def describe(x: Any, depth: int = 0) -> str:
    """Return a value as a short text that is the same in every process.

    Functions are described by their code and closure, other objects by type and attributes.
    """
    if x is None or isinstance(x, (bool, int, float, complex, str, bytes, np.generic)):
        return repr(x)
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return f"key {describe(jax.random.key_data(x))}"
    if is_array(x):
        values = x
        if x.ndim and len(rows := select_checksum_rows(len(x), x.nbytes)) < len(x):
            values = x[rows]
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            values = multihost_utils.process_allgather(values, tiled=True)
        return f"{x.dtype}{tuple(x.shape)} {compute_checksum([values]):08x}"
    name = getattr(x, "__qualname__", None)
    if name is None or depth > _MAX_DESCRIBE_DEPTH:
        name = type(x).__qualname__
    if depth > _MAX_DESCRIBE_DEPTH:
        return name
    inner = partial(describe, depth=depth + 1)
    if isinstance(x, (list, tuple, set, frozenset)):
        parts = map(inner, x) if isinstance(x, (list, tuple)) else sorted(map(inner, x))
        return f"{type(x).__name__}({', '.join(parts)})"
    if isinstance(x, Mapping):
        return f"{{{', '.join(f'{inner(k)}: {inner(v)}' for k, v in x.items())}}}"
    if isinstance(x, partial):
        return f"partial({inner(x.func)}, {inner(x.args)}, {inner(x.keywords)})"
    if is_dataclass(x) and not isinstance(x, type):
        return f"{name}({', '.join(f'{f.name}={inner(getattr(x, f.name))}' for f in fields(x))})"
    if hasattr(x, "__func__"):
        return f"{inner(x.__self__)}.{inner(x.__func__)}"
    if isinstance(code := getattr(x, "__code__", None), CodeType):
        # A cell that is not filled yet equals an empty one.
        cells = [c.cell_contents for c in x.__closure__ or () if c != CellType()]
        values = (cells, x.__defaults__, x.__kwdefaults__)
        return f"{name} {_compute_code_checksum(code):08x} {inner(values)}"
    if isinstance(x, (type, ModuleType)) or not hasattr(x, "__dict__"):
        return name
    class_name = type(x).__qualname__
    if isinstance(x, Distribution):
        # Its parameters, without values that it has computed since.
        parameters = {
            n: value
            for n, value in sorted(vars(x).items())
            if n != "_validate_args" and not isinstance(getattr(type(x), n, None), lazy_property)
        }
        return f"{class_name}({inner(parameters)})"
    attributes = {k: v for k, v in vars(x).items() if not k.startswith("__")}
    function = getattr(x, "__wrapped__", type(x).__call__) if callable(x) else None
    return f"{class_name}({inner(attributes)}) {inner(function)}"


def _compute_code_checksum(code: CodeType) -> int:
    """Return a checksum of what a function does, wherever it is in its file."""

    def describe_constant(c: Any) -> Any:
        if isinstance(c, CodeType):
            return _compute_code_checksum(c)
        return sorted(map(repr, c)) if isinstance(c, frozenset) else repr(c)

    parts = [describe_constant(c) for c in code.co_consts], code.co_names
    return zlib.crc32(code.co_code + repr(parts).encode())


def _combine_over_processes(text: str) -> str:
    """Return a checksum of the texts of all processes, which have different rows."""
    if jax.process_count() == 1:
        return text
    checksum = np.uint32(zlib.crc32(text.encode()))
    checksums = multihost_utils.process_allgather(checksum)
    return f"{zlib.crc32(checksums.tobytes()):08x} of all processes"
