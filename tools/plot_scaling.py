"""Throughput and efficiency against device count, out of any number of scaling files.

    python tools/plot_scaling.py ours.json somaspeed.json --output scaling

writes scaling.png and scaling.svg, prints a Markdown table and writes it to scaling.md.
"""

import argparse
import sys
from pathlib import Path

from somaspeed_jax.scaling import plot, schema


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="scaling files of the same schema, SomaSpeed's or ours")
    parser.add_argument("--output", type=Path, default=Path("scaling"), help="path of the results without a suffix")
    arguments = parser.parse_args()
    try:
        files = [schema.read(path) for path in arguments.files]
        names = [path.stem for path in arguments.files]
        written = plot.save(plot.figure(files, names), arguments.output)
    except (ValueError, OSError) as error:
        print(f"plot_scaling: {error}", file=sys.stderr)
        return 1
    text = plot.table(files, names)
    markdown = arguments.output.with_name(arguments.output.name + ".md")
    markdown.write_text(text, "utf-8")
    print(text)
    print("wrote", *written, markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
