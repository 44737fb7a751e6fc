"""What every agent needs that talks to workers of other engines: hand-offs and sharing."""
