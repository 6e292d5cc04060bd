"""The display of the warm-up's progress."""

import io

import jax
import pytest
from numpyro.infer import MCMC

from numpyro_sgmcmc import SGHMCSplit
from numpyro_sgmcmc.progress import ProgressReporter, _open_bar


def open_log(**options):
    """Return a reporter that writes to a log file without delay, and the file."""
    file = io.StringIO()
    bar = _open_bar(0.0, file=file, miniters=0, bar_format="{desc} {elapsed}{postfix}", **options)
    return ProgressReporter(bar), file


def test_stages_are_shown_in_a_log_file():
    progress, file = open_log()
    for stage in ("variational fit", "other modes, fit 2 of 15"):
        progress.begin_stage(stage)
        assert stage in file.getvalue()


def test_remaining_time_is_shown_up_to_the_total_only():
    progress, file = open_log()
    progress.set_total(10)
    progress.begin_stage("pilot chains")
    progress.advance(5)
    assert "left" in file.getvalue()
    shown = len(file.getvalue())
    progress.advance(6)
    assert "pilot chains" in file.getvalue()[shown:]
    assert "left" not in file.getvalue()[shown:]


def test_short_work_shows_nothing_in_a_log_file():
    file = io.StringIO()
    progress = ProgressReporter(_open_bar(60.0, file=file, miniters=0))
    progress.begin_stage("pilot chains")
    progress.advance(1)
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
