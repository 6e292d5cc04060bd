"""The options: declared once, shown in every kernel's signature, checked and converted."""

import inspect
import re
import typing
from dataclasses import fields

import numpy as np
import pytest
from numpyro.infer.mcmc import MCMCKernel

import numpyro_sgmcmc
from numpyro_sgmcmc import SGHMC, SGHMCSplit
from numpyro_sgmcmc.errors import InvalidArgumentError
from numpyro_sgmcmc.sampling.kernel import SGMCMCKernel
from numpyro_sgmcmc.sampling.kernels import RiemannianKernel
from numpyro_sgmcmc.sampling.options import KernelOptions, Options

KERNELS = [
    x for x in vars(numpyro_sgmcmc).values() if isinstance(x, type) and issubclass(x, MCMCKernel)
]
OPTION_NAMES = [field.name for field in fields(Options)]
RECIPE_FUNCTIONS = dict.fromkeys(("diffusion", "curl", "hamiltonian"), abs)


def make_kernel(kernel_class, **options):
    required = RECIPE_FUNCTIONS if kernel_class is numpyro_sgmcmc.RecipeKernel else {}
    return kernel_class(lambda: None, **required, **options)


def documented_parameters(cls):
    return re.findall(r":param (?:\w+ )?(\w+):", inspect.getdoc(cls))


def test_kernel_options_types_equal_options():
    assert typing.get_type_hints(KernelOptions) == typing.get_type_hints(Options)


def test_options_docstring_describes_every_option_in_order():
    assert documented_parameters(Options) == OPTION_NAMES


@pytest.mark.parametrize("kernel_class", [*KERNELS, RiemannianKernel, SGMCMCKernel])
def test_kernel_signature_shows_every_option(kernel_class):
    parameters = inspect.signature(kernel_class).parameters
    assert list(parameters)[-len(OPTION_NAMES) :] == OPTION_NAMES
    for field in fields(Options):
        assert parameters[field.name].default is field.default


@pytest.mark.parametrize("kernel_class", KERNELS)
def test_kernel_docstring_describes_own_parameters_and_links_to_the_shared_ones(kernel_class):
    own = list(inspect.signature(kernel_class).parameters)[: -len(OPTION_NAMES)]
    if kernel_class is SGHMCSplit:
        assert documented_parameters(kernel_class) == [*own, "options"]
        assert "numpyro_sgmcmc.kernel.Options" in inspect.getdoc(kernel_class)
    else:
        shared = ["model", "potential_fn"]
        assert [*shared, *documented_parameters(kernel_class)] == [*own, "options"]
        assert "numpyro_sgmcmc.SGHMCSplit" in inspect.getdoc(kernel_class)


@pytest.mark.parametrize("kernel_class", KERNELS)
def test_default_integrator_is_the_first_and_shown_in_the_signature(kernel_class):
    first = kernel_class.integrators[0]
    assert inspect.signature(kernel_class).parameters["integrator"].default == first
    assert make_kernel(kernel_class).integrator == first


def test_user_kernel_signature_shows_options_and_suggests_keywords():
    class UserKernel(SGHMC):
        def __init__(self, model, friction=2.0, **options):
            super().__init__(model, friction=friction, **options)

    own = ["model", "friction", "integrator"]
    assert list(inspect.signature(UserKernel).parameters) == [*own, *OPTION_NAMES]
    assert not make_kernel(UserKernel).dynamics.has_default_settings
    with pytest.raises(TypeError, match=r"UserKernel.*'stepsize'.*'step_size'"):
        UserKernel(lambda: None, stepsize=0.1)


@pytest.mark.parametrize(
    ("keyword", "fix"),
    [
        ("gradient", "did you mean 'gradient_estimator'"),
        ("sd_bias", "did you mean 'target_sd_bias'"),
        ("max_norm", "did you mean 'max_grad_norm'"),
        ("clip", "use one of .*friction, integrator, .*max_grad_norm, "),
        ("target_accept_prob", "target_sd_bias"),
        ("batch_size", "subsample_size of the plate"),
        ("num_samples", "pass it to MCMC"),
    ],
)
def test_unknown_keyword_names_the_option_to_use(keyword, fix):
    with pytest.raises(TypeError, match=rf"SGHMCSplit.*'{keyword}'.* Fix: .*{fix}"):
        SGHMCSplit(lambda: None, **{keyword: 1})


@pytest.mark.parametrize("value", [80, 1, 1.0, 0, -0.1, float("nan"), "0.1", None, True])
def test_target_sd_bias_that_is_no_relative_bias_raises(value):
    with pytest.raises(InvalidArgumentError, match=r"`target_sd_bias`.*\(0, 1\)"):
        SGHMCSplit(lambda: None, target_sd_bias=value)
    assert Options(target_sd_bias=np.float32(0.5)).target_sd_bias == 0.5


@pytest.mark.parametrize("kernel_class", KERNELS)
def test_kernel_defaults_are_those_the_step_sizes_are_tuned_for(kernel_class):
    for integrator in kernel_class.integrators:
        dynamics = make_kernel(kernel_class, integrator=integrator).dynamics
        assert 0 < dynamics.integrators[integrator].step_size < 1
        has_defaults = kernel_class is not numpyro_sgmcmc.RecipeKernel
        assert dynamics.has_default_settings == has_defaults


@pytest.mark.parametrize(
    ("kernel_name", "settings"),
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
def test_has_default_settings_with_other_settings_is_false(kernel_name, settings):
    kernel_class = getattr(numpyro_sgmcmc, kernel_name)
    assert not make_kernel(kernel_class, **settings).dynamics.has_default_settings


def test_kernel_settings_contain_every_argument():
    kernel = numpyro_sgmcmc.SGRHMC(abs, num_steps=3, noise_compensation=True)
    own = {"model", "potential_fn", "dynamics", "integrator", "inverse_metric"}
    assert set(kernel.settings) == own | set(OPTION_NAMES)
    assert kernel.settings["model"] is abs
    assert kernel.settings["num_steps"] == 3
    assert kernel.settings["subsampling"] == "iid"


def gibbs_fn(rng_key, gibbs_sites, hmc_sites, rows):
    return gibbs_sites


GIBBS = {"gibbs_fn": gibbs_fn, "gibbs_sites": ["z"]}
SITES = {"collect_sites": ["mu"]}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"gibbs_sites": None}, "gibbs_sites"),
        ({"gibbs_sites": 3}, "gibbs_sites"),
        ({"gibbs_sites": "z", "gibbs_fn": gibbs_fn}, "gibbs_sites"),
        ({"gibbs_sites": ["z"]}, "gibbs_fn"),
        ({"collect_local_sites": None}, "collect_local_sites"),
        ({"collect_local_sites": [1]}, "collect_local_sites"),
        ({**GIBBS, "num_gibbs_sweeps": 2}, "num_gibbs_sweeps.*keep_locals"),
        ({**GIBBS, "num_gibbs_sweeps": 0, "keep_locals": False}, "num_gibbs_sweeps"),
        ({"keep_locals": False}, "keep_locals.*gibbs_fn"),
        ({**GIBBS, "keep_locals": False, "collect_local_sites": True}, "collect_local_sites"),
        ({**GIBBS, "keep_locals": None}, "keep_locals"),
        ({"collect_sites": "mu"}, "`collect_sites` is 'mu'.*list of site names"),
        ({"collect_sites": []}, "`collect_sites`.*list of site names"),
        ({"collect_sites": [1]}, "`collect_sites`.*list of site names"),
        ({**SITES, "running_covariances": None}, "`running_covariances`.*list of site names"),
        ({**SITES, "running_quantiles": 0.5}, "`running_quantiles`.*list of probabilities"),
        ({**SITES, "running_quantiles": [0.5, 1.0]}, r"`running_quantiles`.*\(0, 1\)"),
        ({**SITES, "running_quantiles": [0.5], "step_size": lambda i: 0.1}, "schedule"),
        ({"running_quantiles": [0.5]}, "need `collect_sites`"),
        ({"running_covariances": ["mu"]}, "need `collect_sites`"),
        ({"shrink_step_size_on_divergence": "no"}, "shrink_step_size_on_divergence"),
    ],
)
def test_options_of_sites_and_step_size_out_of_range_raise(options, match):
    with pytest.raises(ValueError, match=match):
        SGHMCSplit(lambda: None, **options)


def test_options_accept_numpy_bools_and_collections_of_names():
    options = Options(
        **{**GIBBS, "gibbs_sites": np.array(["z"])},
        collect_local_sites=np.True_,
        collect_sites=np.array(["mu", "sd"]),
        running_quantiles=np.array([0.1, 0.9]),
        dense_mass=np.False_,
    )
    assert options.gibbs_sites == ("z",)
    assert options.collect_sites == ("mu", "sd")
    assert options.running_quantiles == (0.1, 0.9)
    assert options.collect_local_sites is True
    assert options.dense_mass is False


@pytest.mark.parametrize(
    ("options", "num_sweeps"),
    [({}, None), ({"keep_locals": False}, 1), ({"keep_locals": False, "num_gibbs_sweeps": 3}, 3)],
)
def test_gibbs_config_has_sweeps_only_without_kept_locals(options, num_sweeps):
    assert Options(**GIBBS, **options).gibbs_config.num_sweeps == num_sweeps


@pytest.mark.parametrize(
    ("options", "can_shrink"),
    [
        ({}, False),
        ({"step_size": 0.1}, True),
        ({"step_size": 0.1, "adapt_step_size": False}, True),
        ({"step_size": 0.1, "shrink_step_size_on_divergence": False}, False),
        ({"step_size": lambda i: 0.1}, False),
    ],
)
def test_user_step_size_can_shrink_unless_it_is_a_schedule_or_the_option_is_off(
    options, can_shrink
):
    assert Options(**options).can_shrink_user_step_size is can_shrink
