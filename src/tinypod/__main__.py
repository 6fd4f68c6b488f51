"""`python -m tinypod`, for where the console script is not installed."""

from tinypod.cli import main

main()
