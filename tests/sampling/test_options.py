"""An option is written once: what is written elsewhere says the same."""

import inspect
import re
import typing
from dataclasses import fields

import pytest
from numpyro.infer.mcmc import MCMCKernel

import numpyro_sgmcmc
from numpyro_sgmcmc.sampling.kernel import SGMCMCKernel
from numpyro_sgmcmc.sampling.kernels import RiemannianKernel
from numpyro_sgmcmc.sampling.options import KernelOptions, Options

KERNELS = [
    x for x in vars(numpyro_sgmcmc).values() if isinstance(x, type) and issubclass(x, MCMCKernel)
]
NAMES = [field.name for field in fields(Options)]
FUNCTIONS = dict.fromkeys(("diffusion", "curl", "hamiltonian"), abs)  # of RecipeKernel


def made(kernel, **options):
    own = FUNCTIONS if kernel is numpyro_sgmcmc.RecipeKernel else {}
    return kernel(lambda: None, **own, **options)


def test_type_checkers_see_the_options():
    assert typing.get_type_hints(KernelOptions) == typing.get_type_hints(Options)


def test_every_option_is_described_in_its_place():
    assert re.findall(r":param (\w+):", Options.__doc__) == NAMES


@pytest.mark.parametrize("kernel", [*KERNELS, RiemannianKernel, SGMCMCKernel])
def test_help_shows_every_keyword(kernel):
    parameters = inspect.signature(kernel).parameters
    assert list(parameters)[-len(NAMES) :] == NAMES
    for field in fields(Options):
        assert parameters[field.name].default is field.default
    described = re.findall(r":param (?:\w+ )?(\w+):", inspect.getdoc(kernel))
    assert described == list(parameters)


def test_a_kernel_of_the_users_own():
    class Mine(numpyro_sgmcmc.SGHMC):
        """Mine.

        :param friction: friction.
        :param options: all the others,
            and they are legion.
        """

        def __init__(self, model, friction=2.0, **options):
            super().__init__(model, friction=friction, **options)

    assert list(inspect.signature(Mine).parameters) == ["model", "friction", *NAMES]
    assert inspect.getdoc(Mine).startswith("Mine.\n\n:param model:")
    assert "legion" not in inspect.getdoc(Mine)
    assert not made(Mine).dynamics.has_default_settings
    with pytest.raises(TypeError, match=r"Mine.*'stepsize'; did you mean 'step_size'\?"):
        Mine(lambda: None, stepsize=0.1)


@pytest.mark.parametrize("kernel", KERNELS)
def test_step_sizes_suit_the_kernels_own_defaults(kernel):
    for scheme in kernel.integrators:
        dynamics = made(kernel, integrator=scheme).dynamics
        assert 0 < dynamics.integrators[scheme].step_size < 1
        is_known = kernel is not numpyro_sgmcmc.RecipeKernel
        assert dynamics.has_default_settings == is_known


@pytest.mark.parametrize(
    ("kernel", "settings"),
    [
        ("SGHMCSplit", {"friction": 1.0}),
        ("SHMC", {"integrator": "lie_trotter", "num_leapfrog": 5}),
        ("SGNHT", {"per_coordinate": False}),
        ("SGMGT", {"a": 2.0}),
        ("SGMGT", {"momentum_period": None}),
        ("SGLaplaceHMC", {"c": 2}),
        ("SGRHMC", {"momentum_period": 3}),
    ],
)
def test_other_settings_are_noticed(kernel, settings):
    kernel = getattr(numpyro_sgmcmc, kernel)
    assert not made(kernel, **settings).dynamics.has_default_settings


def test_settings_name_all_that_was_chosen():
    kernel = numpyro_sgmcmc.SGRHMC(abs, num_steps=3, noise_compensation=True)
    own = {"model", "potential_fn", "dynamics", "integrator", "inverse_metric_fn"}
    assert set(kernel.settings) == own | set(NAMES)
    assert kernel.settings["model"] is abs
    assert kernel.settings["num_steps"] == 3
    assert kernel.settings["subsampling"] == "iid"
