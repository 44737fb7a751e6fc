"""``kvconnect report``: one page about one run, or two compared."""
