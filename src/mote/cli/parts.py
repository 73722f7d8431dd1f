"""What the parts of the command line share."""

import argparse
import sys


def print_line(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Pairs(argparse.Action):
    """Collect NAME=VALUE into a dict."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Take one pair."""
        name, equals, value = str(values).partition("=")
        if not equals or not name:
            parser.error(f"{option_string} {values!r}: expected {self.metavar}")
        pairs = getattr(namespace, self.dest) or {}
        setattr(namespace, self.dest, {**pairs, name: value})
