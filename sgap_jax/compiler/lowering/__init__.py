"""From concrete index notation and storage to the loop IR."""
