"Outcomes and their parts; claims come out either way: made-up results in which each holds, fails and does neither"
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest

from reinit_nb.claims.scorecard import all_claims, judge
from reinit_nb.claims.verdict import (
    Claim,
    Effect,
    Part,
    Rule,
    claim_rules,
    decide,
    fact,
    judge_claim,
    parts_table,
    rule_text,
    seed_effect,
    share_effect,
    weakest_part,
    worst_verdict,
)
from reinit_nb.core import ReinitError
from reinit_nb.cover import cover_probability
from reinit_nb.reinit import PAPER_METHODS
from reinit_nb.stats import mean_interval, seeds_for_width, seeds_needed
from reinit_nb.store import paper_table
from reinit_nb.studies.spectra import flatness_pairs
from reinit_nb.studies.synthetic import L2_PENALTIES, PENALTY_FACTOR


@pytest.fixture
def rng(): return np.random.default_rng(0)

def verdicts(id, *tables, scale='laptop', **kw):
    "The verdict of a claim for each of several made-up results"
    return ''.join(judge(id, *(t if isinstance(t, tuple) else (t,)), scale=scale, **kw).verdict for t in tables)

def exact(k, n):
    ci = binomtest(k, n).proportion_ci(method='exact')
    return ci.low, ci.high

# ---------------------------------------------------------------- outcomes, parts and rules

@pytest.mark.parametrize('lo, hi, more, less, tie', [
    (.1, 5, '✅', '❌', '✅'),
    (-5, -.1, '❌', '✅', '❌'),
    (-.9, -.1, '❌', '✅', '✅'),      # behind, but by less than δ: a tie
    (-1, 1, '≈', '≈', '✅'),
    (-.2, .3, '≈', '≈', '✅'),
    (-.2, 1.1, '?', '?', '✅'),
    (-1.1, .2, '?', '?', '?'),
    (-3, 3, '?', '?', '?'),
    (0, .5, '≈', '≈', '✅'),           # an end on the null does not exclude it
    (0, 0, '≈', '≈', '✅'),
    (np.nan, np.nan, '?', '?', '?')])
def test_outcomes_of_an_interval(lo, hi, more, less, tie):
    assert decide(lo, hi, delta=1) == more
    assert decide(lo, hi, delta=1, direction=-1) == less
    assert decide(lo, hi, delta=1, tie=True) == tie
    assert decide(50 + lo, 50 + hi, null=50, delta=1) == more              # the null may be anywhere
    assert decide(-hi, -lo, delta=1, direction=-1) == more                 # and the effect be turned round
    assert decide(lo, hi) == {'≈': '?'}.get(more, more)                    # without δ nothing is equivalent

def test_a_claim_is_as_strong_as_its_weakest_part():
    assert [worst_verdict(o) for o in ('✅≈?❌', '✅≈?', '✅≈', '✅')] == ['❌', '?', '≈', '✅']
    def part(name, lo, hi, **kw): return Part(Rule(name, delta=1., **kw), Effect((lo + hi) / 2, lo, hi, 3))
    up, flat, open_, down = part('up', 1, 3), part('flat', -.5, .5), part('open', -2, 3), part('down', -3, -2)
    missing, shown = Part(Rule('missing', delta=1.)), replace(down, rule=replace(down.rule, judged=False))
    for parts, name in (((up, flat), 'flat'), ((up, flat, open_), 'open'), ((flat, open_, down), 'down'),
                        ((up, missing), 'missing'), ((missing, open_), 'open'), ((up, shown), 'up')):
        assert weakest_part(parts).rule.part == name
    assert weakest_part([part('far', 4, 5), up]).rule.part == 'up' and weakest_part([]) is None

def test_the_seed_is_the_unit():
    rows = [dict(seed=s, dataset=d, difference=s + 10 * (d == 'b')) for s in range(4) for d in 'ab']
    e, by_seed = seed_effect(pd.DataFrame(rows)), mean_interval([5, 6, 7, 8])
    assert (e.value, e.lo, e.hi, e.n, e.std) == tuple(by_seed[k] for k in ('mean', 'lo', 'hi', 'n', 'std'))
    assert e.better == 7.5 / 8 and e.middle == np.mean([2, 3, 10, 11])     # of 0 1 2 3 10 11 12 13; a zero counts half
    one = seed_effect(pd.Series([1., 2.]), 100)
    assert one.values == (100, 200) and np.isnan(one.better)               # a single setting
    assert seed_effect(pd.DataFrame(columns=['seed', 'difference'])) is None
    assert np.isnan(seed_effect(pd.Series([1.])).lo)                       # one seed has no interval
    assert seed_effect(pd.Series([.9, 1.]), within=(-1, 1)).hi == 1
    with pytest.raises(ReinitError, match='no difference'): seed_effect(pd.Series([1., np.nan]))

def test_signs_and_seeds_that_would_decide():
    rule = Rule('a − b', delta=1.)
    p = Part(rule, seed_effect(pd.Series([3., 1., 2., -1., 0.])))
    assert p.signs == (3, 1, pytest.approx(.625)) and p.verdict == '?'
    assert p.needed == seeds_needed(p.effect.std, 1) > 5
    assert '3 above and 1 below (p = 0.62)' in p.text
    many = Part(rule, Effect(.5, -.1, 1.1, 40, 1.9))                       # more than detect δ, and still undecided
    assert seeds_needed(1.9, 1) <= 40 < many.needed == seeds_for_width(1.9, 1)
    for decided in (Effect(2, 1, 3, 5, 1.), Effect(0, -.5, .5, 5, 1.)): assert np.isnan(Part(rule, decided).needed)
    for unknown in (None, share_effect(3, 9), fact(None)): assert np.isnan(Part(rule, unknown).needed)
    assert Part(replace(rule, null=2.), p.effect).signs[:2] == (1, 3)      # signs are about the null

def test_facts_and_shares():
    assert [Part(Rule('x', null=np.nan), fact(m)).verdict for m in (True, False, None)] == ['✅', '❌', '?']
    lo, hi = exact(9, 10)
    e = share_effect(9, 10)
    assert (e.value, e.n) == (90, 10) and np.allclose([e.lo, e.hi], [100 * lo, 100 * hi])
    assert share_effect(0, 0) is None

def test_effects_without_a_rule_are_shown_and_parts_without_an_effect_are_open():
    effects = {'a': seed_effect(pd.Series([1., 1.1, .9])), 'c': seed_effect(pd.Series([-9., -9.1, -9.]))}
    claim = Claim('T', 'toy', (), lambda df: effects)
    v = judge_claim(claim, pd.DataFrame(), rules=[Rule('a', delta=.5)])
    assert v.verdict == '✅' and '; not judged: c: −9' in v.measured
    v = judge_claim(claim, pd.DataFrame(), rules=[Rule('a', delta=.5), Rule('b', delta=.5)])
    assert v.verdict == '?' and '? b: not run yet' in v.measured and v.n == 3
    assert list(parts_table([v]).verdict) == ['✅', '?', '']
    assert 'shown, not judged' in v.markdown and v.markdown.startswith('**T ?** undecided:')
    with pytest.raises(ReinitError, match='no rule'):
        judge_claim(claim, pd.DataFrame(), rules=[Rule('a', judged=False)])

def test_a_rule_that_is_newer_than_the_runs_is_marked():
    claim = Claim('T', 'toy', (), lambda df: {'a': seed_effect(df.gain)})
    runs = pd.DataFrame(dict(gain=[1., 2.], date=['2026-11-17T10:00:00+00:00', '2026-11-18T10:00:00+00:00']))
    def old(fixed, revised, runs=runs):
        return judge_claim(claim, runs, rules=[Rule('a', fixed=fixed, revised=revised)]).old_runs
    assert old('2026-11-18', True) and old('2026-11-18', False) and not old('2026-11-17', True)   # the time decides
    assert not old('2026-11-18', True, runs[1:])

def test_rules_in_words():
    r = Rule('a − b', 'test accuracy', delta=.5)
    assert rule_text(r) == ('test accuracy; holds if the 95% interval over seeds lies above 0 points, '
                            'equivalent if within ±0.5 of 0')
    tied = rule_text(replace(r, tie=True, direction=-1))
    assert 'lies below 0.5 points (a tie within 0.5 is enough)' in tied

def test_every_claim_has_complete_rules():
    for c in all_claims().itertuples():
        rules = claim_rules(c.id)
        assert len({r.part for r in rules}) == len(rules) and any(r.judged for r in rules), c.id
        for r in rules:
            assert r.rule and r.fixed[:10] in ('2026-11-16', '2026-11-18') and r.direction in (-1, 1), (c.id, r.part)
            assert np.isnan(r.null) == np.isnan(r.delta) and not r.delta <= 0, (c.id, r.part)
            if np.isnan(r.null): assert 'no interval' in r.rule or r.rule == 'as above', (c.id, r.part)
            if r.over == 'seeds': assert r.seeds >= 3, (c.id, r.part)

def test_few_parts_have_no_interval():
    "Only equalities, counts that are zero or not, choices from a list, and tables of p-values"
    given = [(c, r.part) for c in all_claims().id for r in claim_rules(c) if np.isnan(r.null)]
    assert {c for c, _ in given} == {'R1', 'R3', 'R5', 'Z1', 'Z4', 'Z10', 'C11', 'P7'} and len(given) <= 11

# ---------------------------------------------------------------- R1 to R3: the synthetic study

def table1(rng, means, train=1., noise=.01):
    rows = []
    for (m, v), a, s in product(zip(PAPER_METHODS, means), (.5, 1., 2.), range(5)):
        rows.append({'recipe': f'{m}{a}{s}', 'method': m, 'seed': s, 'round': 1, 'train_acc': train, 'task.alpha': a,
                     'test_acc': v + noise * rng.normal()})
    return pd.DataFrame(rows)

def test_table1(rng):
    good, bad = (.5, .7, .5, .65, .7, .8), (.5, .4, .5, .6, .6, .45)
    for i in ('R1', 'R2'): assert verdicts(i, table1(rng, good), table1(rng, bad)) == '✅❌'
    assert verdicts('R1', table1(rng, good, train=.9)) == '❌'
    tied = (.5, .7, .5, .65, .7, .7)
    assert verdicts('R2', table1(rng, tied), table1(rng, tied, noise=.0005)) == '?✅'   # a tie must be certain

def table5(rng, base, rescaling, lw):
    rows = []
    for (m, accuracies), s in product(dict(BL=base, LW=lw, RS=rescaling).items(), range(5)):
        for p, v in zip(L2_PENALTIES, accuracies):
            rows.append(dict(recipe=f'{m}{p}{s}', method='BL' if m == 'BL' else 'LW', redraw=m != 'RS', rescale=True,
                             seed=s, round=1, l2=PENALTY_FACTOR * p, test_acc=v + .01 * rng.normal()))
    return pd.DataFrame(rows)

def test_table5(rng):
    up, down, late = (.2, .6, .9, .8, .7, .6), (.2, .5, .5, .5, .5, .5), (.2, .4, .5, .5, .7, .6)
    assert verdicts('R3', table5(rng, late, up, up), table5(rng, up, down, up)) == '✅❌'
    assert verdicts('R3', table5(rng, late, up, (.2, .3, .4, .5, .6, .9))) == '❌'   # better, but not with less penalty

# ---------------------------------------------------------------- R4, R5: the printed tables

def test_printed_tables():
    t2 = paper_table('reinit_table2')
    def swap(a, b): return t2.assign(method=t2.method.replace({a: b, b: a}))
    assert verdicts('R4', t2, swap('LW', 'BL'), swap('LW', 'WELS')) == '✅❌?'
    named = np.where(t2.arch == 'vgg16', 'FC', 'LW')
    clear = t2.assign(accuracy=t2.accuracy + 100 * (t2.method == named))
    assert verdicts('R5', t2, swap('LW', 'FC'), clear) == '❌❌✅'   # as printed: a leaf of DSD
    few = t2[(t2.setting == 'none') & t2.dataset.isin(['DOGS', 'CARS196'])]
    assert judge('R4', few).verdict == '?' and 'too few' in judge('R4', few).measured
    with pytest.raises(ReinitError, match='lack a partner: none OXFORD-IIIT'): judge('R4', t2.iloc[1:])

# ---------------------------------------------------------------- R6 to R13: the CNN study

def cnn_runs(rng, lw=.05, seeds=3):
    "Two networks, four datasets; LW is better by `lw` and has larger margins, equal weights and faster rounds"
    rows = []
    archs = ('scnn', 'vgg16')
    for m, d, a, e, s, k in product(archs, 'abcd', (False, True), (', ½', ''), range(seeds), ('BL', 'LW')):
        up = (k == 'LW') * lw
        z = .01 * rng.normal()
        setting = dict(model=m, dataset=d, augment=a, seed=s, method=k + e)
        found = {'test_acc': .3 + up + z, 'train_acc': 1., 'margin': .5 + 5 * up + z, 'size': 2. + z, 'fit_1': 50. + z,
                 'fit_2': 50. - 200 * up + z, 'noise_0.1': .2 - up + z, 'noise_loss_0.1': .4 - up + z}
        rows.append(dict(recipe=f'{m}{d}{a}{e}{s}{k}') | setting | found)
    return pd.DataFrame(rows)

@pytest.mark.filterwarnings('error')
def test_cnn(rng):
    every = [cnn_runs(rng, lw) for lw in (.05, 0., -.05)]
    whole = [d[d.method.isin(('BL', 'LW'))] for d in every]
    for i in ('R6', 'R8', 'R10', 'R13'):
        up, none, down = verdicts(i, *whole)
        assert (up, down) == ('✅', '❌') and none in '≈?', i
    assert verdicts('R7', every[0], every[2]) == '✅❌'
    assert verdicts('R7', whole[0]) == '?'                             # rounds of half the steps were not run
    larger = [whole[0].assign(size=np.where(whole[0].method == 'LW', s, 1.)) for s in (1., 1.05, 2.)]
    assert verdicts('R9', *larger) == '✅✅❌'                          # 5% more is a tie
    for i in ('R6', 'R8', 'R9', 'R10'):
        unfit = judge(i, whole[0].assign(train_acc=.98), scale='laptop')   # not 99%
        assert unfit.verdict == '?' and 'not run yet' in unfit.measured
    for i, name in (('R8', 'LW − LW without reinitialization, smallest tenth'),
                    ('R10', 'the same, from LW without reinitialization')):
        ablated = whole[0][~whole[0].augment].replace(dict(method={'BL': 'no reinitialization'}))
        with_parts, alone = judge(i, whole[0], ablated, scale='laptop'), judge(i, whole[0], scale='laptop')
        shown = {p.rule.part: p for p in with_parts.parts if not p.rule.judged}
        assert shown[name].effect.value == pytest.approx(with_parts.part.effect.value)   # shown, not judged
        assert name not in {p.rule.part for p in alone.parts} and with_parts.part.text == alone.part.text

def ablations(rng, **accuracies):
    accuracies = {'BL': .3, 'LW': .36, 'no reinitialization': .31, 'kept blocks frozen': .33} | accuracies
    rows = []
    for d, s, (k, v) in product('abcd', range(3), accuracies.items()):
        rows.append(dict(model='scnn', dataset=d, augment=False, seed=s, method=k, train_acc=1.,
                         test_acc=v + .005 * rng.normal()))
    return pd.DataFrame(rows)

def test_ablations(rng):
    changes = {}, {'no reinitialization': .40}, {'kept blocks frozen': .40}, {'BL': .40}
    assert verdicts('R11', *(ablations(rng, **o) for o in changes)) == '✅❌❌❌'
    d = ablations(rng)
    unfit = d.assign(train_acc=np.where((d.method == 'kept blocks frozen') & (d.dataset == 'a'), .9, 1.))
    n = {p.rule.part: p.effect.note for p in judge('R11', unfit, scale='laptop').parts}
    counts = {k: int(v.split()[0]) for k, v in n.items()}
    assert (counts['LW − kept blocks frozen'], counts['LW − BL of equal steps']) == (3, 4)   # only where both fit

def settings(rng, gain):
    rows = []
    for d, a, lr, drop, s, k in product('ab', (False, True), (.1, .2), (0., .25), range(3), ('BL', 'LW')):
        base = .3 + .1 * a + .05 * (lr > .1) + .02 * (drop > 0)
        rows.append(dict(dataset=d, augment=a, lr=lr, wd=0., dropout=drop, init='he', seed=s, method=k, train_acc=1.,
                         test_acc=base + (k == 'LW') * gain(base) + .002 * rng.normal()))
    return pd.DataFrame(rows)

def test_settings(rng):
    gains = (lambda b: .2 * (.6 - b)), (lambda b: 0.), (lambda b: -.1 + .1 * b)
    up, none, down = verdicts('R12', *(settings(rng, g) for g in gains))
    assert (up, down) == ('✅', '❌') and none in '≈?'
    unfit = settings(rng, gains[0]).assign(train_acc=.9)
    assert judge('R12', unfit, scale='laptop').n == 3 and verdicts('R12', unfit) == '?'

# ---------------------------------------------------------------- C1 to C11: frozen layers

_FIELDS = dict(base=64, repeats=2, scale=2., position='alternating', skip=False, regularizer='none')

def freezing_gap(dataset, changed, gap, collapses):
    "Accuracy of trained networks, and what freezing adds, where the claims hold"
    r = _FIELDS | changed
    deep = r['repeats'] >= 5 and not r['skip'] and collapses
    up = 0. if dataset == 'mnist' or r['regularizer'] != 'none' else gap
    if 'base' in changed: up = gap * (np.log2(r['base']) - 5)
    if r['position'] == 'front': up = -gap
    if deep: up = 4 * gap
    if r['skip']: up = gap
    return 40. - 25 * deep, up

def freezing(rng, gap=5., noise=.3, collapses=True, n=6, flip=1):
    "Runs of the study: `gap` points for frozen networks where the claims say so"
    sweeps = dict(base=(16, 32, 128), repeats=(1, 4, 5, 8), position=('front',),
                  regularizer=('BatchNorm', 'dropout .1', 'dropout .5'))
    variants = [{}] + [{k: v} for k, vs in sweeps.items() for v in vs] + [dict(repeats=r, skip=True) for r in (5, 8)]
    rows = []
    for ds, o, s, f in product(('cifar10', 'cifar100', 'mnist'), variants, range(n), (0., 1.)):
        level, up = freezing_gap(ds, o, gap, collapses)
        for e in (0, 1, 5, 60):
            acc = (level + flip * up * f + noise * rng.normal()) / 100
            row = {'recipe': f'{ds}{o}{s}{f}', 'seed': s, 'frozen': f, 'epochs': 60, 'epoch': e, 'test_acc': acc,
                   'fit_acc': acc, 'train_acc': acc, 'task.dataset': ds, 'task.classes': None} | _FIELDS | o
            after = flip * gap * f * (e > 0) / 100
            for layer in range(3):
                row[f'sep_test_{layer}'] = .4 - flip * gap * layer / 500 + after + noise * rng.normal() / 100
                row[f'sep_train_{layer}'] = .6 - after + noise * rng.normal() / 100
            rows.append(row)
    return pd.DataFrame(rows)

def test_freezing(rng):
    good, none, bad = freezing(rng), freezing(rng, 0.), freezing(rng, flip=-1)
    for i in ('C1', 'C2', 'C3', 'C4', 'C6', 'C7', 'C8', 'C9'):
        up, neither, down = verdicts(i, good, none, bad)
        assert (up, down) == ('✅', '❌') and neither in '≈?', i
    assert verdicts('C5', good, freezing(rng, collapses=False)) == '✅?'   # survives; no collapse
    assert verdicts('C5', freezing(np.random.default_rng(1), 0.)) == '?'   # both collapse at the same depths
    assert 'R=' in judge('C5', good, scale='laptop').part.effect.note

def test_not_higher_on_mnist_is_a_tie(rng):
    d = freezing(rng)
    up = d.assign(test_acc=d.test_acc + .05 * ((d['task.dataset'] == 'mnist') & (d.frozen == 1)))
    assert verdicts('C1', d, up) == '✅❌'
    part = next(p for p in judge('C1', d, scale='laptop').parts if 'mnist' in p.rule.part)
    assert part.verdict == '✅' and part.effect.lo < 0 < part.effect.hi

def landscape(rng, factor):
    rows = []
    for f, s, e in product((0., 1.), range(5), (10, 60)):
        names = [f'{m}_{k}' for m in ('top', 'trace', 'noise_0.01', 'noise_0.02') for k in ('all', 'base')]
        size = factor if f else 1.
        rows.append(dict(frozen=f, seed=s, epochs=e) | {k: size * (1 + .05 * rng.normal()) for k in names})
    return pd.DataFrame(rows)

def test_landscape(rng):
    up, none, down = verdicts('C10', *(landscape(rng, k) for k in (.5, 1., 2.)))
    assert (up, down) == ('✅', '❌') and none in '≈?'
    half = judge('C10', landscape(rng, .5), scale='laptop').part
    assert abs(half.effect.value + 1) < .2                                 # half as large: minus one power of two

def cover(d, layers='10'):
    "Dichotomies as Cover has them in `d` dimensions, with his probability for 10"
    rows = []
    for n in range(10, 32, 3):
        k = round(200 * cover_probability(n, d))
        lo, hi = exact(k, 200)
        rows.append(dict(layers=layers, N=n, trials=200, separable=k, share=k / 200, lo=lo, hi=hi,
                         P=cover_probability(n, 10)))
    return pd.DataFrame(rows)

def test_cover():
    assert verdicts('C11', cover(10), cover(12), cover(10)[:1]) == '✅❌?'

# ---------------------------------------------------------------- Z1 to Z11: mutually frozen weights

def test_eigenvalues_and_flow():
    one = pd.DataFrame([dict(n=n, eigenvalues='α', formula='α', equal=True, max_error=1e-15, draws=20) for n in (2, 3)])
    assert verdicts('Z1', one, one.assign(equal=[True, False]), one.assign(max_error=.1)) == '✅❌❌'
    def flow(hit, n):
        low, high = exact(hit, n)
        row = dict(n=n, predicted=n // 2, escaped=n // 2, agree=hit / n, low=low, high=high)
        return pd.DataFrame([dict(weights=w, how=h) | row for w in (2, 3, 4) for h in ('flow', 'descent')])
    assert verdicts('Z2', flow(400, 400), flow(10, 10), flow(300, 400)) == '✅?❌'
    assert verdicts('Z2', flow(400, 400)[:5]) == '?'   # one kind was not simulated

def test_decays():
    def decays(share):
        rows = []
        for m, wd, s, e in product(('resnet18', 'allcnn'), (0., 1e-3, 1e-2), range(3), (0, 9)):
            found = max(0., share(wd) + .01 * (s - 1) * (share(wd) > 0))
            rows.append(dict(model=m, wd=wd, seed=s, epoch=e, test_acc=.3 if e else np.nan, share=found if e else 0.))
        return pd.DataFrame(rows)
    shares = (lambda w: 20 * w), (lambda w: .1), (lambda w: 0.), (lambda w: .3 - 20 * w)
    assert verdicts('Z3', *(decays(f) for f in shares[::3])) == '✅❌'
    assert verdicts('Z3', *(decays(f) for f in shares[1:3])) == '≈≈'   # the same, or none, at every decay

def test_pairs(rng):
    def pairs(zero, two, three):
        "Norms that are multiplied by these factors during training"
        rows = []
        starts = ('zero', zero, 1.), ('tiny', 1e-3, two), ('tiny3', 1e-3, three)
        for wd, s, layer, (t, norm, f), e in product((1e-3, 1e-2), range(3), (1, 2), starts, (0, 1)):
            grown = norm * f**e * (1 + .1 * rng.random())
            rows.append(dict(wd=wd, seed=s, epoch=e, layer=layer, treatment=t, norm=grown))
        return pd.DataFrame(rows)
    factors = (0, .1, .1), (0, .1, 10), (0, 10, .1), (.1, .1, .1)
    assert verdicts('Z4', *(pairs(*o) for o in factors)) == '✅❌✅❌'   # row and column alone do not count

def test_sparse(rng):
    def sparse(**accuracies):
        rows = []
        for (k, a), q, s in product((accuracies | dict(none=.5)).items(), (.2, .8), range(3)):
            rows.append(dict(kind=k, q=q, seed=s, test_acc=a + .002 * rng.normal(), sparsity_before=q))
        return pd.DataFrame(rows)
    tables = [sparse(mono=a, double=b, mutual=c) for a, b, c in ((.4, .3, .2), (.3, .3, .2), (.2, .3, .4))]
    up, none, down = verdicts('Z5', *tables)
    assert (up, down) == ('✅', '❌') and none in '≈?'
    worse = tables[0].assign(test_acc=tables[0].test_acc - .5 * ((tables[0].kind == 'mono') & (tables[0].q == .2)))
    assert verdicts('Z5', worse) == '✅'   # mono − double is about the highest level

def test_imagenet():
    counts = (('normalization and columns', 0), ('pairs of consecutive layers', 2))
    rows = pd.DataFrame([dict(rule=r, cutoff=.01, filters=100, frozen=n, double=9 * n, triple=0) for r, n in counts])
    one, other = (rows.assign(network=k) for k in ('Keras ResNet-50', 'torchvision ResNet-18'))
    both = pd.concat([one, other], ignore_index=True)
    assert verdicts('Z10', both, both.assign(frozen=0), one, both.assign(cutoff=.1)) == '✅❌??'
    assert judge('Z10', both).scale == 'paper'

def transfer(accuracies, setting='resnet18', seeds=4, noise=.001):
    "Runs whose accuracy is known"
    rows = []
    for (i, (k, v)), s in product(enumerate(accuracies.items()), range(seeds)):
        rows.append(dict(setting=setting, variant=k, seed=s, test_acc=v + noise * s * (1 if i % 2 else -1)))
    return pd.DataFrame(rows)

def test_decay_and_rate():
    rates = transfer({'0.0005': .4, '0.05': .6, '0.005 → 0.05': .7})
    def decays(none, high, rising, **kw):
        accuracies = {'0': none, '1e-3': high, '1e-4 → 1e-3': rising}
        return pd.concat([transfer(accuracies, k, **kw) for k in ('resnet18', 'allcnn')])
    good, bad, same = decays(.5, .6, .7), decays(.6, .5, .7), decays(.5, .7, .7)
    assert verdicts('Z6', (good, rates), (bad, rates), (same, rates)) == '✅❌≈'
    lacking = judge('Z6', good[good.variant != '0'], rates)
    assert lacking.verdict == '?' and lacking.measured.count('not run yet') == 2

def change(setting, gain, frozen=3., left=-2., train=.1):
    d = transfer(dict(standard=.5, reset=.5 + gain), setting)
    reset = d.variant == 'reset'
    return d.assign(frozen_before=frozen, filters=10, frozen=3. + left * reset + .1 * (d.seed % 2) * reset,
                    train_acc=.8 + train * reset + .001 * d.seed * reset)

def test_reset():
    good = pd.concat([change('a', .1), change('b', .12), change('c', .09)])
    worse = good.assign(variant=good.variant.map(dict(standard='reset', reset='standard')))
    assert verdicts('Z7', good, worse) == '✅❌'
    without = change('d', -.4, frozen=0.)
    assert verdicts('Z7', pd.concat([good, without])) == '✅'   # nothing was frozen there: it does not count
    parts = {p.rule.part: p.verdict for p in judge('Z7', change('a', -.1), scale='laptop').parts if p.rule.judged}
    assert list(parts.values()) == ['✅', '✅', '❌']            # plastic again, and not better
    unmeasured = good.assign(frozen_before=0.), good[good.variant == 'reset']
    assert verdicts('Z7', *unmeasured) == '??'

def test_samples():
    def samples(gains): return pd.concat([change(f, d) for f, d in gains.items()])
    grows, shrinks, stays = {.125: -.1, .5: 0., 1.: .1}, {.125: .2, .5: 0., 1.: .1}, {.125: .1, .5: 0., 1.: .1}
    assert verdicts('Z8', *map(samples, (grows, shrinks, stays))) == '✅❌≈'
    two = samples({.125: -.1, 1.: .1})
    assert verdicts('Z8', samples({1.: .1}), two[two.variant == 'reset']) == '??'

def test_tradeoff():
    rows = [dict(source='decays', setting='resnet18', variant=str(i), seed=s, test_acc=1 - i / 20, test_loss=2 + i,
                 first_frozen=i, fisher=-i) for i in range(12) for s in range(2)]
    line = pd.DataFrame(rows)
    assert verdicts('Z9', line, line.assign(fisher=line.first_frozen), line.assign(first_frozen=0)) == '✅❌?'

def test_warm_starts():
    def starts(rate='0.05', fit=1., **accuracies):
        names = dict(warm='warm', cold='cold', long='cold, as long')
        d = pd.concat([transfer({rate: v}, names[k]) for k, v in accuracies.items()])
        return d.assign(test_loss=1 - d.test_acc, train_acc=fit)
    assert verdicts('Z11', starts(warm=.4, cold=.45, long=.5), starts(warm=.5, cold=.45, long=.4)) == '✅❌'
    assert verdicts('Z11', starts(warm=.4, cold=.4, long=.4)) == '≈'
    unpaired = judge('Z11', starts(warm=.4, cold=.45), scale='laptop')
    assert unpaired.verdict == '?' and 'cold − warm on 10%: not run yet' in unpaired.measured
    holds = starts(warm=.4, cold=.45, long=.5)
    unfit = starts('0.0005', .98, warm=.9, cold=.9, long=.1)
    assert verdicts('Z11', pd.concat([holds, unfit]), unfit) == '✅?'   # only where both learn their images
    half = holds.assign(train_acc=np.where(holds.setting == 'warm', .98, 1.))
    assert verdicts('Z11', half, holds.assign(train_acc=np.where(holds.setting == 'cold', .5, 1.))) == '?✅'

# ---------------------------------------------------------------- F1 to F7: initialization and spectra

def test_depths(rng):
    def depths(up, relu=0.):
        rows = []
        for (k, u), d, s in product(dict(relu=relu, gaussian=up, sine=up).items(), (2, 6), range(5)):
            rows.append(dict(kind=k, depth=d, seed=s, centroid0=1 + d * u + .02 * rng.normal(),
                             error=.2 + .1 * d * u + .01 * rng.normal()))
        return pd.DataFrame(rows)
    assert verdicts('F1', depths(.5), depths(-.5), depths(.5, 1.), depths(.5, .2)) == '✅❌❌❌'
    assert verdicts('F1', depths(0.)) in '≈?'
    unlearned = depths(.5).assign(left=1.)
    assert verdicts('F1', unlearned) == '?'
    assert 'ReLU, deep − shallow, error: not run yet' in judge('F1', unlearned).measured

def test_order():
    def order(tau, noise=.02):
        pairs = product(('relu', 'sine', 'gaussian'), range(3))
        return pd.DataFrame([dict(act=a, seed=s, tau=tau + noise * (s - 1), reached=4) for a, s in pairs])
    assert verdicts('F2', order(.9), order(0., .5), order(-.9)) == '✅?❌'

def test_spike(rng):
    def arms(kept=.9, hurt=.5, spike=.8):
        errors = {'relu he, high': hurt, 'relu he': 0., 'relu he, dc': 0., 'gaussian': hurt, 'gaussian low': 0.,
                  'relu': 0.}
        rows = []
        for (k, u), s in product(errors.items(), range(5)):
            spiked = spike * (k == 'relu he, high')
            rows.append(dict(kind=k, seed=s, error=.2 + u + .02 * rng.normal(), spike0=spiked + .02 * rng.random(),
                             spike1=spiked * kept + .01 * rng.random()))
        return pd.DataFrame(rows)
    assert verdicts('F3', arms(), arms(kept=.3), arms(hurt=-.5), arms(kept=-.3)) == '✅✅❌❌'
    assert set(verdicts('F3', arms(hurt=0.), arms(kept=0.))) <= set('≈?')

def test_laws():
    def laws(agree):
        rows = [dict(name=k, seed=s, error=1e-6, control=1., decay=.01, agree=s in agree, vanishes=True)
                for k, s in product(('relu', 'sine'), range(5))]
        return pd.DataFrame(rows)
    assert verdicts('F4', laws(range(5)), laws(range(3)), laws([])) == '✅?❌'

def test_pictures(rng):
    def pictures(random=-.1, swapped=.01, wide=1., reached=True):
        effects = dict(none=(0., 0.), random=(random, wide), swapped=(swapped, 0.))
        rows = []
        for (k, (a, w)), s in product(effects.items(), range(5)):
            rows.append({'model': 'm', 'task.dataset': 'd', 'task.n_train': 9, 'seed': s, 'labels': k,
                         'reached': reached, 'test_accuracy': .5 + a + .005 * (-1)**s * (k == 'random'),
                         'width0': 2**(w + .05 * rng.normal()), 'width1': 2**(w + .05 * rng.normal())})
        return pd.DataFrame(rows)
    options = (-.1,), (0.,), (.1,), (-.1, -.1), (-.1, -.05), (-.1, .01, 1., False)
    assert verdicts('F5', *(pictures(*o) for o in options)) == '✅≈❌❌❌?'
    up, none, down = verdicts('F6', *(pictures(wide=w) for w in (1., 0., -1.)))
    assert (up, down) == ('✅', '❌') and none in '≈?'

def test_minima(rng):
    def minima(error, trace):
        kinds = {'relu he': (0, 0), 'relu he, high': (.2, 1), 'gaussian': (error, trace), 'gaussian low': (0, 0)}
        rows = []
        for (k, (e, t)), i in product(kinds.items(), range(8)):
            fast = k in ('gaussian', 'relu he, high')
            rows.append({'kind': k, 'signal.freqs': str(i), 'seed': i % 4, 'error': .3 + e + .02 * rng.normal(),
                         'centroid0': 1 + fast + .1 * rng.random(), 'trace': 10**(t + .05 * rng.normal()),
                         'top': 10**(t + .05 * rng.normal()), 'left': 1e-9})
        return flatness_pairs(pd.DataFrame(rows).assign(a=.1, lr=1e-4, n=8, lo=0., hi=10.))
    assert verdicts('F7', minima(.3, -1), minima(.3, 1), minima(-.3, -1)) == '✅❌❌'
    assert verdicts('F7', minima(.3, 0)) in '≈?'
