"""Measure the server: `python -m benchmarks SCENARIO [options]`, or `all`.

Each scenario writes NAME.json, NAME.md and NAME.png into benchmarks/results, and `all` the summary, too. `all` goes on
where it was cut off: a scenario that has a record of this commit is left out, unless --again is given.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from benchmarks.scenarios import SCENARIOS
from benchmarks.suite import RESULTS, check_folder, measure, measure_all, summarise

_OTHERS = """\
beside these, with records of their own: python -m benchmarks.load_generator URL, benchmarks.startup, benchmarks.load,
benchmarks.tower"""


def main() -> int:
    parser = _parser()
    args = parser.parse_args()
    # A world that was started is ended in `finally`, which SIGTERM by itself would pass over.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    results: Path = args.results
    try:
        check_folder(results, is_made=args.scenario != "summary")
    except OSError as error:
        parser.error(f"argument --results: {results}: {error.strerror}")
    if args.scenario == "summary":
        print(summarise(results).read_text())
        return 0
    if args.scenario == "all":
        failed = measure_all(args.only or list(SCENARIOS), quick=args.quick, again=args.again, results=results)
        print(f"failed: {', '.join(failed)}" if failed else f"{results}/SUMMARY.md", file=sys.stderr)
        return int(bool(failed))
    scenario = SCENARIOS[args.scenario]
    measure(scenario, scenario.options(args, quick=args.quick), quick=args.quick, results=results)
    print((results / f"{scenario.name}.md").read_text())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=_OTHERS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="scenario", required=True, metavar="SCENARIO")
    everything = commands.add_parser("all", help="every scenario, and the summary")
    everything.add_argument("--only", nargs="+", choices=list(SCENARIOS), metavar="SCENARIO")
    everything.add_argument("--again", action="store_true", help="also what has a record of this commit")
    summary = commands.add_parser("summary", help="write pages and summary anew from the records, measure nothing")
    scenarios = [commands.add_parser(name, help=scenario.about) for name, scenario in SCENARIOS.items()]
    for command, scenario in zip(scenarios, SCENARIOS.values(), strict=True):
        scenario.add_flags(command)
    for command in (everything, *scenarios):
        command.add_argument("--quick", action="store_true", help="see that it works; its numbers say little")
    for command in (everything, summary, *scenarios):
        command.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")
    return parser


if __name__ == "__main__":
    sys.exit(main())
