"""Write the corpus: ``python -m tests.hostile --out DIR``."""

import argparse
from pathlib import Path

from tests.hostile.corpus import write_corpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    print(f"{len(write_corpus(out))} cases in {out}")


if __name__ == "__main__":
    main()
