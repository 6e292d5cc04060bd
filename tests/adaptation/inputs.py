"""Inputs of the warm-up for tests of single stages."""

from numpyro.infer import init_to_uniform

from numpyro_sgmcmc import SGHMCSplit
from numpyro_sgmcmc.adaptation.settings import WarmupInputs
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.subsampled import get_model_potential
from numpyro_sgmcmc.sampling.options import build_warmup_settings


def make_inputs(model, args, batch_size, kernel_class=SGHMCSplit, **options):
    """Return the inputs with which a kernel would start the warm-up."""
    arguments = Arguments(args, {"batch_size": batch_size})
    potential = get_model_potential(model, arguments, init_to_uniform)
    kernel = kernel_class(model, **options)
    settings = build_warmup_settings(kernel.options, potential, kernel.dynamics, kernel.integrator)
    return WarmupInputs.create(potential, arguments, settings)
