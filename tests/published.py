"What the tests share that is computed from the published results, once for each test run"

from pathlib import Path

import pytest

RESULTS = Path(__file__).resolve().parents[1] / 'results'


@pytest.fixture(scope='session')
def published_results():
    "The published results of all studies; files, parts, verdicts and exhibits are kept once they are there"
    from reinit_nb.report.page import present_studies

    return present_studies(RESULTS, 'laptop')


@pytest.fixture(scope='session')
def scorecard(published_results):
    "All claims as judged by the published results"
    from reinit_nb.claims.scorecard import judge_claims

    return judge_claims(published_results)


@pytest.fixture(scope='session')
def report_messages():
    "What was said while the report was written"
    return []


@pytest.fixture(scope='session')
def report_file(tmp_path_factory, published_results, report_messages):
    "The report on the published results"
    from reinit_nb.report.html import write_page
    from reinit_nb.report.page import results_page

    html = results_page(published_results, say=report_messages.append)
    return write_page(tmp_path_factory.mktemp('report') / 'report.html', html)
