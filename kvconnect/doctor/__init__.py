"""What ``kvconnect doctor`` finds out: whether things can work here, and how fast they are."""
