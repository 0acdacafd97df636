"""`make bench`: what the operator costs, as ratios against the same writes without it, measured in the same run."""
