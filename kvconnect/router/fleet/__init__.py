"""The engines behind the router: membership, health, load, cached prefixes, pairing."""
