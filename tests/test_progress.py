"""The display of the warm-up's progress."""

import io

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
