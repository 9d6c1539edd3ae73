"""`python -m bench NAME [options]` runs bench/NAME.py; without a name, lists what there is."""

import importlib
import sys
from pathlib import Path


def main() -> int:
    names = sorted(
        path.stem
        for path in Path(__file__).parent.glob("*.py")
        if not path.stem.startswith("_") and "def main(" in path.read_text()
    )
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        print(f"usage: python -m bench {{{','.join(names)}}} [options]", file=sys.stderr)
        return 2
    importlib.import_module(f"bench.{sys.argv[1]}").main(sys.argv[2:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
