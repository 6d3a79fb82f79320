"""`python -m trtkv.integrations.dynamo ENGINE`: what `trtkv serve --dynamo` runs."""

import sys

from trtkv.cli import main

main(["serve", "--dynamo", *sys.argv[1:]])
