"""python -m shoal.cli: the command line without the installed script."""

from shoal.cli import main

main()
