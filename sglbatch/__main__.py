"""``python -m sglbatch``."""

from sglbatch.cli import main

main()
