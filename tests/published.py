"What the tests share that is computed from the published results, once for each test run"

from pathlib import Path

import pytest

RESULTS = Path(__file__).resolve().parents[1] / 'results'


@pytest.fixture(scope='session')
def scorecard():
    "All claims as judged by the published results"
    from reinit_nb.claims.scorecard import judge_claims

    return judge_claims(RESULTS)


@pytest.fixture(scope='session')
def report_messages():
    "What was said while the report was written"
    return []


@pytest.fixture(scope='session')
def report_file(tmp_path_factory, report_messages):
    "The report on the published results"
    from reinit_nb.report.page import write_report

    return write_report(RESULTS, tmp_path_factory.mktemp('report') / 'report.html', say=report_messages.append)
