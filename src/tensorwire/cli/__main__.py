"""``python -m tensorwire.cli``."""

from tensorwire.cli import main

main()
