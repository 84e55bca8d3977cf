"""Measuring: suites of problems, our kernels and their peers on them, records, and what is drawn from these.

`tilewise bench` and its sisters are the way in; `docs/benchmarking.md` says how figures come about.
"""
