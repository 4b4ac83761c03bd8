"Run all rules and print one report; exit code 1 where there is a finding"

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lint.house  # noqa: E402  (the folder above must be on the path first)
import lint.pages  # noqa: E402, F401
from lint.common import RULES  # noqa: E402


def report(rules):
    "Findings of all rules as lines"
    lines = []
    for check in rules:
        findings = list(check())
        if not findings:
            continue
        lines.append(f'{check.__name__}: {check.__doc__}')
        lines += [f'  {place}: {advice}' for place, advice in findings]
    return lines


def main():
    parser = argparse.ArgumentParser(
        description='Check notebooks, modules and pages against the rules of CONTRIBUTING.md'
    )
    parser.add_argument('rules', nargs='*', help='names of rules; default: all')
    wanted = parser.parse_args().rules
    unknown = set(wanted) - {check.__name__ for check in RULES}
    if unknown:
        parser.error(f'no rule is called {sorted(unknown)}; there are {[check.__name__ for check in RULES]}')
    chosen = [check for check in RULES if not wanted or check.__name__ in wanted]
    lines = report(chosen)
    print('\n'.join(lines) or f'{len(chosen)} rules, no findings')
    return bool(lines)


if __name__ == '__main__':
    sys.exit(main())
