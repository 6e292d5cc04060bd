"""The display of the progress of warm-up and of passes over the data."""

import io
import warnings

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

from numpyro_sgmcmc import HostArray, SGHMCSplit, bias_report, log_likelihood, progress
from numpyro_sgmcmc.progress import ProgressReporter, _open_bar


def open_log(**options):
    """Return a reporter that writes to a log file without delay, and the file."""
    file = io.StringIO()
    bar = _open_bar(0.0, file=file, miniters=0, bar_format="{desc} {elapsed}{postfix}", **options)
    return ProgressReporter(bar), file


def test_stages_are_shown_in_a_log_file():
    reporter, file = open_log()
    for stage in ("variational fit", "other modes, fit 2 of 15"):
        reporter.begin_stage(stage)
        assert stage in file.getvalue()


def test_remaining_time_is_shown_up_to_the_total_only():
    reporter, file = open_log()
    reporter.set_total(10)
    reporter.begin_stage("pilot chains")
    reporter.advance(5)
    assert "left" in file.getvalue()
    shown = len(file.getvalue())
    reporter.advance(6)
    assert "pilot chains" in file.getvalue()[shown:]
    assert "left" not in file.getvalue()[shown:]


def test_short_work_shows_nothing_in_a_log_file():
    file = io.StringIO()
    reporter = ProgressReporter(_open_bar(60.0, file=file, miniters=0))
    reporter.begin_stage("pilot chains")
    reporter.advance(1)
    assert not file.getvalue()


@pytest.mark.parametrize("chain_method", ["sequential", "vectorized"])
@pytest.mark.parametrize("is_shown", [True, False])
def test_runs_without_a_progress_bar_show_nothing(is_shown, chain_method):
    file = io.StringIO()

    class Kernel(SGHMCSplit):
        def init(self, *args, **kwargs):
            reporter = ProgressReporter(_open_bar(0.0, file=file, miniters=0))
            reporter.begin_stage("pilot chains")
            raise InterruptedError

    chains = {"num_chains": 2, "chain_method": chain_method}
    mcmc = MCMC(Kernel(lambda: None), num_warmup=1, num_samples=1, **chains)
    mcmc.progress_bar = is_shown  # NumPyro switches it off in parallel tests
    with pytest.raises(InterruptedError):
        mcmc.run(jax.random.key(0))
    assert bool(file.getvalue()) == is_shown


@pytest.fixture(scope="module")
def run_on_disk():
    """Return a short run on rows that are read from a source on the host."""

    def model(y, batch_size=None):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

    settings = {"num_steps": 2, "step_size": 0.1, "gradient_estimator": "minibatch"}
    kernel = SGHMCSplit(model, adapt_mass_matrix=False, subsampling="shuffled", **settings)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=20, progress_bar=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # toy sizes cause warnings
        mcmc.run(jax.random.key(0), HostArray(np.zeros(100, np.float32)), batch_size=10)
    return mcmc


@pytest.mark.parametrize("is_shown", [True, False])
@pytest.mark.parametrize(
    "diagnose",
    [lambda run: bias_report(run, full_data=True, num_draws=2), log_likelihood],
    ids=["bias_report", "log_likelihood"],
)
def test_diagnostics_of_runs_without_a_progress_bar_show_nothing(
    run_on_disk, diagnose, is_shown, monkeypatch
):
    opened = []

    def open_bar(**options):
        opened.append(options["desc"])
        return progress.tqdm(disable=True)

    monkeypatch.setattr(progress, "tqdm_auto", open_bar)
    monkeypatch.setattr(run_on_disk, "progress_bar", is_shown)
    # The setting is that of this run, and not of another one with its name in a calling function.
    mcmc = MCMC(SGHMCSplit(lambda: None), num_warmup=1, num_samples=1)
    mcmc.progress_bar = not is_shown
    diagnose(run_on_disk)
    assert bool(opened) == is_shown
