# SPDX-License-Identifier: Apache-2.0

from backfold.cli import main

main()
