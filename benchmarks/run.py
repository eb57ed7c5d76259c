"""All benchmarks, then the tables and the plot: python -m benchmarks.run [--quick]"""

import argparse
import pathlib

from benchmarks import (
    bench_attention,
    bench_dlmc,
    bench_gradient,
    bench_messages,
    bench_sddmm,
    bench_softmax,
    bench_spmm,
    summary,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two minutes; writes no file")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the CSV files")
    parser.add_argument("--tag", help="problems with this tag")
    args = parser.parse_args()
    words = ["--quick"] if args.quick else []
    words += ["--out", str(args.out)] if args.out else []
    words += ["--tag", args.tag] if args.tag else []
    benches = (bench_spmm, bench_sddmm, bench_gradient, bench_softmax, bench_messages, bench_dlmc)
    benches += (bench_attention,)
    for bench in benches:
        bench.main(words)
    if not args.quick and not args.out and not args.tag:
        summary.main([])


if __name__ == "__main__":
    main()
