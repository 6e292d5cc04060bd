r"""Fisher metric of a simplex, in coordinates in which it is diagonal.

The expanded mean: real numbers :math:`t_k` with :math:`\pi_k = |t_k| / \sum_j |t_j|` and
:math:`|t_k| \sim \mathrm{Gamma}(\alpha_k, 1)`, so that :math:`\pi \sim
\mathrm{Dirichlet}(\alpha)`. The inverse metric is diag(:math:`|t|`), and SGRLD's drift

.. math:: \operatorname{sign}(t_k)\bigl(\alpha_k - |t_k|\bigr)
    + |t_k|\,\partial_{t_k}\log p(y \mid \pi)

has no pole at zero, whatever :math:`\alpha`. The reference reflects a step that ends below zero.
Here the density is even in t, which is equivalent: the chain's :math:`|t|` is the reflected one.

Reference: Patterson and Teh (2013), *Stochastic gradient Riemannian Langevin dynamics on the
probability simplex*, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample
from numpyro.infer.reparam import Reparam

from numpyro_sgmcmc.errors import InvalidArgumentError, InvalidModelError, describe_value

__all__ = ["ExpandedMean", "MirroredGamma", "expanded_mean"]

_MIN_MAGNITUDE = 1e-30  # lower bound of |t|, so that its inverse is finite in float32
_MIRRORED_SITE_SUFFIX = "_mirrored"


class MirroredGamma(dist.Distribution):
    """Gamma distribution of scale one with a random sign, on the real line.

    :param concentration: concentration of the gamma distribution, positive.
    :param validate_args: whether to check parameters and values. Default: NumPyro's setting.
    """

    arg_constraints: ClassVar = {"concentration": constraints.positive}
    support = constraints.real
    reparametrized_params: ClassVar = ["concentration"]

    def __init__(self, concentration: Any, *, validate_args: bool | None = None) -> None:
        self.concentration = jnp.asarray(concentration, jnp.result_type(float))
        super().__init__(jnp.shape(concentration), validate_args=validate_args)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        size_key, sign_key = random.split(key)
        shape = sample_shape + self.batch_shape
        size = dist.Gamma(self.concentration, 1.0).sample(size_key, sample_shape)
        return random.rademacher(sign_key, shape, size.dtype) * jnp.maximum(size, _MIN_MAGNITUDE)

    @validate_sample
    def log_prob(self, value: Array) -> Array:
        size = jnp.maximum(jnp.abs(value), _MIN_MAGNITUDE)
        a = self.concentration
        return (a - 1.0) * jnp.log(size) - size - jax.scipy.special.gammaln(a) - jnp.log(2.0)

    @property
    def mean(self) -> Array:
        return jnp.zeros(self.batch_shape)

    @property
    def variance(self) -> Array:
        return self.concentration * (self.concentration + 1.0)


class ExpandedMean(Reparam):
    """Expanded-mean reparametrisation of a Dirichlet site, for :func:`numpyro.handlers.reparam`.

    The site ``name`` becomes deterministic. A latent site ``name_mirrored`` takes its place, with a
    real number for each entry. The metric of this site is :func:`expanded_mean`.

    :raises ValueError: for a site that is observed, or has another distribution.

    .. doctest::

        >>> from numpyro_sgmcmc import SGRLD
        >>> def model():
        ...     numpyro.sample("shares", dist.Dirichlet(jnp.full(3, 0.5)))
        >>> expanded = numpyro.handlers.reparam(model, config={"shares": ExpandedMean()})
        >>> kernel = SGRLD(expanded, inverse_metric=expanded_mean("shares"))
    """

    def __call__(self, name: str, fn: Any, obs: Any) -> tuple[None, Array]:
        fn, expand_shape, event_dim = self._unwrap(fn)
        if not isinstance(fn, dist.Dirichlet) or obs is not None:
            reason = f"has distribution {type(fn).__name__}" if obs is None else "is observed"
            raise InvalidModelError(
                f"ExpandedMean cannot reparametrise site '{name}', which {reason}.",
                "use ExpandedMean only for latent sites with a Dirichlet distribution.",
                "expanded-mean",
            )
        mirrored = self._wrap(MirroredGamma(fn.concentration).to_event(1), expand_shape, event_dim)
        size = jnp.maximum(
            jnp.abs(numpyro.sample(name + _MIRRORED_SITE_SUFFIX, mirrored)), _MIN_MAGNITUDE
        )
        return None, size / size.sum(-1, keepdims=True)


def expanded_mean(*names: str) -> Callable[[Mapping[str, Array]], dict[str, Any]]:
    """Return the Fisher metric of simplex sites, for ``inverse_metric`` of a Riemannian kernel.

    The inverse metric is diag(:math:`|t|`) for sites t reparametrised by :class:`ExpandedMean`, and
    1 for all others. With ``adapt_mass_matrix=False`` it is that of Patterson and Teh (2013), whose
    step size is twice the h of this package. Otherwise the mass matrix multiplies it.

    :param names: names of the Dirichlet sites in the model.
    :return: function of the unconstrained values by site.
    :raises ValueError: if the model has no such site, or the site is not reparametrised.
    """
    if not names or not all(isinstance(n, str) for n in names):
        raise InvalidArgumentError(
            f"`names` of expanded_mean is {describe_value(names)}, but must be names of sites.",
            "pass the names of Dirichlet sites.",
            "expanded-mean",
        )
    name_by_mirrored_site = {n + _MIRRORED_SITE_SUFFIX: n for n in names}

    def inverse_metric(position: Mapping[str, Array]) -> dict[str, Any]:
        for site, name in name_by_mirrored_site.items():
            if site not in position:
                raise InvalidArgumentError(
                    f"expanded_mean('{name}') needs the latent site '{site}', which is missing.",
                    f"use numpyro.handlers.reparam(model, config={{'{name}': ExpandedMean()}}).",
                    "expanded-mean",
                )
        return {
            site: jnp.maximum(jnp.abs(x), _MIN_MAGNITUDE) if site in name_by_mirrored_site else 1.0
            for site, x in position.items()
        }

    return inverse_metric
