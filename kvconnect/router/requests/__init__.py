"""What clients ask, and what engines are asked for them and answer. Pure."""
