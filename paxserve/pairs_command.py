"""`paxserve pairs`: which choices of two axes go together.

Owns: its arguments. Must not know: how pairs are judged.
"""

import argparse


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    pairs = commands.add_parser("pairs", help="which choices of two axes go together, and why not")
    pairs.add_argument("--all", action="store_true", help="a line for every two choices")
    pairs.set_defaults(act=_pairs)


def _pairs(arguments: argparse.Namespace) -> None:
    from paxserve.pairs import lines, pairs

    found = pairs()
    if arguments.all:
        for pair in found:
            unread = f"{pair.unread} is never asked" if pair.unread else "together"
            print(f"{pair.first} {pair.second}: {pair.why_not or unread}")
        return
    wrong = sum(pair.why_not is not None for pair in found)
    print(f"{len(found) - wrong} of {len(found)} pairs of choices go together, all but these:\n")
    print("\n".join(lines(found)))
